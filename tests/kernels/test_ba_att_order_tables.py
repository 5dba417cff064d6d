"""The tables of token orders: kept while something may read them."""

import math

import pytest
import torch

from diffsieve.kernels.ba_att import ordering, token_orders

GRID, LENGTH = (5, 9, 10), 450


def test_a_table_that_a_cuda_graph_was_captured_with_is_never_freed(monkeypatch):
    capturing = True
    monkeypatch.setattr(ordering, "_captured_tables", {})
    monkeypatch.setattr(ordering, "_is_capturing", lambda device: capturing)
    cpu = torch.device("cpu")
    table = ordering._table(*GRID, cpu)
    capturing = False
    for width in range(1, 20):
        ordering._table(1, 1, width, cpu)
    assert ordering._table(*GRID, cpu) is table
    assert len(ordering._captured_tables) == 1


@pytest.mark.gpu
def test_a_captured_graph_outlives_many_other_grids():
    ids = torch.tensor([1, 2, 0, 1])
    tokens = torch.randn(1, 4, LENGTH, 64, device="cuda")

    def orders(grid):
        some = tokens[:, :, : math.prod(grid)]
        return token_orders(some, some, grid_thw=grid, orders=ids, block_size=16).query

    expected = orders(GRID)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = orders(GRID)
    for width in range(200, 220):
        orders((1, 1, width))
    # Takes the memory of the table, had it been freed.
    fillers = [torch.full((5, LENGTH), -1, device="cuda") for _ in range(100)]
    graph.replay()
    assert torch.equal(found, expected)
    del fillers
