"""Not a test file: runs a script beside it in a process of its own, such as one under the Triton interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_script(name: str) -> dict[str, Any]:
    """Return the JSON object that a script of this folder writes to stdout, on one thread."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(HERE / name)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found
