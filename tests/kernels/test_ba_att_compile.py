"""BA-Att inside torch.compile: one graph, also when the table of orders changes."""

import re
from functools import partial

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import ba_attention, calibrate_budgets, calibrate_orders, choose_orders

GRID = (5, 9, 10)


@pytest.fixture
def qkv(generator):
    torch._dynamo.reset()
    yield tuple(torch.randn(1, 450, 4, 16, generator=generator).transpose(1, 2) for _ in range(3))
    torch._dynamo.reset()


def compile_counted(function, backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def call(query, key, value, orders, **options):
    return ba_attention(
        query, key, value, grid_thw=GRID, orders=orders, density=0.5, block_size=32, return_info=True, **options
    )


def test_other_tables_run_the_same_graph(qkv):
    compiled, counter = compile_counted(call, "aot_eager")
    for table in ([0, 1, 2, 3], [4, 4, 3, 0], [0, 0, 0, 0]):
        out, info = compiled(*qkv, torch.tensor(table))
        expected, eager = call(*qkv, torch.tensor(table))
        assert torch.equal(out, expected)
        assert torch.equal(info.block_index, eager.block_index)
        assert info.kept_token_pairs == eager.kept_token_pairs
        assert info.backend == eager.backend
    assert counter.frame_count == 1


@pytest.mark.parametrize("compensate", ["none", "centroid"])
def test_other_budgets_run_the_same_graph(compensate, qkv):
    def with_budgets(query, key, value, budgets):
        return call(query, key, value, "hilbert", compensate=compensate, budgets=budgets)

    compiled, counter = compile_counted(with_budgets, "aot_eager")
    for numbers in ([1, 15, 7, 3], [8, 2, 2, 1], [5, 5, 5, 5]):
        out, info = compiled(*qkv, torch.tensor(numbers))
        expected, eager = with_budgets(*qkv, torch.tensor(numbers))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        count = [set(rows.flatten().tolist()) for rows in info.block_count.unbind(1)]
        assert count == [{number} for number in numbers]
        assert info.kept_token_pairs == eager.kept_token_pairs
    assert counter.frame_count == 1
    with pytest.raises(UserInputError, match=r"budgets must hold whole numbers in \[1, 15\], got 16"):
        compiled(*qkv, torch.tensor([1, 2, 3, 16]))


@pytest.mark.parametrize(
    "options",
    [
        {"orders": "raster"},
        {"orders": "hilbert_window"},
        {"orders": (0, 1, 2, 4)},
        {"orders": "norm_sort", "score": "halfk"},
        {"orders": "raster", "top_p": 0.8, "compensate": "centroid"},
        {"orders": "hilbert", "text_suffix": 50, "grid": (5, 8, 10)},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_options_compile_without_a_break(options, qkv):
    options = dict(options)
    grid = options.pop("grid", GRID)

    def function(query, key, value):
        return ba_attention(query, key, value, grid_thw=grid, density=0.5, block_size=32, **options)

    compiled, counter = compile_counted(function, "eager")
    assert torch.equal(compiled(*qkv), function(*qkv))
    assert counter.frame_count == 1


WRONG = [
    ({"density": 1.5}, "density must be in (0, 1], got 1.5"),
    ({"density": "0.5"}, "density must be a number, got "),
    ({"beta": float("nan")}, "beta must be finite, got nan"),
    ({"scale": 0.0}, "scale must be finite and above 0, or None, got 0.0"),
    ({"block_size": 0}, "block_size must be a whole number in [1, 65536], got 0"),
    ({"text_prefix": 450}, "text_prefix + text_suffix must be below the number of tokens (450), got 450 + 0"),
    ({"compensate": "mean"}, "compensate must be "),
    ({"backend": "cuda"}, "backend must be one of "),
]
WRONG_CALL = [
    ({"min_density": 0.7}, "min_density must be in [0, density=0.5], got 0.7"),
    ({"grid_thw": (5, 9, 9)}, "grid_thw must have as many points as query has tokens (450), got (5, 9, 9) with 405"),
    ({"window": 33}, "window must be a positive multiple of block_size (32), got 33"),
    ({"orders": "spiral"}, "orders must be one of "),
    ({"orders": torch.tensor([0, 1])}, "orders must be an integer tensor of shape (4,)"),
    ({"budgets": torch.tensor([1, 2])}, "budgets must be int64 or int32 of shape (4,) on the CPU"),
]
WRONG_CALIBRATION = [
    ({"probe_blocks": 0}, "probe_blocks must be at least 1, a whole number, or None, got 0"),
    ({"dense": torch.ones(1, 4, 449, 16)}, "dense must have the shape of query, (1, 4, 450, 16)"),
    ({"dense": "all"}, "dense must be a tensor or None, got str"),
]


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        *((ba_attention, *wrong) for wrong in WRONG + WRONG_CALL),
        *((calibrate_orders, *wrong) for wrong in WRONG + WRONG_CALIBRATION),
        *((partial(calibrate_budgets, orders="hilbert"), *wrong) for wrong in WRONG + WRONG_CALIBRATION),
    ],
)
def test_compiled_code_refuses_wrong_arguments(function, changes, message, qkv):
    options = {"grid_thw": GRID, "density": 0.5, "block_size": 32, **changes}
    if function is ba_attention:
        options = {"orders": "hilbert_window", **options}
    with pytest.raises(Exception, match="raised exception UserInputError") as raised:
        torch.compile(partial(function, **options), fullgraph=True, backend="eager")(*qkv)
    assert message in str(raised.value).replace("\\", "")


@pytest.mark.parametrize("function", [ba_attention, calibrate_orders])
def test_compiled_code_refuses_tensors_that_do_not_fit(function, qkv):
    query, key, value = qkv
    call = partial(function, grid_thw=GRID, density=0.5, block_size=32)
    call = partial(call, orders="raster") if function is ba_attention else call
    for tensors, message in (
        ((query, key[:, :, 1:], value[:, :, 1:]), "key must have shape (1, a divisor of 4, 450, 16)"),
        ((query, key, value.half()), "value must be torch.float32 on cpu like query, got torch.float16 on cpu"),
        ((query.int(), key, value), "query must be floating point, got torch.int32"),
        (
            [x.to(torch.float8_e4m3fn) for x in qkv],
            "query must be floating point of 16 bits or more, got torch.float8_e4m3fn",
        ),
    ):
        torch._dynamo.reset()
        with pytest.raises(UserInputError, match=re.escape(message)):
            call(*tensors)
        with pytest.raises(Exception, match="raised exception UserInputError") as raised:
            torch.compile(call, fullgraph=True, backend="eager")(*tensors)
        assert message in str(raised.value)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_compiled_code_refuses_ids_of_no_order_when_it_runs(wrong, qkv):
    compiled, _ = compile_counted(call, "eager")
    compiled(*qkv, torch.tensor([0, 1, 2, 3]))
    with pytest.raises(UserInputError, match=rf"orders must hold ids of \[0, 1, 2, 3, 4\] .* got {wrong}"):
        compiled(*qkv, torch.tensor([0, 1, 2, wrong]))


def test_numbers_that_change_are_checked_without_a_break(qkv):
    def function(query, key, value, density, beta, scale):
        return ba_attention(
            query, key, value, orders="raster", density=density, beta=beta, scale=scale, block_size=32, min_density=0.1
        )

    for options in ({}, {"dynamic": True}):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager", **options)
        for numbers in ((0.5, 0.5, 0.1), (0.4, 0.6, 0.2), (0.3, 0.7, 0.3)):
            assert torch.equal(compiled(*qkv, *numbers), function(*qkv, *numbers))


def test_calibration_compiles_without_a_break(qkv):
    def function(query, key, value):
        how = {"grid_thw": GRID, "density": 0.5, "block_size": 32, "compensate": "centroid"}
        errors = calibrate_orders(query, key, value, **how)
        orders = choose_orders(errors)
        return errors, orders, calibrate_budgets(query, key, value, orders=orders, **how)

    compiled, counter = compile_counted(function, "aot_eager")
    for got, expected in zip(compiled(*qkv), function(*qkv), strict=True):
        assert torch.equal(got, expected)
    assert counter.frame_count == 1


def test_custom_ops(qkv):
    from diffsieve.kernels.ba_att.budget_calibration import _calibrate_budgets_op
    from diffsieve.kernels.ba_att.calibration import _calibrate_op
    from diffsieve.kernels.ba_att.fused_selection import _list_blocks_by_head_op
    from diffsieve.kernels.ba_att.ordering import _head_orders_op, _order_table_op

    cpu = torch.device("cpu")
    for check in ("test_schema", "test_faketensor"):
        torch.library.opcheck(_order_table_op, (5, 9, 10, cpu), test_utils=check)
        torch.library.opcheck(_order_table_op, (0, 0, 450, cpu), test_utils=check)
        table = torch.tensor([4, 3, 2, 0])
        torch.library.opcheck(_head_orders_op, (*qkv[:2], table, 5, 9, 10, 64, True, False), test_utils=check)
        dense = torch.nn.functional.scaled_dot_product_attention(*qkv)
        for compensate, given in (("none", None), ("centroid", dense)):
            options = (GRID, 0.5, 32, 0.5, True, True, True, None, True, compensate, "moments", 0, 0, 0.25, 4, "auto")
            torch.library.opcheck(_calibrate_op, (*qkv, given, *options), test_utils=check)
            for orders in ((table, ""), (None, "hilbert")):
                torch.library.opcheck(_calibrate_budgets_op, (*qkv, given, *orders, *options), test_utils=check)
        for return_skipped in (True, False):
            lists = torch.randn(2, 3, 5, 7), torch.tensor([1, 7, 4]), return_skipped, False
            torch.library.opcheck(_list_blocks_by_head_op, lists, test_utils=check)


@pytest.mark.slow
@pytest.mark.compiler
def test_inductor_selects_the_same_blocks(qkv):
    compiled, counter = compile_counted(call, "inductor")
    for table in ([0, 1, 2, 3], [4, 3, 3, 0]):
        out, info = compiled(*qkv, torch.tensor(table))
        expected, eager = call(*qkv, torch.tensor(table))
        # Other rounding may swap two blocks of nearly equal score, but no more.
        assert (info.block_index != eager.block_index).float().mean() < 0.02
        same = (info.block_index == eager.block_index).all(dim=-1).repeat_interleave(32, dim=2)[:, :, :450]
        unmoved = torch.isclose(out, expected, rtol=0, atol=1e-5).all(dim=-1)
        assert unmoved.float().mean() > 0.95
        assert same.float().mean() > 0.9
    assert counter.frame_count == 1


def test_dynamic_shapes(generator):
    torch._dynamo.reset()

    def function(query, key, value, orders, grid):
        return ba_attention(query, key, value, grid_thw=grid, orders=orders, density=0.5, block_size=32)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for grid in ((5, 9, 10), (5, 8, 10), (6, 8, 8)):
        inputs = torch.randn(3, 1, grid[0] * grid[1] * grid[2], 4, 16, generator=generator).transpose(2, 3).unbind(0)
        arguments = (*inputs, torch.tensor([0, 1, 3, 4]), grid)
        assert torch.equal(compiled(*arguments), function(*arguments))
    torch._dynamo.reset()
