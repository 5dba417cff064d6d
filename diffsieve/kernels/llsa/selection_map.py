"""Which tokens a query attends to, and how coarsely, as an array to plot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UserInputError
from ..orders import inverse_order


def llsa_selection_map(
    indices: Sequence[Tensor],
    positions: Sequence[int] | Tensor,
    *,
    length: int,
    block_size: int = 16,
    order: Tensor | None = None,
) -> Tensor:
    """Return, for chosen queries, the finest level at which each token is attended.

    The sets of the levels are nested, so the finest level tells all of them: a token of value l is attended as part of
    its pooled tokens of levels l, l + 1, .., M (with `disjoint`, of level l alone). M is the whole picture: every query
    sees the coarsest level.

    Args:
        indices: what `hierarchical_topk` returned: I_1 .. I_M, `(B, H, n_l, K_l)`.
        positions: P positions of queries in [0, L).
        length: L.
        block_size: the one the indices were chosen with.
        order: `(L,)` int64 token order of `diffsieve.kernels.orders`, if the sequence was reordered by it: positions
            and the last dimension of the result then count in raster order, ready to be reshaped to the grid.

    Returns:
        `(B, H, P, L)` int8 in 0..M.

    Raises:
        UserInputError: a position is out of range, or the order has another length.
    """
    device = indices[0].device
    place = torch.as_tensor(positions, dtype=torch.int64, device=device)
    if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < length:
        raise UserInputError(f"positions must be in [0, {length - 1}], got {place.tolist()}")
    if order is not None:
        if order.shape != (length,):
            raise UserInputError(f"order must be of shape ({length},), got {tuple(order.shape)}")
        place = inverse_order(order.to(device))[place]
    batch, heads = indices[0].shape[:2]
    tokens = torch.arange(length, device=device)
    result = torch.full((batch, heads, place.numel(), length), len(indices), dtype=torch.int8, device=device)
    for level in range(len(indices) - 1, -1, -1):
        span = block_size ** (level + 1)
        kept = indices[level][:, :, place // span]  # [B, H, P, K]
        num_blocks = -(-length // span)
        blocks = torch.zeros(*kept.shape[:3], num_blocks + 1, dtype=torch.bool, device=device)
        blocks.scatter_(-1, torch.where(kept < 0, num_blocks, kept.long()), True)
        result[blocks[..., tokens // span]] = level
    return result if order is None else result[..., inverse_order(order.to(device))]
