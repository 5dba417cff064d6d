"""Gather with block moments, and its undoing, in Triton: every token is read once and written once.

One program takes the tokens of one block, or a part of their channels: [BLOCK_SIZE, BLOCK_D].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sizes import cdiv, next_power_of_2
from .forms import GatherTile


# Lengths must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["heads_per_kv", "length", "stride_perm"])
def gather_moments_kernel(  # type: ignore[no-untyped-def]
    tokens, perm, ordered, mean, variance,
    stride_b, stride_h, stride_l, stride_d, stride_perm,
    heads_per_kv, length,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_PERM: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    # The parts of the channels of a block run side by side.
    PARTS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    block, head, heads = tl.program_id(0) // PARTS, tl.program_id(1), tl.num_programs(1)
    batch = tl.program_id(2)
    batch_head = batch.to(tl.int64) * heads + head
    o_l = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    o_d = (tl.program_id(0) % PARTS) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_mask = o_l < length
    mask = row_mask[:, None] & (o_d < HEAD_DIM)[None, :]
    if HAS_PERM:
        # stride_perm: from one (batch item, head) to the next, 0 when all share one permutation.
        source = tl.load(perm + batch_head * stride_perm + o_l, mask=row_mask, other=0).to(tl.int64)
    else:
        source = o_l.to(tl.int64)
    base = tokens + batch.to(tl.int64) * stride_b + (head // heads_per_kv).to(tl.int64) * stride_h
    rows = tl.load(base + source[:, None] * stride_l + o_d.to(tl.int64)[None, :] * stride_d, mask=mask, other=0.0)
    if HAS_PERM:
        target = ordered + (batch_head * length + o_l)[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(target, rows, mask=mask)
    count = tl.minimum(length - block * BLOCK_SIZE, BLOCK_SIZE).to(tl.float32)
    values = rows.to(tl.float32)
    moments = (batch_head * tl.cdiv(length, BLOCK_SIZE) + block) * HEAD_DIM + o_d
    b_mean = tl.sum(values, 0) / count
    tl.store(mean + moments, b_mean, mask=o_d < HEAD_DIM)
    if VARIANCE:
        # From the mean: E[x²] - E[x]² cancels badly under a channel bias.
        centred = tl.where(mask, values - b_mean[None, :], 0.0)
        tl.store(variance + moments, tl.sum(centred * centred, 0) / count, mask=o_d < HEAD_DIM)


def gather_moments_triton(
    tokens: torch.Tensor,
    perm: torch.Tensor | None,
    *,
    block_size: int,
    variance: bool,
    tile: GatherTile,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same meaning as the op in `fused.py`; `block_size` a power of two in [16, 128]."""
    batch, kv_heads, length, dim = tokens.shape
    per_head = perm is not None and perm.dim() == 3
    heads = perm.shape[1] if per_head else kv_heads  # type: ignore[union-attr]
    perm = None if perm is None else perm.contiguous()
    ordered = tokens.new_empty(0 if perm is None else (batch, heads, length, dim))
    blocks = cdiv(length, block_size)
    mean = tokens.new_empty((batch, heads, blocks, dim), dtype=torch.float32)
    squares = torch.empty_like(mean) if variance else mean.new_empty(0)
    channels = min(tile.channels, max(16, next_power_of_2(dim)))
    # Warps of small blocks: as many values for each thread as in a block of 128 tokens.
    num_warps = max(1, tile.num_warps * block_size * channels // (128 * tile.channels))
    with torch.cuda.device_of(tokens):
        gather_moments_kernel[blocks * cdiv(dim, channels), heads, batch](
            tokens, perm, ordered, mean, squares, *tokens.stride(), length if per_head else 0,
            heads // kv_heads, length,
            BLOCK_SIZE=block_size, HEAD_DIM=dim, BLOCK_D=channels, HAS_PERM=perm is not None, VARIANCE=variance,
            num_warps=num_warps,
        )  # fmt: skip
    return ordered, mean, squares


@triton.jit(do_not_specialize=["length", "stride_perm"])
def scatter_tokens_kernel(  # type: ignore[no-untyped-def]
    tokens, perm, out,
    stride_b, stride_h, stride_l, stride_d, stride_ob, stride_oh, stride_ol, stride_od, stride_perm,
    length,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch = tl.program_id(2)
    batch_head = batch.to(tl.int64) * heads + head
    o_l = block * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    mask = (o_l < length)[:, None] & (o_d < HEAD_DIM)
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    rows = tokens + batch64 * stride_b + head64 * stride_h + o_l.to(tl.int64)[:, None] * stride_l + o_d * stride_d
    target = tl.load(perm + batch_head * stride_perm + o_l, mask=o_l < length, other=0).to(tl.int64)
    places = out + batch64 * stride_ob + head64 * stride_oh + target[:, None] * stride_ol + o_d * stride_od
    tl.store(places, tl.load(rows, mask=mask, other=0.0), mask=mask)


def scatter_tokens_triton(tokens: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Same meaning as `ordering.undo_order`; the result (B, H, L, D) lies in memory as (B, L, H, D)."""
    batch, heads, length, dim = tokens.shape
    out = tokens.new_empty((batch, length, heads, dim)).transpose(1, 2)
    perm = perm.contiguous()
    rows = 64
    with torch.cuda.device_of(tokens):
        scatter_tokens_kernel[cdiv(length, rows), heads, batch](
            tokens, perm, out, *tokens.stride(), *out.stride(), length if perm.dim() == 3 else 0, length,
            ROWS=rows, HEAD_DIM=dim, BLOCK_D=max(16, next_power_of_2(dim)), num_warps=4,
        )  # fmt: skip
    return out
