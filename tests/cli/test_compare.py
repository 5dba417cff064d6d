"""`diffsieve compare` and `diffsieve generate` on a tiny saved pipeline: tables, JSON, one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffsieve.cli import main
from diffsieve.cli.run_options import parse_warmup
from diffsieve.errors import UserInputError
from tests import tiny_pixels
from tests.tiny import wan_pipeline

SMALL = {
    "frames": 9,
    "height": 16,
    "width": 32,
    "steps": 3,
    "warmup": 1,
    "block-size": 5,
    "min-tokens": 0,
    "guidance-scale": 1.0,
    "max-sequence-length": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    wan_pipeline(layers=2).save_pretrained(path)
    return path


def arguments(command: str, model: Path, out: Path, /, *more: str, **changes: object) -> list[str]:
    flags = SMALL | {name.replace("_", "-"): value for name, value in changes.items()}
    flags = {"model": model, "out": out, "device": "cpu"} | flags
    return [command, *more] + [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def run_main(words: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code or 0


def test_compare_prints_a_table_and_where_the_files_lie(model, tmp_path, capsys):
    out = tmp_path / "out"
    words = arguments("compare", model, out, "--prompt", "a cat", "--prompt", "a dog")
    assert run_main(words) == 0
    output = capsys.readouterr()
    for word in (
        "PSNR",
        "SSIM",
        "LPIPS",
        "LPIPS not computed: ",
        "density",
        "steps",
        "seconds",
        "speed-up",
        "a cat",
        "a dog",
        "1/3",
        "mean (2)",
    ):
        assert word in output.out, word
    listed = [line.strip() for line in output.out.splitlines() if line.startswith("  0") or "report.json" in line]
    assert len(listed) == 13
    assert all((out / name).is_file() for name in listed)
    assert "2/2 seed 0 sparse: 3 steps" in output.err

    assert run_main(words) == 1
    error = capsys.readouterr().err.splitlines()[-1]  # after "loading ..."
    assert "an earlier comparison" in error
    assert run_main([*words, "--resume"]) == 0
    assert "dense: 3 steps" not in capsys.readouterr().err


def test_compare_json_is_the_report_alone(model, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_main(arguments("compare", model, out, "--prompt", "a cat", "--seed", "1", "--seed", "2", "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["seed"] == [1, 2]
    assert report["settings"]["warmup"] == 1


def test_a_warmup_longer_than_the_run_is_noted_in_the_table(model, tmp_path, capsys):
    assert run_main(arguments("compare", model, tmp_path / "out", "--prompt", "a cat", warmup=9)) == 0
    output = capsys.readouterr().out
    assert "3/3" in output
    assert "note: all 3 steps ran dense" in output


def test_values_from_a_config_file_and_prompts_from_a_file(model, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a cat\n\n  a dog  \n")
    (tmp_path / "run.toml").write_text('warmup = 0.34\nseed = [3]\nprompt = ["a fox"]\n')
    words = arguments("compare", model, tmp_path / "out", "--config", str(tmp_path / "run.toml"), "--json")
    at = words.index("--warmup")
    del words[at : at + 2]
    assert run_main([*words, "--prompt-file", str(tmp_path / "prompts.txt")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompt"] == ["a fox", "a cat", "a dog"]
    assert report["seed"] == [3]
    assert report["settings"]["warmup"] == 0.34
    assert report["clips"][0]["sparsity"]["steps_dense"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": 1.5}, "sparsity must be"),
        ({"preset": "fast"}, "preset must be one of"),
        ({"backend": "cutlass"}, "backend must be one of"),
        ({"method": "magic"}, "method must be one of"),
        ({"warmup": 1.5}, "warmup must be a whole number of steps, or a share"),
        ({"block_size": 0}, "block_size must be"),
        ({"frames": 10}, "frames must be a multiple of 4 plus 1"),
        ({"height": 20}, "height must be a multiple of 16"),
        ({"device": "quantum"}, "device must be"),
        ({"dtype": "int4"}, "dtype must be"),
        ({"prompt_file": "/nowhere/prompts.txt"}, "prompt_file must be a readable text file"),
        ({"model": "./nowhere"}, "model must be"),
        ({"out": "/dev/null/out"}, "out must be a folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("command", ["compare", "generate"])
def test_mistakes_are_one_line_and_leave_nothing(model, tmp_path, capsys, command, changes, message):
    assert run_main(arguments(command, model, tmp_path / "out", "--prompt", "a cat", **changes)) == 1
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert lines[-1].startswith("diffsieve: ")
    assert message in lines[-1]
    assert "Traceback" not in output.err
    assert list(tmp_path.iterdir()) == []


def test_generate_prints_a_table_or_json(model, tmp_path, capsys):
    assert run_main(arguments("generate", model, tmp_path / "a", "--prompt", "a cat")) == 0
    assert "001-a-cat-seed0.mp4" in capsys.readouterr().out
    dense = arguments("generate", model, tmp_path / "b", "--prompt", "a cat", "--json", "--method", "dense")
    assert run_main(dense) == 1
    told = capsys.readouterr().err
    assert "warmup, block_size, min_tokens must be left out for method dense" in told
    for name in ("--warmup", "--block-size", "--min-tokens"):
        place = dense.index(name)
        del dense[place : place + 2]
    assert run_main(dense) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["clips"][0]["file"] == "001-a-cat-seed0.mp4"
    assert (tmp_path / "b" / "001-a-cat-seed0.mp4").is_file()


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_exits_with_130(model, tmp_path):
    import signal

    words = arguments("compare", model, tmp_path / "out", "--prompt", "a cat", steps=2000)
    process = subprocess.Popen(
        [sys.executable, "-m", "diffsieve", *words], stderr=subprocess.PIPE, text=True, stdout=subprocess.PIPE,
        # Tests that a shell started in the background ignore it, and their children with them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "dense: 2000 steps" in line:
            break
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out == ""
    assert "--resume goes on" in error
    assert "Traceback" not in error
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["001-a-cat-seed0", "settings.json"]


def test_a_warmup_that_is_no_number_is_wrong_usage(model, tmp_path, capsys):
    assert run_main(arguments("compare", model, tmp_path / "out", warmup="soon")) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_warmup_is_steps_or_a_share():
    assert parse_warmup("3") == 3
    assert isinstance(parse_warmup("3"), int)
    assert parse_warmup("0.2") == parse_warmup(0.2) == 0.2
    with pytest.raises(UserInputError, match="warmup must be"):
        parse_warmup("few")


def test_compare_tells_the_noise_floor(model, tmp_path, capsys):
    assert run_main(arguments("compare", model, tmp_path / "out", "--prompt", "a cat", "--floor")) == 0
    output = capsys.readouterr()
    assert "noise floor (dense with another kernel, mean of 1): PSNR " in output.out
    assert "seed 0 floor: 3 steps" in output.err
    assert run_main(["eval", str(tmp_path / "out"), "--metrics", "psnr", "--out", str(tmp_path / "eval")]) == 0
    assert "noise floor" in capsys.readouterr().out


def test_compare_of_a_pixel_dit(tmp_path, capsys, monkeypatch):
    tiny_pixels.pipeline().save_pretrained(tmp_path / "pixels")
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--model", "pixels", "--out", "out", "--steps", "2", "--device", "cpu", "--prompt", "objects"]
    assert run_main(words) == 0
    output = capsys.readouterr()
    assert "pixels · llsa, top 2, blocks of 8 · 16 x 16 · 2 steps" in " ".join(output.out.split())
    assert "note: the model was trained with LLSA" in output.out
    listed = [line.strip() for line in output.out.splitlines() if line.startswith("  0")]
    assert "001-objects-seed0/difference_map.png" in listed
    assert all((tmp_path / "out" / name).is_file() for name in listed)
    assert run_main([*words, "--seed", "0", "--seed", "1", "--resume"]) == 0
    assert "seed 0 dense: 2 steps" not in capsys.readouterr().err
    assert run_main([*words, "--overwrite", "--frames", "5"]) == 1
    assert "frames must be left out for a model of pictures, got 5" in capsys.readouterr().err
    assert (tmp_path / "out" / "report.json").is_file(), "a refused run must leave the old one"
