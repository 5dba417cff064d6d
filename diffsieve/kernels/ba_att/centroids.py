"""Compensation of BA-Att: skipped blocks take part in the softmax as their mean key and mean value.

Shapes: B batch, H query heads, Hkv key heads, L queries, D channels, Nq and Nk blocks.
"""

import torch

from ..custom_ops import custom_op
from . import forms

__all__ = ["add_centroids", "add_skipped_fused"]

# Logits of (tokens x key blocks) held at a time (256 MiB in fp32).
_CHUNK = 1 << 26


def add_centroids(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key_mean: torch.Tensor,
    value_mean: torch.Tensor,
    size: torch.Tensor,
    kept: torch.Tensor,
    *,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add every skipped block of keys to finished attention, as n copies of its mean key and mean value.

    Differentiable. A slice of query blocks at a time.

    Args:
        out: (B, H, L, D), attention over the kept blocks.
        lse: (B, H, L), natural log-sum-exp of its logits, fp32 (fp64 for fp64).
        query: (B, H, L, D).
        key_mean: (B, Hkv, Nk, D), fp32 or fp64.
        value_mean: the same of the values.
        size: (Nk,), tokens of each block.
        kept: (B, H, Nq, Nk) bool; the other blocks are added.
        block_size: queries per row of `kept`.
        scale: factor of the logits.

    Returns:
        The output in the dtype of `out`, and the log-sum-exp over kept keys and centroids.
    """
    batch, heads, length, _ = query.shape
    num_query, num_key = kept.shape[2:]
    group = heads // value_mean.shape[1]
    key_mean, value_mean = (x.repeat_interleave(group, dim=1) for x in (key_mean, value_mean))
    blocks_at_once = max(1, _CHUNK // (batch * heads * block_size * num_key))
    outs, totals = [], []
    for first in range(0, num_query, blocks_at_once):
        rows = slice(first * block_size, min(length, (first + blocks_at_once) * block_size))
        tokens = query[:, :, rows].to(key_mean.dtype)
        logits = tokens @ key_mean.transpose(-1, -2) * scale + size.log()
        skip = kept[:, :, first : first + blocks_at_once].repeat_interleave(block_size, dim=2)
        logits = logits.masked_fill(skip[:, :, : logits.shape[2]], -torch.inf)
        total = torch.logaddexp(lse[:, :, rows], logits.logsumexp(dim=-1).to(lse.dtype))
        weights = (logits - total[..., None]).exp()
        mixed = out[:, :, rows] * (lse[:, :, rows] - total).exp()[..., None] + weights @ value_mean
        outs.append(mixed.to(out.dtype))
        totals.append(total)
    return torch.cat(outs, dim=2), torch.cat(totals, dim=2)


def add_skipped_fused(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key_mean: torch.Tensor,
    value_mean: torch.Tensor,
    skipped: torch.Tensor,
    skipped_count: torch.Tensor | None,
    perm: torch.Tensor | None,
    *,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_centroids` over lists of skipped blocks, as many keys as queries, the order undone: one Triton kernel.

    The means are rounded to the dtype of `query`. No gradient; see `fused.fuses`.

    Args:
        out: 0 where `lse` is -inf.
        skipped: int32 (B, H, Nq, S), the blocks to add, ascending.
        skipped_count: int32 (B, H, Nq), valid entries of `skipped`; `None` for all.
        perm: order of the queries, (L,) or (B, H, L), to be undone in the output; `None` for none.

    Returns:
        The output (B, H, L, D), in memory as (B, L, H, D) if an order is undone, and the log-sum-exp over kept keys and
        centroids, in the order of `query`.
    """
    inputs = out, lse, query, key_mean, value_mean, skipped, skipped_count, perm
    result: tuple[torch.Tensor, torch.Tensor] = _add_skipped_op(*inputs, block_size, float(scale))
    return result


@custom_op("diffsieve::add_skipped")
def _add_skipped_op(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key_mean: torch.Tensor,
    value_mean: torch.Tensor,
    skipped: torch.Tensor,
    skipped_count: torch.Tensor | None,
    perm: torch.Tensor | None,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from .skipped_triton import add_skipped_triton

    inputs = out, lse, query, key_mean, value_mean, skipped, skipped_count, perm
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device) == (9, 0)
    tile = forms.FORMS.centroids if hopper else forms.FORMS.centroids_elsewhere
    return add_skipped_triton(*inputs, block_size=block_size, scale=scale, tile=tile)


@torch.library.register_fake("diffsieve::add_skipped")
def _(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key_mean: torch.Tensor,
    value_mean: torch.Tensor,
    skipped: torch.Tensor,
    skipped_count: torch.Tensor | None,
    perm: torch.Tensor | None,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    if perm is None:
        return torch.empty_like(out), torch.empty_like(lse)
    batch, heads, length, dim = out.shape
    return out.new_empty((batch, length, heads, dim)).transpose(1, 2), torch.empty_like(lse)
