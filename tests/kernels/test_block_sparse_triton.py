"""The Triton kernel without a GPU: its results under the interpreter, and that it compiles for the GPUs it is for."""

import importlib.util
import os

import pytest
import torch

from diffsieve.kernels.block_sparse.tiles import TileConfig, select_tile
from tests.kernels.cases import ONE_KEY_CASES, TRITON_CASES
from tests.kernels.compiling import SHARED_MEMORY
from tests.kernels.own_process import run_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)


@pytest.fixture(scope="module")
def interpreted() -> dict:
    return run_script("interpreted_block_sparse.py")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", TRITON_CASES, ids=str)
def test_interpreted_error_is_at_most_twice_that_of_dense_attention(interpreted, case, dtype):
    result = interpreted["cases"][f"{case}-{dtype}"]
    for way in ("op", "pointers"):
        assert result[way]["error"] <= result["bound"]
        assert result[way]["lse_error"] <= result["lse_bound"]
        assert result[way]["layout"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", ONE_KEY_CASES, ids=str)
def test_interpreted_result_where_one_key_takes_all_of_the_weight(interpreted, case, dtype):
    result = interpreted["one_key"][f"{case}-{dtype}"]
    assert result["error"] <= result["bound"]
    assert result["same"] > 0.995
    assert result["lse_error"] <= 1e-6


@pytest.mark.slow
def test_interpreted_programs_with_large_logits_alone_are_computed_again(interpreted):
    assert interpreted["flags"] == {"8188": [0, 0, 0], "8300": [0, 1, 0], "-8188": [0, 0, 0], "-8300": [0, 1, 0]}


@pytest.mark.slow
def test_interpreted_lists_out_of_range_read_nothing_outside(interpreted):
    assert all(interpreted["out_of_range"].values()), interpreted["out_of_range"]


@pytest.mark.slow
def test_interpreter_runs_only_when_asked_for(interpreted):
    assert interpreted["choices"] == {"auto": "torch", "triton": "triton"}


def _compile(
    arch: int, dtype: str, dim: int, block_size: int, tile: TileConfig, descriptors: bool, subtract_first: bool
):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from diffsieve.kernels.block_sparse.triton_backend import block_sparse_fwd_kernel

    constants: dict[str, object] = {
        "BLOCK_SIZE": block_size, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "HEAD_DIM": dim, "BLOCK_D": dim,
        "HAS_COUNT": True, "STORE_LSE": True, "USE_DESCRIPTOR": descriptors, "PRECISION": "ieee",
        "NUM_STAGES": tile.num_stages, "SUBTRACT_FIRST": subtract_first,
        "stride_qd": 1, "stride_kd": 1, "stride_vd": 1, "stride_od": 1,
    }  # fmt: skip
    types = {"out": f"*{dtype}", "lse": "*fp32", "flags": "*i32", "block_index": "*i32", "block_count": "*i32"}
    types["scale_log2"] = "fp32"
    for name, rows in (("query", tile.block_m), ("key", tile.block_n), ("value", tile.block_n)):
        types[name] = f"tensordesc<{dtype}[1, 1, {rows}, {dim}]>" if descriptors else f"*{dtype}"
    signature, attributes = {}, {}
    for position, name in enumerate(block_sparse_fwd_kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name].startswith("*") or (name.startswith("stride") and name not in constants):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(block_sparse_fwd_kernel, signature, constants, attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "block_size", "descriptors"),
    [
        (90, "bf16", 128, 128, True),
        (90, "bf16", 128, 128, False),
        (90, "fp16", 64, 64, True),
        (90, "bf16", 256, 128, True),
        (80, "bf16", 128, 128, False),
        (80, "fp16", 256, 128, False),
        (86, "bf16", 128, 128, False),
        (86, "bf16", 256, 64, False),
        (86, "fp32", 128, 64, False),
    ],
    ids=lambda value: {True: "descriptors", False: "pointers"}.get(value) if isinstance(value, bool) else str(value),
)
@pytest.mark.parametrize("subtract_first", [False, True], ids=["first", "second"])
def test_compiles_without_a_gpu(arch, dtype, dim, block_size, descriptors, subtract_first):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 replaces the compiler")
    tile = select_tile(divmod(arch, 10), dim, block_size, 4 if dtype == "fp32" else 2)
    compiled = _compile(arch, dtype, dim, block_size, tile, descriptors, subtract_first)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    ptx = compiled.asm["ptx"]
    assert ("wgmma.mma_async" in ptx) == (arch == 90)
    assert ("cp.async.bulk.tensor" in ptx) == descriptors
    if dtype != "fp32":
        assert arch == 90 or "mma.sync" in ptx


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_tile_divides_its_block(capability, block_size, element_size):
    for dim in (16, 32, 64, 128, 256):
        tile = select_tile(capability, dim, block_size, element_size)
        assert block_size % tile.block_m == 0
        assert block_size % tile.block_n == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", TRITON_CASES, ids=str)
def test_error_on_a_gpu(case, dtype):
    from diffsieve.kernels import testing
    from diffsieve.kernels.block_sparse import block_sparse_attention

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    inputs = testing.make_inputs(case, dtype=torch_dtype, device="cuda")
    options = {"block_size": case.block_size, "return_lse": True}
    exact, exact_lse = testing.exact_attention(inputs, block_size=case.block_size)
    _, single_lse = block_sparse_attention(*inputs.floats_to(torch.float32).tensors(), backend="reference", **options)
    with testing.poisoned_memory():
        out, lse = block_sparse_attention(*inputs.tensors(), backend="triton", **options)
        again, _ = block_sparse_attention(*inputs.tensors(), backend="triton", **options)
    bound = testing.error_bound(testing.masked_sdpa(inputs, block_size=case.block_size), exact)
    assert testing.error_ratio(out, exact) <= bound
    assert testing.lse_error(lse, exact_lse) <= testing.lse_bound(single_lse, exact_lse)
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize(("dim", "block_size"), [(64, 128), (128, 128), (64, 64), (128, 64)])
def test_error_where_one_key_takes_all_of_the_weight_on_a_gpu(dim, block_size, density, dtype):
    from diffsieve.kernels import testing
    from diffsieve.kernels.block_sparse import block_sparse_attention

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    case = testing.AttentionCase(
        heads=2, len_q=2000, len_k=2000, dim=dim, block_size=block_size, density=density, gain=200.0
    )
    inputs = testing.make_inputs(case, dtype=torch_dtype, device="cuda")
    options = {"block_size": block_size, "backend": "triton", "return_lse": True}
    with testing.poisoned_memory():
        (out, lse), (again, _) = (block_sparse_attention(*inputs.tensors(), **options) for _ in range(2))
    exact, exact_lse = testing.exact_attention(inputs, block_size=block_size)
    assert testing.error_ratio(out, exact) <= testing.one_key_bound(torch_dtype)
    assert (out == exact.to(torch_dtype)).double().mean() > 0.99
    assert ((lse - exact_lse).abs() <= exact_lse.abs() * 1e-6).all()
    assert torch.equal(out, again)


@pytest.mark.gpu
def test_a_new_length_does_not_compile_again_on_a_gpu():
    from diffsieve.kernels import testing
    from diffsieve.kernels.block_sparse import block_sparse_attention
    from diffsieve.kernels.block_sparse.triton_backend import block_sparse_fwd_kernel

    compiled = []
    for length in (128, 129, 450, 1024, 2000):
        case = testing.AttentionCase(heads=2, len_q=length, len_k=length, dim=64, block_size=64)
        inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
        block_sparse_attention(*inputs.tensors(), block_size=64, backend="triton")
        caches = block_sparse_fwd_kernel.device_caches.values()
        compiled.append(sum(len(cache[0]) for cache in caches))
    assert len(set(compiled)) == 1


@pytest.mark.gpu
def test_compiles_into_one_graph_on_a_gpu():
    from diffsieve.kernels import testing
    from diffsieve.kernels.block_sparse import block_sparse_attention

    case = testing.AttentionCase(heads=2, len_q=450, len_k=450, dim=64, block_size=64, variable=True)
    inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")

    def function(query, key, value, block_index, block_count):
        return block_sparse_attention(query * 2, key, value, block_index, block_count, block_size=64) + 1

    compiled = torch.compile(function, fullgraph=True)(*inputs.tensors())
    torch.testing.assert_close(compiled, function(*inputs.tensors()), rtol=2**-7, atol=2**-7)
