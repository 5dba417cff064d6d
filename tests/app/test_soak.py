"""Many runs one after the other: memory and files stay flat. DIFFSIEVE_SOAK sets how many (default 16)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = int(os.environ.get("DIFFSIEVE_SOAK", "16"))
SETTLED = max(RUNS // 4, 8)  # caches and pools of threads are filled by then
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of the process from /proc")
def test_memory_and_files_stay_flat(tmp_path):
    # In a process of its own: what other tests of this one have left or still give back is not the server's.
    command = [sys.executable, "-m", "tests.app.soak", str(tmp_path), str(RUNS), str(SETTLED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bytes"] < 4_000_000
    assert found["served"] <= found["runs"] + 1
    grown = found["after"] - found["before"]
    sys.__stderr__.write(f"\nsoak: {found['before']:.0f} MB after {SETTLED} runs, {grown:+.1f} MB after {RUNS}\n")
    # Allocators do not give everything back at once; a leak of one clip (0.1 MB) in each run would show over 200.
    assert grown < 20 + 0.05 * (RUNS - SETTLED)
