"""The Triton kernels of scores and selection against PyTorch and the definition, interpreted and on a GPU."""

import pytest

from tests.kernels.ba_att_selection_cases import checks
from tests.kernels.own_process import run_script

# Three products of TF32 parts leave 2^-21 of the terms (`scores.matmul_split`). Three times as much again is for the
# logarithm and for the sums, which tensor cores cut off after every eight terms, on average by 2^-24 of what they hold.
TOLERANCE = 2**-19


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    return run_script("interpreted_ba_att_selection.py")


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
