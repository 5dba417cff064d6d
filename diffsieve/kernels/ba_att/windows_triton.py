"""The order `hilbert_window` in Triton: norms along the curve, then the rank of each token in its window by counting.

Legend: BM tokens of a program, BN tokens per step that they are compared with, D channels padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sizes import cdiv, next_power_of_2
from .forms import WindowTile


# Lengths must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["length"])
def curve_norms_kernel(  # type: ignore[no-untyped-def]
    key, centre, curve, norms, stride_b, stride_h, stride_l, stride_d, length,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DESCENDING: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    batch_head = batch * tl.num_programs(1) + head
    o_l = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    row_mask, channel = o_l < length, o_d < HEAD_DIM
    source = tl.load(curve + o_l, mask=row_mask, other=0).to(tl.int64)
    rows = key + batch * stride_b + head * stride_h + source[:, None] * stride_l
    mask = row_mask[:, None] & channel[None, :]
    b_k = tl.load(rows + (o_d.to(tl.int64) * stride_d)[None, :], mask=mask, other=0.0).to(tl.float32)
    b_k -= tl.load(centre + batch_head * HEAD_DIM + o_d, mask=channel, other=0.0)[None, :]
    # As in `norm_sort.sort_keys`.
    keys = tl.sqrt_rn(tl.sum(b_k * b_k, 1)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if DESCENDING:
        keys = 0x7FFFFFFF - keys
    tl.store(norms + batch_head * length + o_l, keys, mask=row_mask)


@triton.jit(do_not_specialize=["length", "window"])
def window_ranks_kernel(  # type: ignore[no-untyped-def]
    norms, curve, order, length, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0) * window
    last = tl.minimum(first + window, length)
    row = first + tl.program_id(1) * BLOCK_M
    norms += tl.program_id(2).to(tl.int64) * length
    order += tl.program_id(2).to(tl.int64) * length
    o_m = row + tl.arange(0, BLOCK_M)
    inside = o_m < last
    b_own = tl.load(norms + o_m, mask=inside, other=0)[:, None]
    b_count = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    # Equal keys keep their order: those before count, those after do not.
    for start in tl.range(first, tl.minimum(row, last), BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_n = tl.load(norms + o_n, mask=o_n < last, other=0x7FFFFFFF)[None, :]
        b_count += (b_n <= b_own).to(tl.int32)
    # What is past the window is the largest key there is, below no other.
    for start in tl.range(row, tl.minimum(row + BLOCK_M, last), BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_n = tl.load(norms + o_n, mask=o_n < last, other=0x7FFFFFFF)[None, :]
        b_count += ((b_n < b_own) | ((b_n == b_own) & (o_n[None, :] < o_m[:, None]))).to(tl.int32)
    for start in tl.range(row + BLOCK_M, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_n = tl.load(norms + o_n, mask=o_n < last, other=0x7FFFFFFF)[None, :]
        b_count += (b_n < b_own).to(tl.int32)
    b_rank = tl.sum(b_count, 1)
    tl.store(order + first + b_rank, tl.load(curve + o_m, mask=inside, other=0), mask=inside)


def window_orders_triton(
    key: torch.Tensor,
    centre: torch.Tensor,
    curve: torch.Tensor,
    window: int,
    *,
    descending: bool,
    tile: WindowTile,
) -> torch.Tensor:
    """Sort the keys by their distance from `centre` inside the windows of a curve; a stable sort.

    Args:
        key: (B, H, L, D).
        centre: (B, H, 1, D) fp32.
        curve: int64 (L,).
        window: tokens per window; each is compared with all others of its window.
        descending: largest distance first.

    Returns:
        int64 (B, H, L).
    """
    batch, heads, length, dim = key.shape
    norms = torch.empty((batch, heads, length), dtype=torch.int32, device=key.device)
    order = curve.new_empty((batch, heads, length))
    window = min(window, length)
    curve = curve.contiguous()
    with torch.cuda.device_of(key):
        curve_norms_kernel[cdiv(length, 32), heads, batch](
            key, centre.contiguous(), curve, norms, *key.stride(), length,
            ROWS=32, HEAD_DIM=dim, BLOCK_D=next_power_of_2(dim), DESCENDING=descending, num_warps=4,
        )  # fmt: skip
        window_ranks_kernel[cdiv(length, window), cdiv(window, tile.block_m), batch * heads](
            norms, curve, order, length, window,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
        )  # fmt: skip
    return order
