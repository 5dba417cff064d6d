"""Space-filling token orders of a (frames, height, width) grid.

Every function returns `order`, an int64 CPU tensor of shape `(L,)` with `L = frames * height * width`: `order[i]` is
the raster index of the i-th token, so that `tokens[order]` is the reordered sequence. Any positive grid works; a grid
that is no power of two is cut out of the smallest cube that is, and its points are ranked by their key in that cube.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from diffsieve.errors import UserInputError

__all__ = ["frame_hilbert_order", "hilbert_order", "inverse_order", "morton_order", "raster_order"]

Grid = tuple[int, int, int]


def raster_order(grid_thw: Grid) -> torch.Tensor:
    """Return the identity order: width fastest, then height, then frames.

    Args:
        grid_thw: (frames, height, width), each at least 1.

    Returns:
        int64 tensor `(L,)`.

    Raises:
        UserInputError: `grid_thw` is not three positive integers.
    """
    frames, height, width = check_grid(grid_thw)
    return torch.arange(frames * height * width, device="cpu")


def hilbert_order(grid_thw: Grid) -> torch.Tensor:
    """Return the order of a 3-D Hilbert curve through the grid.

    Args:
        grid_thw: (frames, height, width), each at least 1.

    Returns:
        int64 tensor `(L,)`.

    Raises:
        UserInputError: `grid_thw` is not three positive integers.
    """
    return _hilbert_order(check_grid(grid_thw)).clone()


def frame_hilbert_order(grid_thw: Grid) -> torch.Tensor:
    """Return the order that keeps frames in sequence and walks each frame along one 2-D Hilbert curve.

    Args:
        grid_thw: (frames, height, width), each at least 1.

    Returns:
        int64 tensor `(L,)`.

    Raises:
        UserInputError: `grid_thw` is not three positive integers.
    """
    return _frame_hilbert_order(check_grid(grid_thw)).clone()


def morton_order(grid_thw: Grid) -> torch.Tensor:
    """Return the Z-order (bit interleaving) of the grid.

    Args:
        grid_thw: (frames, height, width), each at least 1.

    Returns:
        int64 tensor `(L,)`.

    Raises:
        UserInputError: `grid_thw` is not three positive integers.
    """
    return _morton_order(check_grid(grid_thw)).clone()


def inverse_order(order: torch.Tensor) -> torch.Tensor:
    """Invert permutations along the last dimension: `inverse[order[i]] = i`.

    Args:
        order: int64 tensor `(..., L)`, each row a permutation of 0..L-1.

    Returns:
        int64 tensor `(..., L)` on the same device.
    """
    positions = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, positions)


def check_grid(grid_thw: Grid) -> Grid:
    """Return `grid_thw` as a tuple, or raise a `UserInputError` where it is not three positive integers."""
    sizes = tuple(grid_thw) if isinstance(grid_thw, Sequence) else ()
    if len(sizes) != 3 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise UserInputError(f"grid_thw must be three positive integers (frames, height, width), got {grid_thw!r}")
    return sizes


@lru_cache(maxsize=16)
def _hilbert_order(grid_thw: Grid) -> torch.Tensor:
    return torch.argsort(_hilbert_key(_coordinates(grid_thw), _bits(grid_thw)))


@lru_cache(maxsize=16)
def _frame_hilbert_order(grid_thw: Grid) -> torch.Tensor:
    frames, height, width = grid_thw
    plane = torch.argsort(_hilbert_key(_coordinates((1, height, width))[1:], _bits((1, height, width))))
    first_of_frame = torch.arange(frames, device="cpu")[:, None] * (height * width)
    return (first_of_frame + plane).flatten()


@lru_cache(maxsize=16)
def _morton_order(grid_thw: Grid) -> torch.Tensor:
    return torch.argsort(_interleave(_coordinates(grid_thw), _bits(grid_thw)))


def _bits(grid_thw: Grid) -> int:
    """Bits per axis of the enclosing cube, ceil(log2(largest size)) but at least 1."""
    return max(1, (max(grid_thw) - 1).bit_length())


def _coordinates(grid_thw: Grid) -> list[torch.Tensor]:
    """Per axis, the coordinate of every token in raster order, (L,) each."""
    axes = [torch.arange(size, device="cpu") for size in grid_thw]
    return [axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")]


def _interleave(coordinates: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Pack the bits of the coordinates from the highest down, first axis first."""
    key = torch.zeros_like(coordinates[0])
    for bit in reversed(range(bits)):
        for axis in coordinates:
            key = (key << 1) | ((axis >> bit) & 1)
    return key


def _hilbert_key(coordinates: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Position of each point along the Hilbert curve of the enclosing cube.

    The transform between axes and the curve's transposed index is Skilling's (AIP Conf. Proc. 707, 381, 2004): any
    number of dimensions, a loop over bits and axes only.
    """
    axes = [axis.clone() for axis in coordinates]
    for bit in reversed(range(1, bits)):
        low = (1 << bit) - 1
        for i in range(len(axes)):
            reflect = (axes[i] >> bit) & 1 == 1
            swap = torch.where(reflect, 0, (axes[0] ^ axes[i]) & low)
            axes[i] = axes[i] ^ swap
            axes[0] = torch.where(reflect, axes[0] ^ low, axes[0] ^ swap)
    for i in range(1, len(axes)):
        axes[i] = axes[i] ^ axes[i - 1]
    flip = torch.zeros_like(axes[0])
    for bit in reversed(range(1, bits)):
        flip = torch.where((axes[-1] >> bit) & 1 == 1, flip ^ ((1 << bit) - 1), flip)
    return _interleave([axis ^ flip for axis in axes], bits)
