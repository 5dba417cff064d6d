"""BA-Att inside torch.compile: one graph, also when the table of orders changes."""

import pytest
import torch

from diffsieve.kernels.ba_att import ba_attention, calibrate_orders, choose_orders

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


def test_calibration_compiles_without_a_break(qkv):
    def function(query, key, value):
        errors = calibrate_orders(query, key, value, grid_thw=GRID, density=0.5, block_size=32, compensate="centroid")
        return errors, choose_orders(errors)

    compiled, counter = compile_counted(function, "aot_eager")
    for got, expected in zip(compiled(*qkv), function(*qkv), strict=True):
        assert torch.equal(got, expected)
    assert counter.frame_count == 1


def test_custom_ops(qkv):
    from diffsieve.kernels.ba_att.calibration import _calibrate_op
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
