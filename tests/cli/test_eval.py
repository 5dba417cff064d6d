"""`diffsieve eval` and `diffsieve weights`: table, JSON, exit codes."""

import json

import numpy as np
import pytest

from diffsieve.cli import main

pytestmark = pytest.mark.usefixtures("no_weights")


@pytest.fixture
def folders(tmp_path):
    rng = np.random.default_rng(0)
    frames = rng.random((4, 3, 24, 32), dtype=np.float32)
    for folder, change in (("dense", 0.0), ("half", 0.1), ("other", 0.01)):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "a.npz", np.clip(frames + change, 0, 1))
    return [str(tmp_path / folder) for folder in ("dense", "half", "other")]


def run_main(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code or 0


def test_eval_prints_a_table_and_why_lpips_is_missing(folders, tmp_path, capsys):
    dense, half, other = folders
    words = ["eval", dense, half, "--floor", other, "--out", str(tmp_path / "out"), "--page-clips", "0"]
    assert run_main(*words) == 0
    output = capsys.readouterr()
    for word in ("half", "noise floor", "PSNR, dB", "SSIM", "MS-SSIM", "LPIPS[alex]", "report.html"):
        assert word in output.out, word
    assert "note: lpips[alex] not computed: no weights of alex: run `diffsieve weights lpips`" in output.out
    assert "half: a.npz" in output.err
    assert run_main(*words) == 1
    assert capsys.readouterr().err.startswith("diffsieve: out must not hold report.json already")


def test_eval_json_is_the_report(folders, tmp_path, capsys):
    dense, half, other = folders
    out = tmp_path / "out"
    words = ["eval", dense, half, other, "--out", str(out), "--metrics", "psnr,temporal_flickering", "--json"]
    assert run_main(*words, "--page-clips", "0", "--chunk-size", "3") == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [run["label"] for run in report["runs"]] == ["half", "other"]
    assert report["settings"]["chunk_size"] == 3
    assert report["weights"] == []
    assert "temporal_flickering" in report["runs"][0]["summary"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--require-lpips"], "no weights of alex"),
        (["--metrics", "vmaf"], "metrics must be some of"),
        (["--metrics", ","], "metrics must name at least one"),
        (["--lpips-net", "resnet"], "nets must be some of"),
        (["--lpips-weights", "missing.pth"], "weights must be a file"),
        (["--floor", "missing"], "no such path"),
        (["--device", "quantum"], "device must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_eval_failures_are_one_line(folders, tmp_path, capsys, words, message):
    assert run_main("eval", *folders[:2], "--out", str(tmp_path / "out"), *words) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert message in output.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["lpips", "effnet"])
def test_weights_from_a_wrong_archive_fail(name, tmp_path, capsys):
    (tmp_path / "a.tar.gz").write_bytes(b"nonsense")
    assert run_main("weights", name, "--archive", str(tmp_path / "a.tar.gz"), "--out", str(tmp_path / "w")) == 1
    assert "cannot be read as a package archive" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()
