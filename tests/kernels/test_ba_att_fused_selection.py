"""The Triton kernels of scores and selection against PyTorch and the definition, interpreted and on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.ba_att_selection_cases import checks

ROOT = Path(__file__).parents[2]
# Three products of TF32 parts leave 2^-21 of the terms; sums and the logarithm add a few roundings of 2^-24.
TOLERANCE = 2**-19


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/kernels/interpreted_ba_att_selection.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def holds(found):
    return found if isinstance(found, bool) else found <= TOLERANCE


@pytest.mark.parametrize("name", checks())
def test_interpreted(interpreted, name):
    assert holds(interpreted[name]), interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", checks())
def test_on_a_gpu(name):
    found = checks()[name]("cuda")
    assert holds(found), found
