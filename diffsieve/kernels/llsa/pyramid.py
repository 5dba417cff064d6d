"""The pyramid: every level holds means over raw tokens, with true counts where the last block is short."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import refuse
from ..checks import check_4d
from .checks import check_block_size
from .levels import MAX_LEVELS, level_lengths, token_counts


def pyramid(x: Tensor, *, block_size: int, levels: int) -> list[Tensor]:
    """Pool a sequence level by level; differentiable.

    Args:
        x: `(B, H, L, D)`, floating point.
        block_size: tokens under one token of the next level, >= 2.
        levels: M, in [1, 4].

    Returns:
        M + 1 tensors `(B, H, n_l, D)`: `x` itself, then the means of levels 1..M in fp32 (fp64 for fp64 input).

    Raises:
        UserInputError: an argument has a wrong type, shape, dtype or range.
    """
    check_4d(("x", x))
    if not x.dtype.is_floating_point:
        refuse("x", "floating point", x.dtype)
    check_block_size(block_size)
    if not (type(levels) is int and 1 <= levels <= MAX_LEVELS):
        refuse("levels", f"an int in [1, {MAX_LEVELS}]", repr(levels))
    length = x.shape[2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    result, total = [x], x.to(dtype)
    for level in range(1, levels + 1):
        short = -total.shape[2] % block_size
        padded = pad(total, (0, 0, 0, short)) if short else total  # by 0 it would copy
        total = padded.unflatten(2, (-1, block_size)).sum(3)
        counts = token_counts(length, block_size, level, x.device).to(dtype)
        result.append(total / counts[:, None])
    return result


def fold_pyramid(grads: Sequence[Tensor], *, length: int, block_size: int) -> Tensor:
    """Carry the gradients of all levels down to the raw tokens: dX_(l-1)[j] += c_(l-1)[j] / c_l[j // S] dX_l[j // S].

    Args:
        grads: gradients of levels 0..M `(B, H, n_l, D)`.
        length: L.
        block_size: S.

    Returns:
        `(B, H, L, D)` in fp32 (fp64 for fp64 gradients).
    """
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    lengths = level_lengths(length, block_size, len(grads) - 1)
    carried = grads[-1].to(dtype)
    for level in range(len(grads) - 1, 0, -1):
        device = carried.device
        below = token_counts(length, block_size, level - 1, device).to(dtype)
        share = carried / token_counts(length, block_size, level, device).to(dtype)[:, None]
        share = share.repeat_interleave(block_size, dim=2)[:, :, : lengths[level - 1]]
        carried = torch.addcmul(grads[level - 1].to(dtype), share, below[:, None])
    return carried
