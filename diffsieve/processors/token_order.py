"""From the order in which a model hands its tokens to a layer to the one in which a method wants them."""

from collections.abc import Callable

import torch
from torch import nn

from ..kernels import orders
from .families import Family, Grid

_ORDERS: dict[str, Callable[[Grid], torch.Tensor]] = {
    "hilbert": orders.hilbert_order,
    "frame_hilbert": orders.frame_hilbert_order,
    "morton": orders.morton_order,
    "raster": orders.raster_order,
}


def reordering(family: Family, transformer: nn.Module, wanted: str, grid: Grid) -> torch.Tensor | None:
    """Return the tokens to take, by their place in the model's own order, to have them in the order `wanted`.

    Args:
        family: Of the transformer.
        transformer: Whose own order it is.
        wanted: "hilbert", "frame_hilbert", "morton" or "raster".
        grid: (frames, height, width) in tokens.

    Returns:
        (L,) int64 on the CPU, or None where the tokens are in that order already.
    """
    present = family.order(transformer) if family.order is not None else "raster"
    if wanted == present:
        return None
    order = token_order(wanted, grid)
    return order if present == "raster" else orders.inverse_order(token_order(present, grid))[order]


def token_order(name: str, grid: Grid) -> torch.Tensor:
    """Return the raster index of each token, (L,) int64 on the CPU, for an order by name."""
    # Through one frame, the curve of the plane: a slice of the one in space is no curve.
    return _ORDERS["frame_hilbert" if name == "hilbert" and grid[0] == 1 else name](grid)
