"""`diffsieve train mini-wan`: results, exit codes, mistakes, a kill, several processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from diffsieve.cli import app
from tests.tiny_training import tiny_settings, write_sprites


@pytest.fixture(scope="module")
def sprites_path(tmp_path_factory):
    return write_sprites(tmp_path_factory.mktemp("sprites") / "sprites.npz")


def settings_file(tmp_path, *arguments, **changes):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(tiny_settings(*arguments, **changes).to_dict()))
    return str(path)


def train(*words):
    return CliRunner().invoke(app, ["train", "mini-wan", *map(str, words)])


def test_a_stage_is_trained_and_reported(tmp_path, sprites_path):
    common = ("--out", tmp_path / "run", "--sprites", sprites_path, "--stage", "vae")
    result = train(*common, "--settings", settings_file(tmp_path), "--set", "vae.steps=2", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["vae"] == {"step": 2, "seconds": pytest.approx(summary["vae"]["seconds"]), "finished": True}
    assert "autoencoder: begins" in result.stderr
    again = train(*common, "--resume")
    assert again.exit_code == 0, again.output
    assert "vae: 2 steps" in again.stdout


def test_a_paused_leg_has_an_exit_code_of_its_own(tmp_path, sprites_path):
    settings = settings_file(tmp_path, 10**6)
    words = ("--out", tmp_path / "run", "--sprites", sprites_path, "--stage", "vae", "--settings", settings)
    result = train(*words, "--max-seconds", 1, "--pause")
    assert result.exit_code == 3
    assert "paused; go on with --resume" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sprites", "none.npz"), "diffsieve data sprites --out none.npz"),
        (("--stage", "more"), "stage must be one of all, continue"),
        (("--set", "dit.speed=3"), "unknown keys"),
        (("--set", "dit"), "must look like part.name=value"),
        (("--settings", "none.toml"), "readable"),
        (("--start-from", "none", "--stage", "dit"), "start_from must be a pipeline folder"),
        (("--max-seconds", "0"), "max_seconds must be positive"),
    ],
    ids=["sprites", "stage", "setting", "override", "file", "start", "seconds"],
)
def test_a_mistake_is_one_line(tmp_path, sprites_path, words, message):
    given = words if "--sprites" in words else (*words, "--sprites", sprites_path)
    result = train("--out", tmp_path / "run", *given)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def command(*words):
    return [sys.executable, "-m", "diffsieve", "train", "mini-wan", *map(str, words)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_leaves_the_last_save(tmp_path, sprites_path):
    from diffsieve.pipelines.training.checkpoint import load_weights

    settings = settings_file(tmp_path, 10**6, vae={"save_every": 1e-9})
    words = ("--out", tmp_path / "run", "--copy-to", tmp_path / "copy", "--sprites", sprites_path, "--stage", "vae")
    process = subprocess.Popen(command(*words, "--settings", settings), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    index = tmp_path / "copy" / "vae" / "weights.json"
    try:
        deadline = time.monotonic() + 240
        while not index.exists() or json.loads(index.read_text())["step"] < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert load_weights(tmp_path / "copy" / "vae").keys() == load_weights(tmp_path / "run" / "vae").keys()
    result = train(*words, "--resume", "--pause", "--max-seconds", 0.5)
    assert result.exit_code == 3, result.output


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path, sprites_path):
    settings = settings_file(tmp_path, 2, vae={"sample_every": 0.0})
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", "localhost:0"]
    python, *rest = command("--out", tmp_path / "run", "--sprites", sprites_path, "--settings", settings, "--json")
    done = subprocess.run([python, *launcher, *rest], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["finished"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "dit" / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["processes"]) for line in lines] == [(1, 2), (2, 2)]
