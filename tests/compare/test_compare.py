"""Whole comparisons on a tiny real Wan pipeline: files, numbers, interruption, resuming, refusals."""

import dataclasses
import json
import math
import re

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

from diffsieve.compare import CompareConfig, Progress, compare
from diffsieve.compare.folder import item_name
from diffsieve.compare.methods import UNTRAINED
from diffsieve.compare.selection_file import read_selections
from diffsieve.errors import BackendUnavailableError, DiffsieveError, UserInputError
from diffsieve.eval import psnr, ssim
from diffsieve.processors import BAAttConfig, apply_sparse_attention
from tests.tiny import wan_image_pipeline, wan_pipeline

FILES = {"dense.mp4", "sparse.mp4", "side_by_side.mp4", "difference.mp4", "difference.png", "mask.png"} | {
    "metrics.json"
}


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def parents(names, folder):
    return {f"{folder}/{name}" for name in names}


class Interrupt:
    """Progress that stops the run, as Ctrl-C does, at the first report that `when` accepts."""

    def __init__(self, when):
        self.when = when
        self.seen = []

    def __call__(self, progress: Progress) -> None:
        self.seen.append(progress)
        if self.when(progress):
            raise KeyboardInterrupt


def test_a_comparison_writes_what_it_says(pipe, small):
    config = small(save_frames=True)
    processors = dict(pipe.transformer.attn_processors)
    report = compare(config, pipe=pipe, command=["diffsieve", "compare"])
    name = item_name(0, "a cat moves left", 0)
    raw = {"dense_frames.npz", "sparse_frames.npz"}
    assert files_of(config.out) == {"report.html", "report.json", "settings.json"} | parents(FILES | raw, name)
    assert json.loads((config.out / "report.json").read_text(encoding="utf-8")) == report

    (clip,) = report["clips"]
    folder = config.out / clip["folder"]
    dense, sparse = (torch.from_numpy(np.load(folder / f"{run}_frames.npz")["frames"]) for run in ("dense", "sparse"))
    assert dense.shape == sparse.shape == (9, 3, 16, 32)
    assert clip["metrics"]["psnr"]["mean"] == psnr(dense, sparse).mean < 100
    assert clip["metrics"]["ssim"]["mean"] == ssim(dense, sparse).mean < 1
    assert len(clip["metrics"]["psnr"]["per_frame"]) == 9

    assert clip["sparsity"]["steps_total"] == 4
    assert clip["sparsity"]["steps_dense"] == 1
    # Two of three layers skip: the other one is dense by default.
    assert 0 < clip["sparsity"]["density_sparse_steps"] < clip["sparsity"]["density_overall"] < 1
    assert clip["sparsity"]["orders"]
    assert len(clip["seconds"]["dense"]["steps"]) == len(clip["seconds"]["sparse"]["steps"]) == 4
    assert clip["notes"] == report["notes"] == []
    # 16 x 32 pixels are too few for both, with or without weights.
    for metric in ("ms_ssim", "lpips[alex]"):
        assert clip["metrics"][metric]["mean"] is None
        assert clip["metrics"][metric]["reason"]
    page = (config.out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link", page)
    assert page.count("<video") == 1
    assert page.count("<img") == 2
    assert f"{clip['metrics']['psnr']['mean']:.2f}" in page
    assert report["summary"]["psnr"] == {"mean": clip["metrics"]["psnr"]["mean"], "std": None, "n": 1}
    assert report["settings"]["attention"]["block_size"] == 5
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["environment"]["dtype"] == report["environment"]["vae_dtype"] == "float32"
    assert report["command"] == ["diffsieve", "compare"]

    sizes = {"dense": (32, 16), "sparse": (32, 16), "difference": (32, 16), "side_by_side": None}
    for video, size in sizes.items():
        frames, _ = imageio_ffmpeg.count_frames_and_secs(str(folder / f"{video}.mp4"))
        meta = next(imageio_ffmpeg.read_frames(str(folder / f"{video}.mp4")))
        assert frames == 9
        assert size is None or meta["size"] == size
    for picture in ("difference", "mask"):
        with Image.open(folder / f"{picture}.png") as image:
            image.load()
            assert min(image.size) > 200
    assert pipe.transformer.attn_processors == processors, "the pipeline must be given back as it came"


def test_the_dense_clip_is_shared_by_comparisons_that_differ_in_the_sparse_attention_alone(pipe, small, tmp_path):
    seen = []
    shared = tmp_path / "dense"

    def run(out, **changes):
        seen.clear()
        return compare(small(out=tmp_path / out, **changes), pipe=pipe, progress=seen.append, dense_clips=shared)

    first = run("a")
    assert {report.run for report in seen} == {"dense", "sparse"}
    second = run("b", sparsity=0.8, warmup=2, block_size=6)
    assert {report.run for report in seen} == {"sparse"}
    assert second["clips"][0]["seconds"]["dense"] == first["clips"][0]["seconds"]["dense"]
    assert second["clips"][0]["metrics"]["psnr"]["mean"] != first["clips"][0]["metrics"]["psnr"]["mean"]
    assert "dense_frames.npz" not in {path.name for path in (tmp_path / "b").rglob("*")}
    alone = compare(small(out=tmp_path / "alone", sparsity=0.8, warmup=2, block_size=6), pipe=pipe)
    assert alone["clips"][0]["metrics"] == second["clips"][0]["metrics"]
    for number, changes in enumerate(({"seed": (1,)}, {"steps": 3}, {"width": 48}, {"prompt": ("a dog",)})):
        run(f"other{number}", **changes)
        assert {report.run for report in seen} == {"dense", "sparse"}, changes
    assert len(list(shared.iterdir())) == 5


def test_llsa_is_compared_and_says_that_the_model_was_not_trained_for_it(pipe, small):
    processors = dict(pipe.transformer.attn_processors)
    config = small(method="llsa", sparsity=None, warmup=None, min_tokens=None, block_size=4, topk=2, save_masks=True)
    report = compare(config, pipe=pipe)
    (clip,) = report["clips"]
    assert clip["notes"] == report["notes"] == [UNTRAINED]
    assert clip["sparsity"]["density_overall"] == pytest.approx((2 * 4 + 6) / 24)  # 2 blocks of 4, and 6 pooled tokens
    assert (clip["sparsity"]["steps_dense"], clip["sparsity"]["steps_total"]) == (0, 4)
    assert clip["metrics"]["psnr"]["mean"] < 100
    assert {"mask", "selections"} <= clip["files"].keys()
    kept = read_selections(config.out / clip["folder"] / clip["files"]["selections"])
    assert (kept.grid_thw, kept.layer_names()[-1]) == ((3, 2, 4), "transformer.blocks.2")
    assert "LLSA top 2" in (config.out / "report.html").read_text(encoding="utf-8")
    assert pipe.transformer.attn_processors == processors
    exact = compare(small(method="llsa", sparsity=None, warmup=None, min_tokens=None, block_size=32,
                          out=config.out.parent / "exact"), pipe=pipe)  # fmt: skip
    assert exact["clips"][0]["metrics"]["psnr"]["mean"] > 90, "a sequence within one block attends to all of it"


def test_both_runs_start_from_the_same_noise(pipe, small):
    # Without sparsity the second run must repeat the first to rounding: anything else would be another noise.
    report = compare(small(sparsity=0.0, seed=(3,)), pipe=pipe)
    (clip,) = report["clips"]
    assert clip["sparsity"]["density_sparse_steps"] == 1.0
    assert clip["metrics"]["psnr"]["mean"] > 90


def test_prompts_times_seeds(pipe, small):
    report = compare(small(prompt=("a cat", "a dog"), seed=(0, 5)), pipe=pipe)
    assert [(clip["prompt"], clip["seed"]) for clip in report["clips"]] == [
        ("a cat", 0),
        ("a cat", 5),
        ("a dog", 0),
        ("a dog", 5),
    ]
    values = [clip["metrics"]["psnr"]["mean"] for clip in report["clips"]]
    assert len(set(values)) == 4
    mean = sum(values) / 4
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 3)
    assert report["summary"]["psnr"] == pytest.approx({"mean": mean, "std": deviation, "n": 4})


def test_progress_counts_every_step(pipe, small):
    seen = []
    compare(small(), pipe=pipe, progress=seen.append)
    denoise = [(report.run, report.step) for report in seen if report.stage in ("denoise", "decode")]
    assert denoise == [(run, step) for run in ("dense", "sparse") for step in range(5)]
    assert {(report.item, report.items, report.steps) for report in seen} == {(0, 1, 4)}
    assert seen[-1].stage == "done"


@pytest.mark.parametrize("run", ["dense", "sparse"])
def test_an_interrupted_run_keeps_what_is_complete_and_resumes(pipe, small, run):
    config = small(prompt=("a cat", "a dog"))
    processors = dict(pipe.transformer.attn_processors)
    with pytest.raises(KeyboardInterrupt):
        compare(config, pipe=pipe, progress=Interrupt(lambda p: (p.item, p.run, p.step) == (1, run, 2)))
    assert pipe.transformer.attn_processors == processors
    first, second = item_name(0, "a cat", 0), item_name(1, "a dog", 0)
    half = {"dense_frames.npz"} if run == "sparse" else set()
    assert files_of(config.out) == {"settings.json"} | parents(FILES, first) | parents(half, second)
    before = {path: path.stat().st_mtime_ns for path in (config.out / first).iterdir()}

    again = Interrupt(lambda p: False)
    report = compare(config, pipe=pipe, resume=True, progress=again)
    assert files_of(config.out) == {"settings.json", "report.html", "report.json"} | parents(FILES, first) | parents(
        FILES, second
    )
    assert {path: path.stat().st_mtime_ns for path in (config.out / first).iterdir()} == before
    generated = {(p.item, p.run) for p in again.seen if p.stage == "denoise"}
    assert generated == {(1, "sparse")} | ({(1, "dense")} if run == "dense" else set())

    whole = compare(dataclasses.replace(config, out=config.out.parent / "whole"), pipe=pipe)
    for resumed, uninterrupted in zip(report["clips"], whole["clips"], strict=True):
        assert resumed["metrics"] == uninterrupted["metrics"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04cut off"], ids=["empty", "cut-off"])
def test_a_damaged_dense_half_is_made_again(pipe, small, content):
    config = small()
    with pytest.raises(KeyboardInterrupt):
        compare(config, pipe=pipe, progress=Interrupt(lambda p: (p.run, p.step) == ("sparse", 2)))
    (config.out / item_name(0, config.prompt[0], 0) / "dense_frames.npz").write_bytes(content)
    again = Interrupt(lambda p: False)
    compare(config, pipe=pipe, resume=True, progress=again)
    assert {p.run for p in again.seen if p.stage == "denoise"} == {"dense", "sparse"}


def test_a_finished_run_resumes_to_the_same_report(pipe, small):
    first = compare(small(), pipe=pipe)
    again = compare(small(), pipe=pipe, resume=True)
    assert again["clips"] == first["clips"]
    assert again["summary"] == first["summary"]


def test_a_resumed_run_may_have_more_seeds(pipe, small):
    first = compare(small(), pipe=pipe)
    again = compare(small(seed=(0, 1)), pipe=pipe, resume=True)
    assert again["clips"][0] == first["clips"][0]
    assert [clip["seed"] for clip in again["clips"]] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"sparsity": 0.6}, "sparsity must be 0.5"),
        ({"steps": 5}, "steps must be 4"),
        ({"warmup": 0.25}, "warmup must be 1"),
        ({"preset": "paper"}, "preset must be None"),
        ({"prompt": ("a dog",)}, "prompt must begin with"),
        ({"seed": (1,)}, "seed must hold"),
        ({"mask_layer": 2}, "mask_layer must be 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_settings_do_not_resume(pipe, small, changes, name):
    with pytest.raises(KeyboardInterrupt):
        compare(small(), pipe=pipe, progress=Interrupt(lambda p: p.step == 1))
    with pytest.raises(UserInputError, match=name):
        compare(small(**changes), pipe=pipe, resume=True)


def test_other_weights_do_not_resume(pipe, small):
    with pytest.raises(KeyboardInterrupt):
        compare(small(), pipe=pipe, progress=Interrupt(lambda p: p.step == 1))
    with torch.no_grad():
        pipe.transformer.proj_out.weight[0, 0] += 1e-3
    with pytest.raises(UserInputError, match="weights must be"):
        compare(small(), pipe=pipe, resume=True)


def test_an_occupied_folder_is_refused_and_overwrite_replaces_it(pipe, small):
    compare(small(), pipe=pipe)
    with pytest.raises(UserInputError, match="resume continues it"):
        compare(small(), pipe=pipe)
    report = compare(small(seed=(4,)), pipe=pipe, overwrite=True)
    assert {path.parent.name for path in (small().out).rglob("*.mp4")} == {report["clips"][0]["folder"]}


def test_a_warmup_that_covers_all_steps_is_said_clearly(pipe, small):
    report = compare(small(warmup=4), pipe=pipe)
    (note,) = report["notes"]
    assert "all 4 steps ran dense" in note
    assert "both clips are the same computation" in note
    (clip,) = report["clips"]
    assert clip["metrics"]["psnr"]["mean"] == 100.0
    assert clip["metrics"]["psnr"]["identical_frames"] == 9
    assert clip["sparsity"]["density_overall"] == 1.0
    assert "mask" not in clip["files"]
    json.dumps(report, allow_nan=False)


def test_a_short_sequence_runs_dense_and_says_so(pipe, small):
    report = compare(small(min_tokens=1000), pipe=pipe)
    assert "ran dense" in report["notes"][0]
    assert report["clips"][0]["sparsity"]["steps_dense"] == 4


def test_nan_is_an_error_that_leaves_no_clip(pipe, small):
    with torch.no_grad():
        pipe.transformer.proj_out.weight.fill_(math.nan)
    with pytest.raises(DiffsieveError, match=r"the dense clip must have finite frames, got NaN .* in 9 of 9"):
        compare(small(), pipe=pipe)
    assert files_of(small().out) == {"settings.json"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 10}, "frames must be a multiple of 4 plus 1, such as 9 or 13, got 10"),
        ({"height": 20}, "height must be a multiple of 16, such as 16 or 32, got 20"),
        ({"width": 4}, "width must be a multiple of 16, such as 16 or 32, got 4"),
        ({"frames": 133}, "frames must need at most 32 positions in this model, got 34"),
        ({"mask_layer": 0}, "mask_layer must be a sparse layer"),
        ({"mask_layer": 9}, "mask_layer must be a sparse layer"),
        ({"device": "quantum"}, "device must be"),
        ({"dtype": "bfloat16"}, "dtype must be float32, that of the given pipeline"),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_what_the_model_cannot_do_is_refused_before_anything_is_written(pipe, small, changes, message):
    with pytest.raises(UserInputError, match=message):
        compare(small(**changes), pipe=pipe)
    assert not small().out.exists()


def test_a_backend_that_cannot_run_is_refused_before_anything_is_written(pipe, small):
    if torch.cuda.is_available():
        pytest.skip("checks a machine without a CUDA GPU")
    with pytest.raises(BackendUnavailableError, match="triton"):
        compare(small(backend="triton"), pipe=pipe)
    assert not small().out.exists()


def test_other_pipelines_are_refused(small):
    with pytest.raises(UserInputError, match="got WanImageToVideoPipeline, which also needs image"):
        compare(small(), pipe=wan_image_pipeline())
    broken = wan_pipeline()
    broken.transformer = None
    with pytest.raises(UserInputError, match="with a transformer"):
        compare(small(), pipe=broken)


def test_a_pipeline_that_is_sparse_already_is_refused(pipe, small):
    apply_sparse_attention(pipe, BAAttConfig())
    with pytest.raises(UserInputError, match="pipe must be dense"):
        compare(small(), pipe=pipe)


def test_options_that_the_command_line_has_not(pipe, small):
    attention = BAAttConfig(sparsity=0.5, order="hilbert", block_size=5, min_tokens=0, warmup_steps=1)
    report = compare(small(), pipe=pipe, attention=attention)
    assert set(report["clips"][0]["sparsity"]["orders"]["transformer.blocks.1"]) == {"hilbert"}
    assert report["settings"]["attention"]["order"] == "hilbert"


def test_two_transformers(small):
    report = compare(small(), pipe=wan_pipeline(two=True))
    layers = report["clips"][0]["sparsity"]["layers"]
    assert {name.split(".")[0] for name in layers} == {"transformer", "transformer_2"}


def test_defaults_come_from_the_call_of_the_pipeline(pipe, tmp_path):
    config = CompareConfig(out=tmp_path / "out", height=16, width=32, frames=9)
    seen = Interrupt(lambda p: True)
    with pytest.raises(KeyboardInterrupt):
        compare(config, pipe=pipe, progress=seen)
    assert seen.seen[0].steps == 50
