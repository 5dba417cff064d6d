"""The Triton backward of block-sparse attention: gradients in the interpreter, and compilation for GPUs."""

import importlib.util
import os

import pytest
import torch

from diffsieve.kernels.block_sparse.tiles import select_backward_tile
from tests.kernels.backward_cases import BACKWARD_CASES, gradient_errors
from tests.kernels.compiling import SHARED_MEMORY, compile_launch, launches_of
from tests.kernels.own_process import run_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)


@pytest.fixture(scope="module")
def interpreted() -> dict:
    return run_script("interpreted_block_sparse_backward.py")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", BACKWARD_CASES, ids=str)
def test_interpreted_errors_are_at_most_twice_those_of_dense_attention(interpreted, case, dtype):
    result = interpreted[f"{case}-{dtype}"]
    for name, bound in result["bounds"].items():
        assert result["errors"][name] <= bound, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "block_size"),
    [(90, torch.bfloat16, 128, 128), (90, torch.bfloat16, 64, 64), (80, torch.float16, 64, 128)],
    ids=["sm90-D128-b128", "sm90-D64-b64", "sm80-D64-b128"],
)
def test_compiles_without_a_gpu(arch, dtype, dim, block_size):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 replaces the compiler")
    from diffsieve.kernels.block_sparse import triton_backward

    query = torch.zeros(1, 2, 2 * block_size, dim, dtype=dtype)
    index = torch.zeros(1, 2, 2, 2, dtype=torch.int32)
    launches = launches_of(
        triton_backward,
        lambda: triton_backward.block_sparse_attention_triton_backward(
            query, None, query, query, query, index, None,
            block_size=block_size, scale=0.1, out=query, lse=torch.zeros(1, 2, 2 * block_size),
        ),
    )  # fmt: skip
    assert len(launches) == 2
    for kernel, args, kwargs in launches:
        compiled = compile_launch(kernel, args, kwargs, arch)
        assert compiled.shared <= SHARED_MEMORY[arch], compiled.name
        assert compiled.spills <= 256, f"{compiled.name}: {compiled.spills} bytes of spills"
        assert ("wgmma.mma_async" in compiled.ptx) == (arch == 90)


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_tile_divides_its_block(block_size, element_size):
    for kernel in ("query", "key"):
        for dim in (16, 32, 64, 128, 256):
            tile = select_backward_tile(kernel, dim, block_size, element_size)
            assert block_size % tile.block_m == 0
            assert block_size % tile.block_n == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", BACKWARD_CASES, ids=str)
def test_errors_on_a_gpu(case):
    result = gradient_errors(case, torch.bfloat16, "cuda")
    for name, bound in result["bounds"].items():
        assert result["errors"][name] <= bound, name
