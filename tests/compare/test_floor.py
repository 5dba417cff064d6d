"""The noise floor of a comparison, and what `eval` makes of folders of `compare` and `generate`."""

import json

import pytest
import torch

from diffsieve.compare import CompareConfig, GenerateConfig, compare, generate
from diffsieve.compare.evaluate import FLOOR, EvaluateConfig, evaluate
from diffsieve.compare.floor import other_kernel
from diffsieve.compare.pairing import pair_clips
from diffsieve.errors import UserInputError
from tests.compare.conftest import SMALL
from tests.tiny import generate as run_tiny
from tests.tiny import wan_pipeline

pytestmark = pytest.mark.usefixtures("no_weights")


def test_the_other_kernel_is_another_one_and_goes_again(pipe):
    plain = run_tiny(pipe)
    with other_kernel(pipe) as kernel:
        other = run_tiny(pipe)
    assert kernel == "_native_math"
    assert not torch.equal(plain, other)
    torch.testing.assert_close(plain, other, atol=1e-3, rtol=1e-3)
    assert torch.equal(run_tiny(pipe), plain)


def test_a_comparison_measures_its_noise_floor(pipe, small):
    config = small(floor=True, save_frames=True, seed=(0, 1))
    told = []
    report = compare(config, pipe=pipe, progress=told.append)
    assert {progress.run for progress in told} == {"dense", "sparse", "floor"}
    for clip in report["clips"]:
        floor = clip["floor"]
        assert floor["kernel"] == "_native_math"
        assert clip["metrics"]["psnr"]["mean"] < floor["metrics"]["psnr"]["mean"]
        assert (config.out / clip["folder"] / clip["files"]["floor"]).is_file()
    mean = sum(clip["floor"]["metrics"]["psnr"]["mean"] for clip in report["clips"]) / 2
    assert report["floor"]["psnr"] == pytest.approx({"mean": mean, "std": report["floor"]["psnr"]["std"], "n": 2})
    page = (config.out / "report.html").read_text(encoding="utf-8")
    assert "<td>noise floor, mean</td>" in page
    assert compare(small(out=config.out.parent / "plain"), pipe=pipe)["floor"] is None


def test_a_comparison_can_be_evaluated_as_it_is(pipe, small, tmp_path):
    config = small(floor=True, save_frames=True, seed=(0, 1))
    made = compare(config, pipe=pipe, command=["diffsieve", "compare"])
    report = evaluate(EvaluateConfig(config.out, (), tmp_path / "eval", metrics=("psnr",), device="cpu", page_clips=0))
    (run,) = report["runs"]
    assert [clip["name"] for clip in run["clips"]] == [clip["folder"] for clip in made["clips"]]
    for clip, own in zip(run["clips"], made["clips"], strict=True):
        assert clip["metrics"]["psnr"]["mean"] == pytest.approx(own["metrics"]["psnr"]["mean"])
        assert (clip["seed"], clip["prompt"]) == (own["seed"], own["prompt"])
        assert clip["density_overall"] == own["sparsity"]["density_overall"]
    assert run["made"]["made_by"] == "diffsieve compare"
    assert run["made"]["command"] == ["diffsieve", "compare"]
    assert run["made"]["settings"]["attention"]["block_size"] == 5
    assert run["density_overall"] == pytest.approx(made["summary"]["density_overall"]["mean"])
    assert report["reference"]["settings"]["attention"] is None
    assert report["reference"]["density_overall"] is None
    assert report["floor"]["label"] == FLOOR
    assert report["floor"]["summary"]["psnr"]["mean"] == pytest.approx(made["floor"]["psnr"]["mean"])
    assert report["notes"] == []
    assert json.loads((tmp_path / "eval" / "report.json").read_text(encoding="utf-8")) == report


def test_comparisons_at_several_sparsities_are_runs_of_one_evaluation(pipe, small, tmp_path):
    folders = [tmp_path / name for name in ("half", "more")]
    for folder, sparsity in zip(folders, (0.4, 0.8), strict=True):
        compare(small(out=folder, sparsity=sparsity), pipe=pipe)
    config = EvaluateConfig(folders[0], tuple(folders), tmp_path / "eval", metrics=("psnr",), device="cpu")
    report = evaluate(config)
    densities = [run["density_overall"] for run in report["runs"]]
    assert densities[0] > densities[1]
    page = (tmp_path / "eval" / "report.html").read_text(encoding="utf-8")
    assert "PSNR against sparsity" in page
    assert page.count("<circle") >= 2
    assert any("video files" in note for note in report["notes"])


def test_raw_frames_on_one_side_alone_are_not_used(pipe, small, tmp_path):
    folders = [tmp_path / name for name in ("raw", "encoded")]
    for folder, save_frames in zip(folders, (True, False), strict=True):
        compare(small(out=folder, save_frames=save_frames), pipe=pipe)
    pairs = {folder.name: pair_clips(folders[0], folder)[0][1:] for folder in folders}
    assert [path.name for path in pairs["raw"]] == ["dense_frames.npz", "sparse_frames.npz"]
    assert [path.name for path in pairs["encoded"]] == ["dense.mp4", "sparse.mp4"]


def test_folders_that_were_made_in_other_ways_are_noted(tmp_path):
    pipe = wan_pipeline()
    for name, changes in (("dense", {"method": "dense"}), ("sparse", {"seed": (0, 1), "steps": 3})):
        settings = SMALL | {"seed": (0, 1)} | changes
        if name == "dense":
            settings = {key: settings[key] for key in settings if key not in ("warmup", "block_size", "min_tokens")}
        generate(GenerateConfig(**settings, out=tmp_path / name), pipe=pipe)
    config = EvaluateConfig(tmp_path / "dense", (tmp_path / "sparse",), tmp_path / "eval", ("psnr",), device="cpu")
    report = evaluate(config)
    assert "sparse was not made as the dense clips were: steps 4 and 3" in report["notes"]
    (run,) = report["runs"]
    assert run["made"]["seeds"] == [0, 1]
    assert [clip["seed"] for clip in run["clips"]] == [0, 1]
    assert all(0 < clip["density_overall"] < 1 for clip in run["clips"])
    assert report["reference"]["made_by"] == "diffsieve generate"


def test_refusals(pipe, small, tmp_path):
    config = small()
    compare(config, pipe=pipe)
    (tmp_path / "plain").mkdir()
    with pytest.raises(UserInputError, match="must both be folders of diffsieve compare, or neither"):
        evaluate(EvaluateConfig(config.out, (tmp_path / "plain",), tmp_path / "eval", device="cpu"))
    with pytest.raises(UserInputError, match="tests must have at least one folder"):
        EvaluateConfig(tmp_path / "plain", (), tmp_path / "eval")
    assert isinstance(config, CompareConfig)
