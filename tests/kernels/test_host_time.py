"""The benchmark of the host's time runs; calls launch no more kernels and start no more operations than they did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no build for this platform")

ROOT = Path(__file__).parents[2]

# Launches; operations of PyTorch's dispatcher at most, allocations and views among them.
COUNTS = {
    "block-sparse triton": (2, 7),
    "block-sparse hopper": (2, 7),
    "llsa forward": (4, 15),
    "llsa forward and backward": (12, 26),
}


@pytest.mark.slow
def test_counts_of_calls(tmp_path):
    command = [sys.executable, "benchmarks/host_time.py", "--repeats", "3", "--out", str(tmp_path), "--only", *COUNTS]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    cases = json.loads((tmp_path / "host_time.json").read_text())["cases"]
    for name, (launches, operations) in COUNTS.items():
        found = cases[name]
        assert sum(found["launches"].values()) == launches, name
        assert 0 < sum(found["operations"].values()) <= operations, (name, found["operations"])
        assert sum(found["parts_us"].values()) == pytest.approx(found["median_us"], abs=1)
