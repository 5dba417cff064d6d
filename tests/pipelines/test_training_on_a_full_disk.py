"""Training where the disk is full: it says so, keeps the last save whole, leaves nothing, and goes on later."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffsieve.pipelines.training.checkpoint import load_weights
from diffsieve.pipelines.training.pixel_dit.run import train_pixel_dit
from tests.pipelines.full_disk_cases import BROKEN_AT, STEPS, left_over, losses, settings, steps_on_disk
from tests.small_disk import MOUNT, NO_MOUNTS, has_mounts

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")  # every write to it fails as on a full disk, for everybody
WEIGHTS = f"weights-{BROKEN_AT:07d}-00.safetensors"
needs_dev_full = pytest.mark.skipif(not FULL.is_char_device(), reason="needs /dev/full")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    train_pixel_dit(out, data, settings())
    return out


def resumes_like(out, data, whole):
    train_pixel_dit(out, data, resume=True)
    assert losses(out) == losses(whole)
    assert [step for step, _ in losses(out)] == list(range(1, STEPS + 1))
    one, other = load_weights(out / "dit"), load_weights(whole / "dit")
    assert all(torch.equal(one[name], other[name]) for name in other)


@needs_dev_full
@pytest.mark.parametrize(
    ("name", "state"),
    [("state.pt", BROKEN_AT - 1), (WEIGHTS, BROKEN_AT), ("weights.json", BROKEN_AT)],
    ids=["state", "weights", "index"],
)
def test_a_save_that_the_disk_refuses_keeps_the_one_before(tmp_path, data, whole, name, state):
    """The temporary file of a save is one that the system refuses to fill."""

    def report(entry):
        if entry.step == BROKEN_AT:
            (tmp_path / "dit" / f".{name}.part").symlink_to(FULL)

    with pytest.raises(OSError, match=rf"No space left on device: '.*/dit/{name}'") as raised:
        train_pixel_dit(tmp_path, data, settings(), report=report)
    assert raised.value.errno == errno.ENOSPC
    assert left_over(tmp_path) == []
    assert steps_on_disk(tmp_path) == [state, BROKEN_AT - 1]
    resumes_like(tmp_path, data, whole)


@needs_dev_full
def test_a_log_that_the_disk_refuses_is_named(tmp_path, data, whole):
    log, aside = tmp_path / "dit" / "log.jsonl", tmp_path / "aside"

    def report(entry):
        if entry.step == BROKEN_AT:
            log.rename(aside)
            log.symlink_to(FULL)

    with pytest.raises(OSError, match=r"No space left on device: '.*/dit/log\.jsonl'"):
        train_pixel_dit(tmp_path, data, settings(), report=report)
    log.unlink()
    aside.rename(log)
    with open(log, "a") as file:
        file.write('{"step": 4, "lo')  # what there was place for
    assert left_over(tmp_path) == []
    assert steps_on_disk(tmp_path) == [BROKEN_AT, BROKEN_AT]
    resumes_like(tmp_path, data, whole)


@needs_dev_full
def test_a_copy_that_the_disk_refuses_keeps_the_one_before(tmp_path, data, whole):
    """The folder of `copy_to` is on another disk, which is full."""
    out, copy = tmp_path / "run", tmp_path / "copy"

    def report(entry):
        if entry.step == BROKEN_AT:
            (copy / "dit" / ".weights.json.part").symlink_to(FULL)

    with pytest.raises(OSError, match=r"No space left on device.*weights\.json"):
        train_pixel_dit(out, data, settings(), report=report, copy_to=copy)
    assert left_over(copy) == []
    assert json.loads((copy / "dit" / "weights.json").read_text())["step"] == BROKEN_AT - 1
    assert load_weights(copy / "dit")
    assert steps_on_disk(out) == [BROKEN_AT, BROKEN_AT]
    resumes_like(out, data, whole)


@pytest.mark.skipif(not has_mounts(), reason=NO_MOUNTS)
@pytest.mark.parametrize("room", ["none", "for half of the state"])
def test_a_run_on_a_file_system_that_fills_up_goes_on_when_there_is_room(tmp_path, data, whole, room):
    folder = tmp_path / "disk"
    folder.mkdir()
    spare = 0 if room == "none" else (whole / "dit" / "state.pt").stat().st_size // 2
    command = [*MOUNT, str(folder), "4m", sys.executable, "-m", "tests.pipelines.filling_training"]
    done = subprocess.run(
        [*command, str(folder), str(data), str(spare)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errno"] == errno.ENOSPC
    assert found["said"] == f"[Errno 28] No space left on device: '{folder}/run/dit/state.pt'"
    assert found["left"] == []
    assert found["steps"] == [BROKEN_AT - 1, BROKEN_AT - 1]
    assert found["losses"] == losses(whole)
