"""`--config`, `--json` and `emit`, on a small application of its own."""

import json
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from diffsieve import UserInputError
from diffsieve.cli.options import ConfigFile, DebugFlag, JsonFlag, emit
from diffsieve.cli.run_options import Warmup

app = typer.Typer(add_completion=False)


@app.command()
def sample(
    steps: Annotated[int, typer.Option()] = 14,
    sparsity: Annotated[float, typer.Option()] = 0.5,
    prompt: Annotated[list[str] | None, typer.Option()] = None,
    seed: Annotated[list[int] | None, typer.Option()] = None,
    warmup: Warmup = None,
    out: Annotated[Path, typer.Option()] = Path("here"),
    resume: bool = False,
    json: JsonFlag = False,
    config: ConfigFile = None,
    debug: DebugFlag = False,
) -> None:
    values = {"steps": steps, "sparsity": sparsity, "prompt": prompt, "resume": resume, "warmup": warmup}
    emit(values, as_json=json, text=f"steps {steps}")


@pytest.fixture
def run(tmp_path):
    def call(toml: str, *flags: str):
        path = tmp_path / "run.toml"
        path.write_text(toml)
        return CliRunner().invoke(app, ["--config", str(path), "--json", *flags])

    return call


def test_the_file_gives_values_and_flags_win(run):
    toml = 'steps = 20\nsparsity = 0.75\nprompt = ["a fox", "a cat"]\nresume = true\nwarmup = 3\n'
    result = run(toml, "--sparsity", "0.25")
    prompts = ["a fox", "a cat"]
    assert json.loads(result.stdout) == {
        "steps": 20, "sparsity": 0.25, "prompt": prompts, "resume": True, "warmup": 3
    }  # fmt: skip


def test_a_whole_number_is_a_number(run):
    assert json.loads(run("sparsity = 0\n").stdout)["sparsity"] == 0


def test_a_flag_switches_off_what_the_file_switched_on(run):
    assert json.loads(run("resume = true\n", "--no-resume").stdout)["resume"] is False


def test_without_a_file_the_defaults_hold():
    result = CliRunner().invoke(app, ["--json"])
    assert json.loads(result.stdout)["steps"] == 14


def test_text_is_printed_without_json():
    assert CliRunner().invoke(app, []).stdout == "steps 14\n"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("stepps = 20", r"unknown key 'stepps', expected some of: steps, sparsity, prompt, seed, warmup, out, resume$"),
        ("json = true", r"unknown key 'json'"),
        ("[steps]\na = 1", r"key 'steps' must be a plain value, got a table"),
        ('prompt = "a fox"', r"key 'prompt' must be a list, got 'a fox'"),
        ("steps = [1, 2]", r"key 'steps' must be one value, got \[1, 2\]"),
        ("steps = true", r"key 'steps' must be a whole number, got True"),
        ('steps = "20"', r"key 'steps' must be a whole number, got '20'"),
        ("steps = 14.5", r"key 'steps' must be a whole number, got 14.5"),
        ('sparsity = "0.5"', r"key 'sparsity' must be a number, got '0.5'"),
        ('warmup = "0.2"', r"key 'warmup' must be a number, got '0.2'"),
        ('seed = [1, "2"]', r"key 'seed' must be a whole number, got \[1, '2'\]"),
        ("prompt = [7]", r"key 'prompt' must be a text, got \[7\]"),
        ("out = 7", r"key 'out' must be a text, got 7"),
        ('resume = "yes"', r"key 'resume' must be true or false, got 'yes'"),
        ("steps = ", r"config must be a TOML file, got .*run\.toml"),
    ],
    ids=[
        "unknown",
        "shared",
        "table",
        "not-a-list",
        "not-one",
        "truth",
        "text-for-int",
        "float-for-int",
        "text-for-float",
        "text-for-parser",
        "text-in-list",
        "number-for-text",
        "number-for-path",
        "no-truth",
        "syntax",
    ],
)
def test_a_wrong_file_is_an_error(run, toml, message):
    result = run(toml)
    with pytest.raises(UserInputError, match=message):
        raise result.exception


def test_a_missing_file_is_an_error(tmp_path):
    result = CliRunner().invoke(app, ["--config", str(tmp_path / "none.toml")])
    with pytest.raises(UserInputError, match=r"config must be a readable TOML file, got .*none\.toml: No such file"):
        raise result.exception


def test_not_a_number_is_not_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit({"psnr": float("nan")}, as_json=True, text="")
