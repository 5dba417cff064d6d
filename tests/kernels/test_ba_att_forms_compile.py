"""Kernels of the steps of BA-Att compile for Hopper and Ampere at real sizes, with all in registers."""

import importlib.util
import os

import pytest

from tests.kernels.ba_att_cases import launches
from tests.kernels.compiling import SHARED_MEMORY, compile_launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"),
]


# The tile of the scores is chosen for Hopper: elsewhere up to eight words of it spill, on sm_86 with every compiler and
# on sm_80 with that of Triton 3.6 (six).
@pytest.mark.parametrize(("arch", "spills"), [(90, 0), (80, 32), (86, 32)])
def test_all_stays_in_registers(arch, spills):
    found = launches()
    assert len(found) == 16
    for kernel, args, kwargs in found:
        if arch != 90 and (kwargs.get("maxnreg") is not None or kernel.__name__ == "add_skipped_ahead_kernel"):
            continue  # Hopper's
        result = compile_launch(kernel, args, kwargs, arch)
        assert result.spills <= spills, result.name
        assert result.shared <= SHARED_MEMORY[arch], result.name
        assert result.unwritten == [], result.name
        assert result.serialised == [], result.name
