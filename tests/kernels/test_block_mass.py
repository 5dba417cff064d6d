"""The Triton kernel for attention between blocks against the definition in fp64, interpreted and on a GPU."""

import os

import pytest
import torch

from diffsieve.kernels.ba_att import TokenOrders
from diffsieve.study.mass import block_mass
from tests.kernels.own_process import run_script

pytest.importorskip("triton", reason="Triton has no build for this platform")

from tests.kernels.block_mass_cases import SCALE, checks, error, in_fp64, inputs, launches
from tests.kernels.compiling import SHARED_MEMORY, compile_launch

# Logits reach 40 here: rounded to 24 bits they are up to 2^-19 off, which is a share of the weights.
TOLERANCE = 2**-18
# Tensor cores cut off instead of rounding, after every 16 of the 64 terms: of the 133 that the scale makes 40 up to
# 2^-16 each time, in all 2^-15.7 of the logit.
TOLERANCE_GPU = 2**-15


@pytest.fixture(scope="module")
def interpreted():
    return run_script("interpreted_block_mass.py")


@pytest.mark.parametrize("name", checks())
def test_interpreted(interpreted, name):
    assert interpreted[name] <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("name", checks())
def test_on_a_gpu(name):
    assert checks()[name]("cuda") <= TOLERANCE_GPU


@pytest.mark.gpu
def test_as_in_the_study():
    """Two heads of mini-wan's large clips; in fp64 all six would take 60 GB."""
    assert error("cuda", (1, 2, 2, 17_600, 64), 128) <= TOLERANCE_GPU


def test_the_form_of_pytorch_holds_the_same_bound():
    query, key = inputs("cpu", (1, 2, 2, 70, 64), torch.bfloat16, gain=1.7)
    raster = TokenOrders(None, None)
    got, expected = block_mass(query, key, raster, block_size=32, scale=SCALE), in_fp64(query, key, raster, 32)
    assert float(((got - expected).abs() / expected).max()) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler")
@pytest.mark.parametrize("arch", [90, 80, 86])
def test_all_stays_in_registers(arch):
    found = launches()
    assert len(found) == 2
    for kernel, args, kwargs in found:
        result = compile_launch(kernel, args, kwargs, arch)
        assert result.spills == 0, result
        assert result.shared <= SHARED_MEMORY[arch]
        assert result.unwritten == []
        assert result.serialised == []
