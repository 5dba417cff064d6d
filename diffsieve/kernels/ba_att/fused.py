"""Put tokens into their order, take the moments of the blocks, and put them back: one pass over the data on GPUs.

Shapes: B batch, H query heads, Hkv key heads, L tokens, D channels, N blocks.
"""

import torch

from ..custom_ops import custom_op
from . import forms
from .ordering import gather_tokens, undo_order
from .statistics import BlockStatistics, block_means, block_sizes, block_statistics

__all__ = ["fuses", "gather_with_means", "gather_with_statistics", "scatter_tokens"]

# A block of tokens is held in registers.
_MAX_BLOCK, _MAX_DIM = 128, 128


def fuses(tokens: torch.Tensor, block_size: int) -> bool:
    """Whether the Triton kernels of BA-Att's own steps serve such tokens where that of the attention does.

    They have no gradient.

    Args:
        tokens: (B, H, L, D).
        block_size: tokens per block.
    """
    return tokens.dtype in (torch.bfloat16, torch.float16) and block_size <= _MAX_BLOCK and tokens.shape[3] <= _MAX_DIM


def gather_with_statistics(
    tokens: torch.Tensor, perm: torch.Tensor | None, block_size: int, *, fused: bool
) -> tuple[torch.Tensor, BlockStatistics]:
    """`gather_tokens` and the `block_statistics` of its result.

    Args:
        tokens: (B, Hkv, L, D), any strides.
        perm: `None`, (L,) or (B, H, L), as in `gather_tokens`.
        block_size: tokens per block.
        fused: one Triton kernel instead of PyTorch's; see `fuses`.

    Returns:
        (B, H, L, D), `tokens` itself when `perm` is `None`; `BlockStatistics` without gradient.
    """
    if not fused:
        ordered = gather_tokens(tokens, perm)
        return ordered, block_statistics(ordered.detach(), block_size)
    ordered, mean, variance = _gather_moments_op(tokens, perm, block_size, True)
    sizes = block_sizes(tokens.shape[2], block_size, mean)
    return (tokens if perm is None else ordered), BlockStatistics(mean, variance, sizes)


def gather_with_means(
    tokens: torch.Tensor, perm: torch.Tensor | None, block_size: int, *, fused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_tokens` and the `block_means` (B, H, N, D) of its result, both differentiable unless fused."""
    if not fused:
        ordered = gather_tokens(tokens, perm)
        return ordered, block_means(ordered, block_size)
    ordered, mean, _ = _gather_moments_op(tokens, perm, block_size, False)
    return (tokens if perm is None else ordered), mean


def scatter_tokens(tokens: torch.Tensor, perm: torch.Tensor | None, *, fused: bool) -> torch.Tensor:
    """`undo_order`; fused, it takes one pass, and the result (B, H, L, D) lies in memory as (B, L, H, D)."""
    if not fused or perm is None:
        return undo_order(tokens, perm)
    out: torch.Tensor = _scatter_tokens_op(tokens, perm)
    return out


@custom_op("diffsieve::scatter_tokens")
def _scatter_tokens_op(tokens: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    from .fused_triton import scatter_tokens_triton

    return scatter_tokens_triton(tokens, perm)


@torch.library.register_fake("diffsieve::scatter_tokens")
def _(tokens: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    batch, heads, length, dim = tokens.shape
    return tokens.new_empty((batch, length, heads, dim)).transpose(1, 2)


@custom_op("diffsieve::gather_moments")
def _gather_moments_op(
    tokens: torch.Tensor, perm: torch.Tensor | None, block_size: int, variance: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gathered tokens (empty without `perm`), means and variances (empty if not asked for)."""
    from .fused_triton import gather_moments_triton

    tile = forms.FORMS.gather if variance else forms.FORMS.gather_means
    return gather_moments_triton(tokens, perm, block_size=block_size, variance=variance, tile=tile)


@torch.library.register_fake("diffsieve::gather_moments")
def _(
    tokens: torch.Tensor, perm: torch.Tensor | None, block_size: int, variance: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, length, dim = tokens.shape
    if perm is not None and perm.dim() == 3:
        heads = perm.shape[1]
    mean = tokens.new_empty((batch, heads, -(-length // block_size), dim), dtype=torch.float32)
    ordered = tokens.new_empty(0 if perm is None else (batch, heads, length, dim))
    return ordered, mean, torch.empty_like(mean) if variance else mean.new_empty(0)
