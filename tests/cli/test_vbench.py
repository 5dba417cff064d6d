"""`diffsieve vbench` as commands, with the stand-in for the package."""

import json
import sys
from pathlib import Path

import pytest

from diffsieve.cli import main
from tests.tiny import wan_pipeline
from tests.vbench.conftest import ENTRIES

CLIP = ("--frames", "9", "--height", "16", "--width", "32", "--steps", "3", "--max-sequence-length", "16")
METHOD = ("--warmup", "1", "--block-size", "8", "--min-tokens", "0", "--guidance-scale", "1", "--device", "cpu")


@pytest.fixture
def full_info(tmp_path, monkeypatch) -> Path:
    info = tmp_path / "site" / "vbench-0.1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vbench\nVersion: 0.1.5\n")
    place = Path(__file__).parents[1] / "vbench" / "stand_in"
    monkeypatch.setenv("PYTHONPATH", f"{place}:{info.parent}")
    path = tmp_path / "info.json"
    path.write_text(json.dumps(ENTRIES), encoding="utf-8")
    return path


def run_main(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return caught.value.code or 0


def test_from_prompts_to_the_table(full_info, tmp_path, capsys, monkeypatch):
    model, out = tmp_path / "tiny", tmp_path / "out"
    wan_pipeline(layers=2).save_pretrained(model)
    assert run_main("vbench", "prompts", "--full-info", full_info) == 0
    assert capsys.readouterr().out.splitlines() == ["a cat moves left", "a dog, in Petra's façades.", "a red cat"]
    words = ("vbench", "generate", "--model", model, "--full-info", full_info, "--dimension", "motion_smoothness")
    words = (*words, "--videos", "1", "--with-dense", "--out", out, *CLIP, *METHOD)
    assert run_main(*words, "--max-seconds", "0.000001") == 3
    assert "1 left for this process" in capsys.readouterr().out
    assert run_main(*words) == 0
    assert "1 videos in" in capsys.readouterr().out
    monkeypatch.setenv("STAND_IN", "nan")
    score = ("vbench", "score", out, "--python", sys.executable, "--device", "cpu")
    assert run_main(*score) == 1
    assert "failed: dense, motion_smoothness: VBench's value must be a finite number" in capsys.readouterr().out
    monkeypatch.setenv("STAND_IN", "")
    assert run_main(*score, "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["scores"]) == {"dense", "sparse"}
    assert run_main("vbench", "table", out) == 0
    table = capsys.readouterr().out
    for word in ("motion_smoothness", "dense", "sparse", "PSNR", "note: 1 videos of each prompt"):
        assert word in table, word
