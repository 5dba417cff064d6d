"""Which tokens a query attends to, and how coarsely, as an array to plot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UserInputError, refuse
from ..orders import inverse_order
from .checks import check_block_size, check_indices_of, check_lists


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
        UserInputError: a position is out of range, the indices are not those of this length and block size, or the
            order is no permutation of it.
    """
    check_lists(indices)
    check_block_size(block_size)
    if not (type(length) is int and length >= 1):
        refuse("length", "an int >= 1", repr(length))
    first = indices[0]
    if not (isinstance(first, Tensor) and first.ndim == 4):
        refuse("indices[0]", "a tensor (B, H, n_1, K)", tuple(getattr(first, "shape", ())) or type(first).__name__)
    device, (batch, heads) = first.device, first.shape[:2]
    check_indices_of((batch, heads, length), list(indices), block_size, len(indices), device, values=True)
    place = torch.as_tensor(positions, device=device)
    if place.ndim != 1 or (place.numel() and (place.is_floating_point() or place.dtype == torch.bool)):
        raise UserInputError(f"positions must be integers in a list, got {place.tolist()}")
    place = place.long()
    if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < length:
        raise UserInputError(f"positions must be in [0, {length - 1}], got {place.tolist()}")
    if order is not None:
        if not isinstance(order, Tensor) or order.dtype != torch.int64:
            refuse("order", "an int64 tensor", getattr(order, "dtype", type(order).__name__))
        if order.shape != (length,):
            raise UserInputError(f"order must be of shape ({length},), got {tuple(order.shape)}")
        if not torch.equal(order.sort()[0], torch.arange(length, device=order.device)):
            raise UserInputError(f"order must hold each of 0 to {length - 1} once")
        place = inverse_order(order.to(device))[place]
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
