"""The Triton kernels of LLSA without a GPU: results under the interpreter, and that they compile for the GPUs meant."""

import importlib.util
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import testing
from diffsieve.kernels.llsa.tiles import backward_key_tile, backward_query_tile, forward_tile
from tests.kernels.compiling import SHARED_MEMORY, compile_launch
from tests.kernels.llsa_triton_cases import CASES, launches, measure, not_a_number, op_contract, out_of_range
from tests.kernels.own_process import run_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no build for this platform"
)


@pytest.fixture(scope="module")
def interpreted() -> dict:
    return run_script("interpreted_llsa.py")


def _assert_within(result: dict) -> None:
    errors, bounds = result["errors"], result["bounds"]
    assert result.get("nested", True)
    assert {name: errors[name] for name in bounds if not errors[name] <= bounds[name]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_errors_are_at_most_twice_those_of_dense_attention(interpreted, case):
    results = [interpreted["cases"][name] for name in (f"{case}-fp32", f"{case}-fp16") if name in interpreted["cases"]]
    assert results
    for result in results:
        _assert_within(result)


@pytest.mark.slow
def test_interpreted_offsets_of_64_bits_give_the_same_bits(interpreted):
    assert len(interpreted["wide"]) == 3
    assert all(interpreted["wide"].values()), interpreted["wide"]


@pytest.mark.slow
def test_interpreted_levels_are_means_over_raw_tokens(interpreted):
    assert max(interpreted["pyramid"].values()) < 5e-7


@pytest.mark.slow
def test_interpreted_lists_equal_those_of_the_reference_ties_included(interpreted):
    assert all(interpreted["selection"].values()), interpreted["selection"]


@pytest.mark.slow
def test_interpreted_nan_is_reported_and_lists_stay_in_range(interpreted):
    assert interpreted["nan"] == {"in range": True, "reported": True}


@pytest.mark.slow
def test_interpreted_lists_out_of_range_read_nothing_outside(interpreted):
    assert all(interpreted["out_of_range"].values()), interpreted["out_of_range"]


@pytest.mark.slow
def test_interpreted_ops_keep_their_contract_and_compile_in_one_graph(interpreted):
    assert interpreted["op"] == {"attention": True, "selection": True, "compiled": True}


@pytest.mark.slow
def test_interpreted_identities_hold(interpreted):
    # Some tens of fp32 roundings in sums of at most 83 terms.
    assert max(interpreted["limits"].values()) < 2e-6, interpreted["limits"]


@pytest.mark.slow
def test_interpreted_lists_cut_into_parts_add_up(interpreted):
    assert max(interpreted["long_lists"].values()) < 2e-6, interpreted["long_lists"]


@pytest.mark.slow
def test_interpreted_nested_lists_are_transposed_as_by_a_sort(interpreted):
    assert all(interpreted["nested_lists"].values()), interpreted["nested_lists"]
    assert all(interpreted["nested_gradients"].values()), interpreted["nested_gradients"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "block_size", "levels", "disjoint"),
    [
        (90, torch.bfloat16, 64, 16, 2, False),
        (90, torch.bfloat16, 64, 16, 2, True),
        (80, torch.float16, 64, 16, 1, False),
        (90, torch.bfloat16, 128, 16, 2, True),
        (90, torch.bfloat16, 128, 64, 1, True),
        (80, torch.float16, 256, 16, 1, False),
    ],
    ids=["sm90-D64-M2", "sm90-D64-M2-disjoint", "sm80-D64-M1", "sm90-D128-M2", "sm90-D128-b64-M1", "sm80-D256-M1"],
)
def test_compiles_without_a_gpu(arch, dtype, dim, block_size, levels, disjoint):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 replaces the compiler")
    names = set()
    for kernel, args, kwargs in launches(dtype, dim, block_size, levels, disjoint):
        compiled = compile_launch(kernel, args, kwargs, arch)
        names.add(compiled.name)
        assert compiled.shared <= SHARED_MEMORY[arch], compiled.name
        assert compiled.unwritten == [], compiled.name
        # The scalars of a program may spill, the more so with a limit on registers; a spilled tile would be kilobytes.
        assert compiled.spills <= 512, f"{compiled.name}: {compiled.spills} bytes of spills"
        # The lists of a key are too narrow a tile for the products of a whole warpgroup.
        wide = compiled.name in ("enriched_fwd_kernel", "enriched_bwd_dq_kernel") or kwargs.get("DENSE", False)
        if arch == 90 and wide:
            assert "wgmma.mma_async" in compiled.ptx, compiled.name
    assert len(names) == 7


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_every_tile_fits_its_block(block_size, element_size):
    for dim in (16, 32, 64, 128, 256):
        for tile in (forward_tile(dim, block_size, element_size), backward_query_tile(dim, block_size, element_size)):
            # Whole units of 16 rows or one block, all under the same parent.
            assert tile.rows % max(16, block_size) == 0
            assert block_size**2 % tile.rows == 0
            assert min(tile.coarse_n, tile.fine_n) >= 16
        for coarsest in (False, True):
            key_tile = backward_key_tile(dim, block_size, element_size, coarsest=coarsest)
            assert min(key_tile.rows, key_tile.keys) >= 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(
            replace(CASES[0], length=n, dim=64, block_size=16, topk=8, levels=2, disjoint=disjoint)
            for n, disjoint in ((1000, False), (4111, False), (2000, True))
        ),
    ],
    ids=str,
)
def test_errors_on_a_gpu(case, dtype):
    _assert_within(measure(case, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        replace(CASES[0], heads=2, length=1030, dim=32, block_size=16, topk=8, levels=2),
        replace(CASES[0], heads=2, length=1030, dim=64, block_size=16, topk=8, levels=2, disjoint=True),
        replace(CASES[0], heads=2, length=200, dim=128, block_size=64, topk=1),
    ],
    ids=str,
)
def test_errors_in_fp32_on_a_gpu(case):
    _assert_within(measure(case, torch.float32, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_disjoint_with_all_kept_is_dense_attention_on_a_gpu(levels):
    from diffsieve.kernels.llsa import llsa_attention

    generator = torch.Generator("cuda").manual_seed(testing.SEED)
    inputs = [torch.randn(2, 3, 300, 64, generator=generator, device="cuda").bfloat16() for _ in range(4)]
    results = []
    for attend, dtype in (
        (
            partial(llsa_attention, block_size=8, topk=99, levels=levels, disjoint=True, backend="triton"),
            torch.bfloat16,
        ),
        (scaled_dot_product_attention, torch.bfloat16),
        (scaled_dot_product_attention, torch.float64),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
        out = attend(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(dtype))])
    for name, ours, dense, exact in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert testing.error_ratio(ours, exact) <= testing.error_bound(dense, exact), name


@pytest.mark.gpu
def test_bad_values_and_lists_read_nothing_outside_on_a_gpu():
    assert not_a_number("cuda") == {"in range": True, "reported": True}
    assert all(out_of_range("cuda").values())


@pytest.mark.gpu
def test_ops_keep_their_contract_and_compile_in_one_graph_on_a_gpu():
    assert op_contract("cuda") == {"attention": True, "selection": True, "compiled": True}


@pytest.mark.gpu
def test_gradients_are_bitwise_repeatable_on_a_gpu():
    from diffsieve.kernels.llsa import llsa_attention

    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(1, 4, 16_384, 64, generator=generator, device="cuda").bfloat16().requires_grad_() for _ in range(3)
    ]
    runs = []
    for _ in range(2):
        out = llsa_attention(*leaves, levels=2, backend="triton")
        runs.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    assert all(map(torch.equal, *runs))
