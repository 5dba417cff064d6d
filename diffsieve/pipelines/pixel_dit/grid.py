"""The pixel grid as a token sequence: its order, and the rotation angles of its positions."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ...errors import UserInputError
from ...kernels.orders import frame_hilbert_order, inverse_order, morton_order

TOKEN_ORDERS = ("hilbert", "morton", "raster")


class GridTables(NamedTuple):
    """What a model needs to know about a picture size.

    Attributes:
        order: (L,) int64, raster index of each token; None for raster order.
        inverse: (L,) int64, its inverse; None for raster order.
        cos: (1, L, 1, D / 2) float32, of the rotation angles, in token order.
        sin: the same.
    """

    order: torch.Tensor | None
    inverse: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor


def token_order(height: int, width: int, name: str) -> torch.Tensor | None:
    """Raster index of each token (L,) int64 for a picture of `height` x `width` pixels; None for raster order.

    Raises:
        UserInputError: no such order.
    """
    if name not in TOKEN_ORDERS:
        raise UserInputError(f"token_order must be one of {', '.join(TOKEN_ORDERS)}, got {name!r}")
    if name == "raster":
        return None
    # of one frame: along the 2-D Hilbert curve
    return (frame_hilbert_order if name == "hilbert" else morton_order)((1, height, width))


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # tables made inside inference mode could not be used in training later
@torch.no_grad()
def grid_tables(
    height: int, width: int, order: str, head_dim: int, theta: float, extent: int | None, device: torch.device
) -> GridTables:
    """Order and rotation angles of a picture size; kept for the 16 latest sizes.

    Positions are axial: the first half of the channels turns with the row, the second with the column.

    Args:
        height: pixels.
        width: pixels.
        order: one of `TOKEN_ORDERS`.
        head_dim: D, a multiple of 4.
        theta: base of the frequencies.
        extent: length that the longer side stands for, whatever its pixels; None counts pixels.
        device: of the tables.
    """
    positions = [torch.arange(size, dtype=torch.float64) for size in (height, width)]
    if extent is not None:
        # Pixels as areas: their centres stay where they are when the picture gets finer.
        scale = extent / max(height, width)
        positions = [(position + 0.5) * scale - 0.5 for position in positions]
    quarter = head_dim // 4
    frequencies = theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = (torch.outer(position, frequencies) for position in positions)
    angles = torch.cat([rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)], dim=-1).flatten(
        0, 1
    )  # [L, D / 2]
    tokens = token_order(height, width, order)
    inverse = None
    if tokens is not None:
        angles, inverse = angles[tokens], inverse_order(tokens).to(device)
        tokens = tokens.to(device)
    angles = angles[None, :, None]
    return GridTables(tokens, inverse, angles.cos().float().to(device), angles.sin().float().to(device))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs of neighbouring channels of (B, L, H, D) by the angles of (1, L, 1, D / 2), in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if x.is_cpu and not torch.compiler.is_compiling():  # as below up to rounding, in one pass instead of seven
        turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    even, odd = pairs.unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)
