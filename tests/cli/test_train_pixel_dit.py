"""`diffsieve train pixel-dit`: results, exit codes, mistakes, a kill, several processes, TensorBoard."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from diffsieve import UserInputError
from diffsieve.cli import app
from diffsieve.pipelines.training.loop import LogEntry
from diffsieve.pipelines.training.tensorboard import TensorBoardLog

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


def settings_file(tmp_path, steps=2, **dit):
    phases = [{"side": 8, "batch_size": 2}]
    values = {
        "model": {"layers": 1, "heads": 1, "head_dim": 8, "block_size": 4, "topk": 2},
        "dit": {"steps": steps, "phases": phases, "compile": False, "log_every": 1} | dit,
        "sampling": {"images": 2, "steps": 1},
    }
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(values))
    return str(path)


def train(*words):
    return CliRunner().invoke(app, ["train", "pixel-dit", *map(str, words)])


def command(*words):
    return [sys.executable, "-m", "diffsieve", "train", "pixel-dit", *map(str, words)]


def test_a_run_is_reported(tmp_path, data):
    words = ("--out", tmp_path / "run", "--data", data)
    result = train(*words, "--settings", settings_file(tmp_path), "--set", "dit.steps=3", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["step"], summary["pictures"], summary["skipped"][0][0]) == (3, 5, "broken.png")
    assert "transformer: begins" in result.stderr
    assert "side 8 batch_size 2 tokens_per_second" in result.stderr
    again = train(*words, "--resume")
    assert again.exit_code == 0, again.output
    assert "3 steps" in again.stdout
    assert "1 unreadable pictures were skipped:" in again.stdout
    assert "broken.png: " in again.stdout


def test_a_paused_leg_has_an_exit_code_of_its_own(tmp_path, data):
    words = ("--out", tmp_path / "run", "--data", data, "--settings", settings_file(tmp_path, 10**6))
    result = train(*words, "--max-seconds", 1, "--pause")
    assert result.exit_code == 3
    assert "paused; go on with --resume" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "none"), "which does not exist"),
        (("--set", "dit.speed=3"), "unknown keys"),
        (("--settings", "none.toml"), "readable"),
        (("--start-from", "none"), "start_from must be a pipeline folder"),
        (("--max-seconds", "0"), "max_seconds must be positive"),
    ],
    ids=["data", "setting", "file", "start", "seconds"],
)
def test_a_mistake_is_one_line(tmp_path, data, words, message):
    given = words if "--data" in words else (*words, "--data", data)
    result = train("--out", tmp_path / "run", *given)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_tensorboard_is_optional(tmp_path):
    entry = LogEntry("dit", 3, 0.5, 1.0, 2.0, 0.0, 1.0, 1, {"loss": 0.25}, {"side": 8.0})
    with TensorBoardLog(None) as log:
        log.report(entry)
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(UserInputError, match="pip install tensorboard"):
            TensorBoardLog(tmp_path)
        return
    with TensorBoardLog(tmp_path) as log:
        log.report(entry)
    assert list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_resumes_to_the_same_loss_curve(tmp_path, data):
    settings = settings_file(tmp_path, 400, save_every=1e-9)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    words = ("--data", data, "--settings", settings)
    process = subprocess.Popen(command("--out", cut, *words), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    index = cut / "dit" / "weights.json"
    try:
        deadline = time.monotonic() + 240
        while not index.exists() or json.loads(index.read_text())["step"] < 5:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    subprocess.run(command("--out", cut, "--data", data, "--resume"), env=ENVIRONMENT, check=True, capture_output=True)
    subprocess.run(command("--out", whole, *words), env=ENVIRONMENT, check=True, capture_output=True)

    def curve(folder):
        lines = [json.loads(line) for line in (folder / "dit" / "log.jsonl").read_text().splitlines()]
        return [(line["step"], line["losses"]) for line in lines]

    assert curve(cut) == curve(whole)
    assert [step for step, _ in curve(cut)] == list(range(1, 401))


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path, data):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", "localhost:0"]
    words = ("--out", tmp_path / "run", "--data", data, "--settings", settings_file(tmp_path), "--json")
    python, *rest = command(*words)
    done = subprocess.run([python, *launcher, *rest], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["finished"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "dit" / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["processes"]) for line in lines] == [(1, 2), (2, 2)]
