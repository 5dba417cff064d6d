"""Folders of clips against each other: pairs, figures, files, failures."""

import csv
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from diffsieve.compare.evaluate import FLOOR, EvaluateConfig, evaluate
from diffsieve.compare.pairing import pair_clips
from diffsieve.compare.provenance import provenance
from diffsieve.compare.report import GENERATE_SCHEMA
from diffsieve.compare.video import write_mp4
from diffsieve.errors import DiffsieveError, UserInputError
from diffsieve.eval import psnr, ssim
from diffsieve.eval.lpips_net import Lpips

NAMES = ("clip_9.npz", "clip_10.npz")
NOISE = {"dense": 0.0, "half": 0.05, "quarter": 0.1, "other-kernel": 0.02}


pytestmark = pytest.mark.usefixtures("no_weights")


def frames_of(folder: str, number: int) -> torch.Tensor:
    """Six frames of 36 x 48: a moving ramp and noise."""
    ramp = torch.linspace(0.2, 0.7, 48).expand(6, 3, 36, 48) + 0.02 * torch.arange(6).view(6, 1, 1, 1)
    noise = torch.randn(ramp.shape, generator=torch.Generator().manual_seed(number))
    return (ramp + NOISE[folder] * noise).clamp(0, 1)


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    for folder in NOISE:
        (tmp_path / folder).mkdir()
        for number, name in enumerate(NAMES):
            np.savez(tmp_path / folder / name, frames=frames_of(folder, number).numpy())
    for folder, density in (("half", 0.6), ("quarter", 0.35)):
        sparsity = {"density_overall": density, "density_sparse_steps": density - 0.1}
        clips = [{"prompt": "a", "seed": n, "file": name, "sparsity": sparsity} for n, name in enumerate(NAMES)]
        report = {"schema": GENERATE_SCHEMA, "settings": {"steps": 4}, "seed": [0, 1], "clips": clips}
        (tmp_path / folder / "report.json").write_text(json.dumps(report))
    return {folder: tmp_path / folder for folder in NOISE}


@pytest.fixture
def config(folders, tmp_path) -> EvaluateConfig:
    tests = folders["half"], folders["quarter"]
    return EvaluateConfig(folders["dense"], tests, tmp_path / "out", floor=folders["other-kernel"], device="cpu")


def random_backbone(path: Path) -> Path:
    torch.manual_seed(0)
    save_file(Lpips("alex").state_dict(), path)
    return path


def test_an_evaluation_writes_what_it_says(config):
    told = []
    report = evaluate(config, progress=lambda *words: told.append(words), command=["diffsieve", "eval"])
    assert sorted(path.name for path in config.out.iterdir()) == ["metrics.csv", "report.html", "report.json"]
    assert json.loads((config.out / "report.json").read_text(encoding="utf-8")) == report
    assert [run["label"] for run in report["runs"]] == ["half", "quarter"]
    assert told == [(run, name) for run in ("half", "quarter", FLOOR) for name in NAMES]
    run = report["runs"][1]
    assert [clip["name"] for clip in run["clips"]] == list(NAMES)  # 9 before 10
    assert (run["density_overall"], run["density_sparse_steps"]) == pytest.approx((0.35, 0.25))
    assert run["made"]["seeds"] == [0, 1]
    assert run["made"]["settings"] == {"steps": 4}
    assert [(clip["seed"], clip["density_overall"]) for clip in run["clips"]] == [(0, 0.35), (1, 0.35)]
    assert report["reference"] is None
    pairs = [(frames_of("dense", n), frames_of("quarter", n)) for n in range(2)]
    for clip, pair in zip(run["clips"], pairs, strict=True):
        assert clip["frames"] == 6
        assert clip["metrics"]["psnr"]["mean"] == pytest.approx(psnr(*pair).mean, abs=1e-9)
        assert clip["metrics"]["ssim"]["mean"] == pytest.approx(ssim(*pair).mean, abs=1e-12)
        assert clip["metrics"]["lpips[alex]"]["mean"] is None
    assert run["summary"]["psnr"]["mean"] == pytest.approx(np.mean([psnr(*pair).mean for pair in pairs]))
    assert run["summary"]["psnr"]["n"] == 2
    assert report["floor"]["summary"]["psnr"]["mean"] > report["runs"][0]["summary"]["psnr"]["mean"]
    assert any("diffsieve weights lpips" in note for note in report["notes"])
    assert not any("video files" in note for note in report["notes"])


def test_the_table_for_spreadsheets_has_a_line_for_each_clip(config):
    report = evaluate(config)
    rows = list(csv.DictReader((config.out / "metrics.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["run"], row["clip"]) for row in rows] == [(r, n) for r in ("half", "quarter", FLOOR) for n in NAMES]
    assert float(rows[2]["psnr"]) == report["runs"][1]["clips"][0]["metrics"]["psnr"]["mean"]
    assert rows[0]["lpips[alex]"] == ""
    assert rows[4]["density_overall"] == ""


def test_the_page_holds_everything_and_asks_for_nothing(config):
    report = evaluate(config)
    page = (config.out / "report.html").read_text(encoding="utf-8")
    references = re.findall(r"""(?:src|href|action|data|poster|srcset)\s*=\s*["']([^"']*)|url\(([^)]*)""", page)
    assert references
    assert all((a or b).startswith("data:") for a, b in references)
    assert not re.search(r"https?:|<script|<link|<iframe|@import", page)
    assert page.count("<video") == page.count("<img") == 2 * 2  # clips times runs
    for run in [*report["runs"], report["floor"]]:
        assert f"<td>{run['label']}</td>" in page
        assert f"{run['summary']['psnr']['mean']:.2f}" in page
    assert "PSNR against sparsity" in page
    assert "SSIM over frames" in page
    assert "noise floor" in page


def test_the_page_may_show_fewer_clips_than_it_counts(config):
    evaluate(dataclasses.replace(config, page_clips=1))
    page = (config.out / "report.html").read_text(encoding="utf-8")
    assert page.count("<video") == 2
    assert "the first 1 of 2 clips are shown" in page
    evaluate(dataclasses.replace(config, page_clips=0), overwrite=True)
    assert "<video" not in (config.out / "report.html").read_text(encoding="utf-8")


def test_random_backbone_lpips_is_measured_when_weights_are_there(config, tmp_path):
    path = random_backbone(tmp_path / "random.safetensors")
    report = evaluate(dataclasses.replace(config, lpips_weights=path, require_lpips=True, floor=None))
    values = [run["summary"]["lpips[alex]"]["mean"] for run in report["runs"]]
    assert 0 < values[0] < values[1]
    (weights,) = report["weights"]
    assert weights["source"] == str(path)
    assert len(weights["sha256"]) == 64
    assert report["floor"] is None


def test_required_lpips_fails_without_weights_and_writes_nothing(config):
    with pytest.raises(DiffsieveError, match="no weights of alex"):
        evaluate(dataclasses.replace(config, require_lpips=True))
    assert not config.out.exists()


def test_required_lpips_fails_for_frames_that_are_too_small(config, tmp_path, folders):
    for folder in folders.values():
        for name in NAMES:
            np.savez(folder / name, np.zeros((2, 3, 24, 48), np.float32))
    path = random_backbone(tmp_path / "random.safetensors")
    with pytest.raises(DiffsieveError, match=r"clip_9\.npz of half has none: alex needs at least"):
        evaluate(dataclasses.replace(config, lpips_weights=path, require_lpips=True))


def test_videos_are_noted_and_svg_compatible_values_keep_their_name(tmp_path):
    for folder in ("dense", "half"):
        (tmp_path / folder).mkdir()
        write_mp4(tmp_path / folder / "a.mp4", (frames_of(folder, 0) * 255).to(torch.uint8), fps=12)
    settings = EvaluateConfig(
        tmp_path / "dense", (tmp_path / "half",), tmp_path / "out", ("psnr", "svg-compatible"), device="cpu"
    )
    report = evaluate(settings)
    assert any("video files" in note for note in report["notes"])
    metrics = report["runs"][0]["clips"][0]["metrics"]
    assert list(metrics) == [
        "psnr",
        "psnr_from_mean_mse",
        "svg-compatible psnr",
        "svg-compatible ssim",
        "svg-compatible lpips[vgg]",
    ]
    assert provenance(tmp_path / "half") is None
    assert report["runs"][0]["density_overall"] is None
    assert "against sparsity" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_too_few_frames_for_the_frechet_distance_and_missing_weights_are_noted(config):
    report = evaluate(dataclasses.replace(config, fd="effnet-lite0", metrics=("psnr",)))
    assert report["runs"][0]["frechet"]["value"] is None
    assert any("diffsieve weights effnet" in note for note in report["notes"])


def test_an_occupied_folder_is_left_alone(config):
    evaluate(config)
    with pytest.raises(UserInputError, match=r"must not hold report\.json already"):
        evaluate(config)
    evaluate(config, overwrite=True)
    (config.out / "report.json").write_text('{"schema": "mine"}')
    with pytest.raises(UserInputError, match="must hold an evaluation to overwrite"):
        evaluate(config, overwrite=True)
    assert (config.out / "report.json").read_text() == '{"schema": "mine"}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda f: (f["half"] / NAMES[0]).unlink(), r"half must hold .* got none for clip_9", id="missing"),
        pytest.param(lambda f: (f["dense"] / NAMES[1]).unlink(), r"dense must hold .* none for clip_10", id="surplus"),
        pytest.param(lambda f: [path.unlink() for path in f["half"].iterdir()], "half must hold clips", id="empty"),
        pytest.param(
            lambda f: np.savez(f["half"] / NAMES[1], np.zeros((5, 3, 36, 48))), "frames, got 6 and 5", id="frames"
        ),
        pytest.param(lambda f: np.savez(f["half"] / NAMES[1], np.zeros((6, 3, 36, 46))), r"clip_10\.npz", id="sizes"),
        pytest.param(lambda f: (f["half"] / NAMES[1]).write_bytes(b"x"), r"clip_10\.npz cannot be read", id="corrupt"),
    ],
)
def test_folders_that_do_not_fit_together_are_refused(config, folders, change, message):
    change(folders)
    with pytest.raises(UserInputError, match=message):
        evaluate(config)
    assert not config.out.exists()


def test_pairs_of_single_clips_and_of_folders_of_pictures(folders, tmp_path):
    a, b = folders["dense"] / NAMES[0], folders["half"] / NAMES[0]
    assert pair_clips(a, b) == [(NAMES[0], a, b)]
    with pytest.raises(UserInputError, match="both be clips or both be folders"):
        pair_clips(a, folders["half"])
    with pytest.raises(UserInputError, match="no such path"):
        pair_clips(a, tmp_path / "missing")
    (folders["dense"] / "a.png").write_bytes(b"")
    with pytest.raises(UserInputError, match="got both"):
        pair_clips(folders["dense"], folders["half"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": ("psnr", "vmaf")}, "metrics must be some of .*, got vmaf"),
        ({"nets": ("resnet",)}, "nets must be some of alex, vgg, squeeze, got resnet"),
        ({"fd": "resnet"}, "fd must be one of"),
        ({"tests": ()}, "tests must have at least one"),
        ({"page_clips": -1}, "page_clips must be at least 0, got -1"),
        ({"lpips_weights": Path("a"), "nets": ("alex", "vgg")}, "must go with one net, got alex, vgg"),
    ],
    ids=["metric", "net", "fd", "no-folders", "clips", "weights"],
)
def test_settings_are_checked(config, changes, message):
    with pytest.raises(UserInputError, match=message):
        dataclasses.replace(config, **changes)


def test_equal_folders_and_an_unknown_device_are_refused(config, folders):
    with pytest.raises(UserInputError, match="different folders"):
        evaluate(dataclasses.replace(config, tests=(folders["half"], folders["half"])))
    with pytest.raises(UserInputError, match="device must be"):
        evaluate(dataclasses.replace(config, device="quantum"))
