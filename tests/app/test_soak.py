"""Many runs one after the other: memory and files stay flat. DIFFSIEVE_SOAK sets how many (default 16)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.soak import BYTES

RUNS = int(os.environ.get("DIFFSIEVE_SOAK", "16"))
EVERY = max(RUNS // 10, 8)  # caches and pools of threads are filled by then
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/cpu/app_soak.json"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of the process from /proc")
def test_memory_and_files_stay_flat(tmp_path):
    # In a process of its own: what other tests of this one have left or still give back is not the server's.
    file = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.app.soak", "--runs", str(RUNS), "--every", str(EVERY), "--out", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["memory"]
    assert rows[-1]["runs"] == RUNS
    grown = held(rows, -1) - held(rows, 1)
    sys.__stderr__.write(f"\nsoak: {held(rows, 1):.0f} MB after {EVERY} runs, {grown:+.1f} MB after {RUNS}\n")
    flat(rows)


def test_the_recorded_runs_were_flat():
    rows = json.loads(RECORD.read_text())["memory"]
    assert [row["runs"] for row in rows] == list(range(0, 201, 20))
    flat(rows)


def flat(rows):
    assert all(row["bytes_stored"] < BYTES + 1_000_000 for row in rows)  # cleaned before each run
    assert all(row["runs_served"] <= row["runs_stored"] + 1 for row in rows)
    # Allocators do not give everything back at once; a leak of one clip (0.1 MB) in each run would show over 200.
    assert held(rows, -1) - held(rows, 1) < 20 + 0.05 * (rows[-1]["runs"] - rows[1]["runs"])


def held(rows, place):
    return rows[place]["megabytes_held"]
