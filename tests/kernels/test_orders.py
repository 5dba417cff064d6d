"""Token orders: permutations of any grid, curves that are curves, and the inverse."""

import time

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.orders import frame_hilbert_order, hilbert_order, inverse_order, morton_order, raster_order

ORDERS = [raster_order, hilbert_order, frame_hilbert_order, morton_order]
GRIDS = [(1, 1, 1), (1, 1, 7), (5, 1, 1), (1, 9, 10), (2, 2, 2), (5, 9, 10), (3, 17, 4), (21, 45, 80), (21, 30, 52)]


def points(order: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    return torch.stack(torch.unravel_index(order, grid), dim=1)


def step_lengths(order: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    return points(order, grid).diff(dim=0).abs().sum(dim=1)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("make", ORDERS)
def test_is_permutation(make, grid):
    order = make(grid)
    length = grid[0] * grid[1] * grid[2]
    assert order.dtype is torch.int64
    assert torch.equal(order.sort().values, torch.arange(length))


@pytest.mark.parametrize("make", ORDERS)
def test_inverse(make, generator):
    order = make((5, 9, 10))
    tokens = torch.randn(450, 3, generator=generator)
    assert torch.equal(tokens[order][inverse_order(order)], tokens)
    stacked = torch.stack([order, order.flip(0)])
    assert torch.equal(stacked.gather(1, inverse_order(stacked)), torch.arange(450).expand(2, 450))


def test_raster_is_identity():
    assert torch.equal(raster_order((2, 3, 4)), torch.arange(24))


@pytest.mark.parametrize("size", [2, 4, 16])
def test_hilbert_walks_a_cube_in_unit_steps(size):
    assert (step_lengths(hilbert_order((size,) * 3), (size,) * 3) == 1).all()


def test_hilbert_known_start():
    # The first octant of the curve of a 2x2x2 cube is a Gray code.
    assert points(hilbert_order((2, 2, 2)), (2, 2, 2)).tolist()[:2] == [[0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("size", [2, 8, 32])
def test_frame_hilbert_stays_in_the_frame_and_walks_it_in_unit_steps(size):
    grid = (3, size, size)
    order = frame_hilbert_order(grid)
    frames = points(order, grid)[:, 0]
    assert torch.equal(frames, torch.arange(3).repeat_interleave(size * size))
    assert (step_lengths(order[: size * size], grid) == 1).all()


def test_morton_known_values():
    assert morton_order((2, 2, 2)).tolist() == list(range(8))
    # In one frame of 4x4 the four quadrants come one after another.
    assert morton_order((1, 4, 4)).tolist()[:8] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_hilbert_at_720p_is_compact_and_fast():
    from diffsieve.kernels import orders

    grid = (21, 45, 80)
    orders._hilbert_order.cache_clear()
    start = time.perf_counter()
    order = hilbert_order(grid)
    seconds = time.perf_counter() - start
    # 6 bits would make keys collide at 80 columns; a collision shows as long steps.
    assert (step_lengths(order, grid) != 1).float().mean() < 0.015
    blocks = points(order, grid)[: 590 * 128].view(590, 128, 3).float()
    assert blocks.var(dim=1, correction=0).sum(dim=1).mean() < 10
    assert seconds < 1


def test_result_may_be_changed():
    first = hilbert_order((2, 3, 4))
    first.zero_()
    assert torch.equal(hilbert_order((2, 3, 4)).sort().values, torch.arange(24))


def test_default_device_does_not_matter():
    with torch.device("meta"):
        order = hilbert_order((3, 5, 6))
    assert order.device.type == "cpu"


@pytest.mark.parametrize("grid", [(0, 4, 4), (4, 4), (4, 4, -1), (2.0, 4, 4), (True, 4, 4), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("make", ORDERS)
def test_bad_grid(make, grid):
    with pytest.raises(UserInputError, match="grid_thw must be three positive integers"):
        make(grid)
