"""Every Triton kernel of the package compiles for a Hopper GPU, on a machine without one."""

import importlib
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kernels.compiling import SHARED_MEMORY, compile_launch, launches_of, reads_before_writes

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"),
]


def block_sparse() -> list:
    from diffsieve.kernels.block_sparse import hopper_backend, triton_backend, triton_backward

    query, lists = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 2, 2, dtype=torch.int32)
    options = {"block_size": 128, "scale": 0.1}
    inputs = query, query, query, lists, None

    def run() -> None:
        triton_backend.block_sparse_attention_triton(*inputs, **options, return_lse=True)
        hopper_backend.block_sparse_attention_hopper(*inputs, **options, return_lse=True)
        triton_backward.block_sparse_attention_triton_backward(
            query, None, *inputs, **options, out=query, lse=torch.zeros(1, 2, 256)
        )

    # The tile of the forward is chosen for the GPU at hand.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        return launches_of([hopper_backend, triton_backend, triton_backward], run)


def ba_att() -> list:
    from tests.kernels.ba_att_cases import launches

    return launches()


def block_mass() -> list:
    from tests.kernels.block_mass_cases import launches

    return launches()


def llsa() -> list:
    from tests.kernels.llsa_triton_cases import launches

    return launches(torch.bfloat16, dim=32, block_size=16, levels=2, disjoint=False)


def norm_silu() -> list:
    from diffsieve.pipelines.training import norm_silu_kernels
    from diffsieve.pipelines.training.norm_silu import norm_silu_pad

    x = torch.zeros(1, 32, 2, 8, 8, dtype=torch.bfloat16).requires_grad_()
    gamma = torch.ones(32).requires_grad_()

    def run() -> None:
        # Gradients would be computed in a thread of their own, where no error names this test.
        norm_silu_pad(x, gamma, 2).sum().backward()

    return launches_of(norm_silu_kernels, run)


LAUNCHES: dict[str, Callable[[], list]] = {f.__name__: f for f in (block_sparse, ba_att, block_mass, llsa, norm_silu)}


def kernels() -> set[str]:
    """Names of the compiled functions of the package that are launched, not called by others."""
    names = set()
    for path in sorted((ROOT / "diffsieve").rglob("*.py")):
        if re.search(r"@(triton|gluon)\.jit", path.read_text(encoding="utf-8")):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            names |= {name for name in vars(module) if name.endswith("_kernel")}
    return names


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper():
    compiled = set()
    for launches in (make() for make in LAUNCHES.values()):
        for kernel, args, kwargs in launches:
            result = compile_launch(kernel, args, kwargs, 90)
            assert result.shared <= SHARED_MEMORY[90], result.name
            assert result.unwritten == [], result.name
            compiled.add(result.name)
    assert compiled == kernels(), "a kernel without a launch here is compiled by no test"


def test_reads_of_registers_that_nothing_wrote_are_found():
    # The second line is from a kernel that the assembler of CUDA 12.8 got wrong.
    code = """
        /*1390*/                   UIADD3 UR15, UR4, 0x2000, URZ ;
        /*13b0*/                   UIADD3 UR14, UP0, UR14, 0x20, URZ ;
        /*13c0*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR48], RZ, !UPT ;
"""
    good = "        /*1370*/                   ULDC.64 UR4, c[0x0][0x208] ;"
    assert reads_before_writes(good + code) == ["UIADD3 UR14, UP0, UR14, 0x20, URZ"]
    assert reads_before_writes(good + code.replace("UP0, UR14", "UP0, UR15")) == []
