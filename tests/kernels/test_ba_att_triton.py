"""BA-Att's own Triton kernels: gather with moments, undoing the order, the centroid term, and the whole call."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from diffsieve.kernels import testing
from diffsieve.kernels.ba_att import (
    CustomSelection,
    ba_attention,
    calibrate_budgets,
    calibrate_orders,
    kept_video_blocks,
)
from diffsieve.kernels.ba_att.reference import attention_of_head, ba_attention_reference
from tests.kernels.ba_att_cases import CASES, CENTROID, BAAttCase, make_inputs, relative_error
from tests.kernels.own_process import run_script


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    return run_script("interpreted_ba_att.py")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_call(interpreted, case):
    found = interpreted["whole call"][str(case)]
    assert found["same blocks"]
    assert found["same again"]
    assert found["error"] <= 2 * found["plain error"]


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_steps(interpreted, case):
    differences = interpreted["steps"][str(case)]
    assert len(differences) == 6
    assert all(difference < 1e-5 for difference in differences.values())


def test_skipped_blocks(interpreted):
    assert len(interpreted["skipped"]) == 48
    for name, found in interpreted["skipped"].items():
        assert found["error"] <= 2 * found["plain error"] + 2**-12, name
        assert found["log-sum-exp"] < 1e-5, name


def test_compiled_whole_call(interpreted):
    # The compiler may round products of moments and norms in an order of its own.
    assert interpreted["compiled"] < 1e-3


def test_calibration_with_the_kernels_of_a_gpu(interpreted):
    # Both round outputs to fp16, each its own way: a small part of errors as large as these.
    assert interpreted["calibration"] < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
# On Hopper `auto` takes the kernel for it where its shapes allow.
@pytest.mark.parametrize(("backend", "kernels"), [("triton", ["triton"]), ("auto", ["triton", "hopper"])])
def test_whole_call_on_a_gpu(case, dtype, backend, kernels):
    inputs = make_inputs(case, dtype, "cuda")
    options = case.options()
    with testing.poisoned_memory():
        out, info = ba_attention(*inputs, backend=backend, return_info=True, **options)
        again = ba_attention(*inputs, backend=backend, **options)
    assert info.backend in kernels
    assert torch.equal(out, again)
    plain, plain_info = ba_attention(*inputs, backend="torch", return_info=True, **options)
    assert torch.equal(info.block_index, plain_info.block_index)
    exact, _ = ba_attention_reference(*(x.double().cpu() for x in inputs), **options)
    assert relative_error(out.cpu(), exact) <= 2 * relative_error(plain.cpu(), exact)


def keep_none_to_two(query, key, *, kept, block_size, scale):
    """A selection: the first blocks, 0, 1, 2, 0, 1, 2 ... of them for the rows."""
    rows = *query.shape[:2], -(-query.shape[2] // block_size)
    count = torch.arange(rows[2], dtype=torch.int32, device=query.device) % 3
    index = torch.arange(2, dtype=torch.int32, device=query.device)
    return index.expand(*rows, 2).contiguous(), count.expand(rows).contiguous()


# Queries and keys lie so far apart that weights are below what fp16 holds, then fp32.
@pytest.mark.parametrize("apart", [0.0, 3.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "torch"), *(pytest.param("cuda", b, marks=pytest.mark.gpu) for b in ("torch", "auto"))],
)
def test_rows_without_a_kept_block_far_below_zero(device, backend, dtype, apart):
    case = BAAttCase((3, 5, 7), "raster", extra=CENTROID)
    query, key, value = make_inputs(case, dtype)
    inputs = query + apart, key - apart, value
    custom = CustomSelection(select=keep_none_to_two)
    out = ba_attention(*(x.to(device) for x in inputs), custom=custom, backend=backend, **case.options()).cpu()
    kept = [[*range(row % 3)] for row in range(7)]
    nothing = torch.empty(0, case.dim, dtype=torch.float64)
    exact = torch.empty(query.shape, dtype=torch.float64)
    for item in range(2):
        for head in range(case.heads):
            tokens = (x[item, head].double() for x in inputs)
            exact[item, head] = attention_of_head(
                *tokens, kept, case.block_size, case.dim**-0.5, "centroid", nothing, nothing
            )
    # The kernels round the means to 16 bits, against logits of up to `apart`^2 * sqrt(D).
    rounding = torch.finfo(dtype).eps
    assert relative_error(out, exact) < 4 * rounding * (1 if backend == "torch" else 1 + apart)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize(
    ("case", "calibrate"),
    [
        (CASES[1], calibrate_orders),
        (CASES[0], partial(calibrate_budgets, orders=torch.tensor(CASES[0].orders))),
        (CASES[0], partial(calibrate_budgets, orders="hilbert_window")),
    ],
    ids=["orders", "budgets", "budgets in one order"],
)
def test_calibration_on_a_gpu(case, calibrate, backend):
    inputs = make_inputs(case, torch.bfloat16)
    options = {"grid_thw": case.grid, "density": case.density, "block_size": case.block_size}
    options |= {"compensate": "centroid", "score": "residual"}
    expected = calibrate(*inputs, **options)
    found, again = (calibrate(*(x.cuda() for x in inputs), backend=backend, **options) for _ in range(2))
    assert torch.equal(found, again)
    # Sums in another order may swap two blocks of nearly equal score, of the few that there are.
    assert ((found.cpu() - expected).abs() / expected).median() < 0.02
    whole = torch.compile(partial(calibrate, backend=backend, **options), fullgraph=True)
    assert torch.equal(whole(*(x.cuda() for x in inputs)), found)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if "budgets" in dict(case.extra)], ids=str)
def test_budgets_on_a_gpu_at_many_rows(case):
    """Equal budgets are the call without them, bit for bit; other ones are not; both eager and compiled."""
    torch._dynamo.reset()
    case = replace(case, grid=(7, 24, 40), dim=128, block_size=128, density=0.25)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    options = case.options() | {"return_info": True}
    number = kept_video_blocks(53, 1 if "text_suffix" in options else 0, 0.25)
    equal, spread = torch.full((case.heads,), number), torch.arange(case.heads) * 9 + 1
    expected, info = ba_attention(*inputs, **options | {"budgets": None})
    assert info.block_index.shape[-1] == number
    out, _ = ba_attention(*inputs, **options | {"budgets": equal})
    assert torch.equal(out, expected)
    compiled = torch.compile(ba_attention, fullgraph=True)
    for budgets in (equal, spread):
        eager, plain_info = ba_attention(*inputs, **options | {"budgets": budgets})
        got, info = compiled(*inputs, **options | {"budgets": budgets})
        assert relative_error(got, eager.double()) < 5e-3
        assert info.kept_token_pairs == plain_info.kept_token_pairs
    plain, _ = ba_attention(*inputs, backend="torch", **options | {"budgets": spread})
    assert relative_error(eager, plain.double()) < 1e-2
    assert not torch.equal(eager, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("table", ["cuda", "cpu"])
def test_compiled_whole_call_on_a_gpu(table):
    torch._dynamo.reset()
    case = CASES[0]
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    options = {**case.options(), "orders": torch.tensor(case.orders, device=table)}
    compiled = torch.compile(ba_attention, fullgraph=True)
    assert relative_error(compiled(*inputs, **options), ba_attention(*inputs, **options).double()) < 5e-3
