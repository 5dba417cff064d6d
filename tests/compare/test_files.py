"""A file is complete or absent: success, failure, a killed process."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from diffsieve.compare.files import atomic_path, remove_parts, write_frames, write_json


def test_the_file_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "a.txt"
    with atomic_path(target) as part:
        part.write_text("half")
        assert not target.exists()
    assert target.read_text() == "half"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["error", "interrupt"])
def test_a_failure_leaves_the_old_file(tmp_path, error):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail_half_way():
        with atomic_path(target) as part:
            part.write_text("new")
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_json_that_is_not_json_is_refused_and_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"psnr": float("inf")})
    assert list(tmp_path.iterdir()) == []
    write_json(tmp_path / "a.json", {"psnr": None, "prompt": "é"})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"psnr": None, "prompt": "é"}


def test_raw_frames_are_lossless(tmp_path, generator):
    frames = torch.rand(2, 3, 5, 7, generator=generator)
    write_frames(tmp_path / "a.npz", frames, total=1.5)
    with np.load(tmp_path / "a.npz") as values:
        assert torch.equal(torch.from_numpy(values["frames"]), frames)
        assert float(values["total"]) == 1.5


def test_a_process_killed_while_it_writes_a_clip_leaves_no_clip(tmp_path):
    # Noise at this size takes the encoder seconds; the kill comes as soon as the hidden file is there.
    code = (
        "import sys, torch; from pathlib import Path; from diffsieve.compare.video import write_mp4\n"
        "write_mp4(Path(sys.argv[1]), torch.randint(0, 256, (100, 3, 480, 640), dtype=torch.uint8), fps=24)"
    )
    target = tmp_path / "clip.mp4"
    process = subprocess.Popen([sys.executable, "-c", code, str(target)])
    part = tmp_path / ".clip.mp4.diffsieve-part"
    deadline = time.monotonic() + 120
    while not part.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert part.exists(), "the clip was finished before it could be killed"
    process.kill()
    process.wait()
    assert not target.exists()
    while part.exists():  # the encoder may still be closing it
        remove_parts(tmp_path)
    assert list(tmp_path.iterdir()) == []
