"""`diffsieve capture` and `diffsieve study` as commands: legs, shards, exit codes, tables."""

import json
from pathlib import Path

import pytest

from diffsieve.cli import main
from diffsieve.study import VARIANTS
from tests.tiny import wan_pipeline

CLIP = ("--frames", "9", "--height", "32", "--width", "32", "--steps", "5", "--max-sequence-length", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    wan_pipeline(layers=2).save_pretrained(path)
    return str(path)


def run_main(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return caught.value.code or 0


def test_from_capture_to_the_table(model, tmp_path, capsys):
    captures, out = tmp_path / "captures", tmp_path / "study"
    common = ("--model", model, "--device", "cpu", "--prompt", "a cat", "--seed", "0", *CLIP, "--guidance-scale", "1")
    assert run_main("capture", *common, "--layer", "-1", "--out", captures) == 0
    assert "4 files of 1 clips" in capsys.readouterr().out
    variants = [word for name in ("paper", "default", "base") for word in ("--variant", name)]
    choice = (*variants, "--sparsity", "0.6", "--block-size", "16", "--out", out)
    assert run_main("study", "recall", captures, *choice, "--device", "cpu") == 0
    assert "all there" in capsys.readouterr().out
    assert run_main("study", "clips", *common, *choice, "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["done"] == 4
    assert "[4/4, 0:00:00 left]" in output.err
    assert run_main("study", "report", out) == 0
    table = capsys.readouterr().out
    words = (
        "noise floor",
        "default",
        "base",
        "paper",
        "60 %",
        "recall",
        "PSNR, dB",
        "the paper's bound U",
        "predicted in",
    )
    for word in words:
        assert word in table, word
    assert {"study.json", "study.html"} <= {path.name for path in out.iterdir()}


def test_a_leg_that_runs_out_of_time_exits_with_3_and_goes_on(model, tmp_path, capsys):
    words = ("study", "clips", "--model", model, "--device", "cpu", "--prompt", "a cat", "--seed", "0", *CLIP)
    words = (*words, "--variant", "paper", "--block-size", "16", "--out", tmp_path / "study")
    assert run_main(*words, "--max-seconds", "0.000001") == 3
    assert "2 left for this process: the same command goes on" in capsys.readouterr().out
    assert run_main(*words, "--shard", "1/2") == 0
    assert "2 left for other shards" in capsys.readouterr().out
    assert run_main(*words) == 0
    assert run_main(*words, "--shard", "2/2") == 1
    assert "shard must be I/N" in capsys.readouterr().err


def test_a_study_has_no_prompts_for_other_models(model, tmp_path, capsys):
    assert run_main("study", "clips", "--model", model, "--device", "cpu", *CLIP, "--out", tmp_path / "study") == 1
    assert "prompt or prompt_file must be given" in capsys.readouterr().err


def test_variants_are_listed(capsys):
    assert run_main("study", "variants") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in VARIANTS)
    assert run_main("study", "variants", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["variants"]) == set(VARIANTS)


def test_a_folder_without_results_is_refused(tmp_path: Path, capsys):
    assert run_main("study", "report", tmp_path) == 1
    assert "must hold results of a study" in capsys.readouterr().err
