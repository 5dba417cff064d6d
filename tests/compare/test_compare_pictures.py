"""Comparisons of pictures on a tiny random pixel DiT: files, numbers, methods, interruption, resuming, refusals."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from diffsieve.compare import CompareConfig, compare, recorded
from diffsieve.compare.evaluate import EvaluateConfig, evaluate
from diffsieve.compare.folder import item_name
from diffsieve.compare.mask_file import read_masks
from diffsieve.compare.methods import TRAINED, UNTRAINED
from diffsieve.compare.selection_file import read_selections
from diffsieve.errors import DiffsieveError, UserInputError
from diffsieve.eval import psnr, ssim
from diffsieve.kernels.llsa import llsa_selection_map
from diffsieve.kernels.orders import frame_hilbert_order
from diffsieve.processors import LLSAConfig, apply_sparse_attention, recorded_selections
from tests import tiny_pixels
from tests.compare.test_compare import Interrupt, files_of, parents

PICTURES = {"dense.png", "sparse.png", "side_by_side.png", "difference.png", "difference_map.png", "mask.png"}
FILES = PICTURES | {"metrics.json"}


@pytest.fixture
def pipe():
    return tiny_pixels.pipeline()


@pytest.fixture
def small(tmp_path):
    config = CompareConfig(steps=3, prompt=("objects",), out=tmp_path / "out")
    return lambda **changes: dataclasses.replace(config, **changes)


def raw(config, report):
    folder = config.out / report["clips"][0]["folder"]
    return [torch.from_numpy(np.load(folder / f"{side}_frames.npz")["frames"]) for side in ("dense", "sparse")]


def file_of(config, clip, key):
    return config.out / clip["folder"] / clip["files"][key]


def test_full_attention_against_the_sparse_attention_that_the_model_was_trained_with(pipe, small):
    config = small(save_frames=True)
    processors = dict(pipe.transformer.attn_processors)
    report = compare(config, pipe=pipe)
    assert pipe.transformer.attn_processors == processors, "the pipeline must be given back as it came"
    name = item_name(0, "Objects", 0)
    kept = {"dense_frames.npz", "sparse_frames.npz"}
    assert files_of(config.out) == {"report.html", "report.json", "settings.json"} | parents(FILES | kept, name)
    assert json.loads((config.out / "report.json").read_text(encoding="utf-8")) == report
    assert report["pictures"] is True
    assert report["prompt"] == ["Objects"]
    assert report["notes"] == [TRAINED]

    dense, sparse = raw(config, report)
    noise = {"num_inference_steps": 3}
    own = tiny_pixels.generate(pipe, "objects", **noise)
    full = tiny_pixels.generate(tiny_pixels.pipeline(attention_method="full"), "objects", **noise)
    assert torch.equal(sparse, own), "the sparse side is the model as it is"
    torch.testing.assert_close(dense, full, rtol=1e-4, atol=1e-5)

    (clip,) = report["clips"]
    assert clip["metrics"]["psnr"]["mean"] == psnr(dense, sparse).mean < 100
    assert clip["metrics"]["ssim"]["mean"] == ssim(dense, sparse).mean < 1
    assert (clip["sparsity"]["steps_dense"], clip["sparsity"]["steps_total"]) == (0, 3)
    assert clip["sparsity"]["density_overall"] == pytest.approx((2 * 8 + 32) / 256)  # 2 blocks of 8, 32 means
    assert [len(clip["seconds"][side]["steps"]) for side in ("dense", "sparse")] == [3, 3]
    settings = report["settings"]
    assert (settings["method"], settings["attention"]["topk"], settings["attention"]["order"]) == ("llsa", 2, "hilbert")
    assert (settings["frames"], settings["fps"], settings["height"], settings["width"]) == (1, None, 16, 16)

    folder = config.out / name
    for side, frames in (("dense", dense), ("sparse", sparse)):
        with Image.open(folder / f"{side}.png") as image:
            expected = (frames[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            assert np.array_equal(np.asarray(image), expected)
    with Image.open(folder / "difference_map.png") as image:
        assert image.size == (16, 16)
    for picture in ("side_by_side", "difference", "mask"):
        with Image.open(folder / f"{picture}.png") as image:
            assert min(image.size) > 200
    page = (config.out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|<video|over frames", page)
    assert page.count("<img") == 3
    assert "LLSA top 2 against dense attention" in page


def test_ba_att_on_a_model_in_hilbert_order(pipe, small):
    config = small(method="ba-att", block_size=16, min_tokens=0, warmup=1, save_masks=True, preset="paper")
    report = compare(config, pipe=pipe)
    (clip,) = report["clips"]
    assert 0 < clip["sparsity"]["density_sparse_steps"] < clip["sparsity"]["density_overall"] < 1
    assert clip["sparsity"]["steps_dense"] == 1
    assert clip["metrics"]["psnr"]["mean"] < 100
    assert "the model was trained with LLSA top 2 in blocks of 8" in report["notes"][-1]
    masks = read_masks(config.out / clip["folder"] / clip["files"]["masks"])
    assert masks.grid_thw == (1, 16, 16)
    exact = compare(small(method="ba-att", sparsity=0.0, block_size=16, min_tokens=0, warmup=1,
                          out=config.out.parent / "exact"), pipe=pipe)  # fmt: skip
    assert exact["clips"][0]["metrics"]["psnr"]["mean"] > 90, "keeping all is full attention"


@pytest.mark.parametrize(
    ("options", "method", "note"),
    [
        ({"attention_method": "full"}, "ba-att", None),
        ({"attention_method": "topk"}, "llsa", TRAINED),
        ({}, "llsa", TRAINED),
    ],
    ids=["full", "topk", "llsa"],
)
def test_the_method_follows_the_training(small, options, method, note):
    report = compare(small(steps=2), pipe=tiny_pixels.pipeline(**options))
    assert report["settings"]["method"] == method
    assert (note in report["notes"]) == (note is not None)


def test_settings_that_differ_from_the_training_are_noted(pipe, small, tmp_path):
    other = compare(small(method="llsa", topk=4), pipe=pipe)
    assert other["notes"] == ["the model was trained with LLSA top 2 in blocks of 8: other settings change its output, "
                              "as dense attention does"]  # fmt: skip
    assert other["settings"]["attention"]["block_size"] == 8
    never = compare(small(method="llsa", out=tmp_path / "full"), pipe=tiny_pixels.pipeline(attention_method="full"))
    assert never["notes"] == [UNTRAINED]


@pytest.mark.parametrize("levels", [1, 2])
def test_selections_are_what_the_run_chose(small, levels):
    pipe = tiny_pixels.pipeline(levels=levels)
    config = small(save_masks=True)
    report = compare(config, pipe=pipe)
    clip = report["clips"][0]
    kept = read_selections(config.out / clip["folder"] / clip["files"]["selections"])
    assert kept.layer_names() == ["transformer.blocks.0", "transformer.blocks.1"]
    assert [kept.steps_of(layer) for layer in kept.layer_names()] == [[0, 1, 2]] * 2
    assert (kept.heads, kept.grid_thw, kept.block_size, len(kept.indices)) == (2, (1, 16, 16), 8, levels)

    apply_sparse_attention(pipe, LLSAConfig(block_size=8, topk=2, levels=levels, record_masks=(1,)))
    tiny_pixels.generate(pipe, num_inference_steps=3)
    (last,) = recorded_selections(pipe)
    order = frame_hilbert_order((1, 16, 16))
    for head, token in ((0, (0, 0, 0)), (1, (0, 5, 11))):
        expected = llsa_selection_map(last.indices, [token[1] * 16 + token[2]], length=256, block_size=8, order=order)
        found = kept.finest("transformer.blocks.1", 2, head, token)
        assert found.shape == (1, 16, 16)
        assert np.array_equal(found.reshape(-1), expected[0, head, 0].numpy())
        assert (found == 0).sum() == 16, "two blocks of 8 are seen token by token"
        matrix = kept.mask("transformer.blocks.1", 2, head)
        assert matrix.shape == (32, 32)
        assert (matrix.sum(axis=1) == 2).all()
    for place in (("nowhere", 2, 0), ("transformer.blocks.1", 3, 0), ("transformer.blocks.1", 2, 2)):
        with pytest.raises(UserInputError):
            kept.mask(*place)
        with pytest.raises(UserInputError):
            kept.finest(*place, (0, 0, 0))
    with pytest.raises(UserInputError, match=r"row must be in \[0, 15\], got 16"):
        kept.finest("transformer.blocks.1", 2, 0, (0, 16, 0))
    assert kept.thinned(1).steps_of("transformer.blocks.0") == [2]


def test_the_mask_is_drawn_where_memory_keeps_other_layers(pipe, small, monkeypatch):
    monkeypatch.setattr(recorded, "MAX_BYTES", 1)
    report = compare(small(save_masks=True, mask_layer=0), pipe=pipe)
    clip = report["clips"][0]
    kept = read_selections(file_of(small(), clip, "selections"))
    assert (kept.layer_names(), kept.steps_of("transformer.blocks.1")) == (["transformer.blocks.1"], [2])
    assert file_of(small(), clip, "mask").is_file()


def test_classes_times_seeds_and_the_rest_by_resuming(pipe, small):
    config = small(prompt=("objects", "0"), seed=(3, 4))
    with pytest.raises(KeyboardInterrupt):
        compare(config, pipe=pipe, progress=Interrupt(lambda p: (p.item, p.run, p.step) == (1, "sparse", 1)))
    first, second = item_name(0, "Objects", 3), item_name(0, "Objects", 4)
    assert files_of(config.out) == {"settings.json"} | parents(FILES, first) | parents({"dense_frames.npz"}, second)
    before = {path: path.stat().st_mtime_ns for path in (config.out / first).iterdir()}
    again = Interrupt(lambda p: False)
    report = compare(config, pipe=pipe, resume=True, progress=again)
    assert {path: path.stat().st_mtime_ns for path in (config.out / first).iterdir()} == before
    assert (1, "dense") not in {(p.item, p.run) for p in again.seen if p.stage == "denoise"}
    assert [(clip["prompt"], clip["seed"]) for clip in report["clips"]] == [
        ("Objects", 3), ("Objects", 4), ("Animals & Nature", 3), ("Animals & Nature", 4),
    ]  # fmt: skip
    assert len({clip["metrics"]["psnr"]["mean"] for clip in report["clips"]}) == 4
    assert len(files_of(config.out)) == 3 + 4 * len(FILES)
    with pytest.raises(UserInputError, match="method must be 'llsa'"):
        compare(dataclasses.replace(config, method="ba-att"), pipe=pipe, resume=True)
    replaced = compare(small(seed=(9,)), pipe=pipe, overwrite=True)
    names = {path.parent.name for path in config.out.rglob("*.png")}
    assert names == {replaced["clips"][0]["folder"]}


def test_the_dense_picture_is_shared_by_comparisons_of_all_methods(pipe, small, tmp_path):
    seen = []
    for out, changes in (("a", {}), ("b", {"method": "llsa", "topk": 1}), ("c", {"method": "ba-att", "min_tokens": 0})):
        seen.clear()
        config = small(out=tmp_path / out, **changes)
        compare(config, pipe=pipe, progress=seen.append, dense_clips=tmp_path / "dense")
        assert {report.run for report in seen} == {"dense", "sparse"} if out == "a" else {"sparse"}


def test_a_model_without_classes(small):
    pipe = tiny_pixels.pipeline(num_classes=0)
    report = compare(small(prompt=()), pipe=pipe)
    assert report["clips"][0]["folder"] == "001-picture-seed0"
    assert compare(small(prompt=()), pipe=pipe, resume=True)["clips"] == report["clips"]
    with pytest.raises(UserInputError, match="prompt must be left out for a model without classes, got 'cats'"):
        compare(small(prompt=("cats",)), pipe=pipe, overwrite=True)


def test_any_size_and_the_noise_floor(pipe, small):
    report = compare(small(height=13, width=22, floor=True), pipe=pipe)
    clip = report["clips"][0]
    with Image.open(small().out / clip["folder"] / "sparse.png") as image:
        assert image.size == (22, 13)
    assert clip["files"]["floor"] == "floor.png"
    assert report["floor"]["psnr"]["mean"] > 90


def test_nan_is_an_error_that_leaves_no_picture(pipe, small):
    torch.nn.init.constant_(pipe.transformer.proj_out.bias, float("nan"))
    with pytest.raises(DiffsieveError, match=r"the dense picture must have finite frames, got NaN"):
        compare(small(), pipe=pipe)
    assert files_of(small().out) == {"settings.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ("dinosaurs",)}, "class_labels must be .*, got 'dinosaurs'"),
        ({"prompt": ("objects", "2")}, "prompt must not name a value twice, got 'Objects', 'Objects'"),
        ({"frames": 5}, "frames must be left out for a model of pictures, got 5"),
        ({"fps": 5}, "fps must be left out for a model of pictures, got 5"),
        ({"negative_prompt": "blur"}, "negative_prompt must be left out for a model of pictures, got 'blur'"),
        ({"height": 5000}, r"height must be a whole number of pixels in \[1, 4096\], got 5000"),
        ({"sparsity": 0.75}, "sparsity has no meaning for llsa, got 0.75"),
        ({"method": "ba-att", "topk": 2}, "topk has no meaning for ba-att"),
        ({"mask_layer": 7}, r"mask_layer must be a sparse layer of the model, one of \[0, 1\], got 7"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_a_model_of_pictures_cannot_do_is_refused_before_anything_is_written(pipe, small, changes, message):
    with pytest.raises(UserInputError, match=message):
        compare(small(**changes), pipe=pipe)
    assert not small().out.exists()


def test_levels_that_do_not_fit_are_refused_before_anything_is_written(small):
    with pytest.raises(UserInputError, match="levels must be at most 1 for 256 tokens in blocks of 256"):
        compare(small(method="llsa", block_size=256), pipe=tiny_pixels.pipeline(levels=2))
    assert not small().out.exists()


@pytest.mark.parametrize("save_frames", [True, False], ids=["raw", "png"])
def test_eval_reads_comparisons_of_pictures(pipe, small, tmp_path, save_frames):
    config = small(seed=(0, 1), save_frames=save_frames)
    made = compare(config, pipe=pipe)
    report = evaluate(EvaluateConfig(config.out, (), tmp_path / "eval", metrics=("psnr",), device="cpu"))
    (run,) = report["runs"]
    assert [clip["seed"] for clip in run["clips"]] == [0, 1]
    for clip, own in zip(run["clips"], made["clips"], strict=True):
        # Eight bits move the figure a little.
        tolerance = 1e-6 if save_frames else 0.05
        assert clip["metrics"]["psnr"]["mean"] == pytest.approx(own["metrics"]["psnr"]["mean"], abs=tolerance)
