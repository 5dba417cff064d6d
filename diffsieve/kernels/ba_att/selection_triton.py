"""Block scores and the choice of blocks in Triton: the scores are written and read once, nothing is sorted.

Legend: BM query blocks and BN key blocks per program of the scores, BD channels per step; COLUMNS is the number of key
blocks, padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _load_moments(moments, o_n, o_d, number, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `o_n` of one head's moments (number, D), zero where there are none: [len(o_n), BD] fp32."""
    mask = (o_n < number)[:, None] & (o_d < HEAD_DIM)[None, :]
    return tl.load(moments + o_n[:, None] * HEAD_DIM + o_d[None, :], mask=mask, other=0.0)


# Numbers of blocks must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["heads_per_kv", "num_query", "num_key"])
def block_scores_kernel(  # type: ignore[no-untyped-def]
    query_mean, query_variance, key_mean, key_variance, centre, log_size, scores,
    scale, weight, heads_per_kv, num_query, num_key,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SECOND_ORDER: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(2).to(tl.int64)
    batch_kv = batch_head // heads_per_kv
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    query_at, key_at = batch_head * num_query * HEAD_DIM, batch_kv * num_key * HEAD_DIM
    b_scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)  # scale * Qm·Km + weight * Vq·Km²
    b_spread = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)  # (Qm² + Vq)·Vk
    for start in tl.range(0, PADDED_DIM, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)
        b_qm = _load_moments(query_mean + query_at, o_m, o_d, num_query, HEAD_DIM)
        b_km = _load_moments(key_mean + key_at, o_n, o_d, num_key, HEAD_DIM)
        b_centre = tl.load(centre + batch_kv * HEAD_DIM + o_d, mask=o_d < HEAD_DIM, other=0.0)
        b_km = b_km - b_centre[None, :]
        b_scores = tl.dot(b_qm * scale, tl.trans(b_km), b_scores, input_precision="tf32x3")
        if SECOND_ORDER or RESIDUAL:
            b_qv = _load_moments(query_variance + query_at, o_m, o_d, num_query, HEAD_DIM)
            b_kv = _load_moments(key_variance + key_at, o_n, o_d, num_key, HEAD_DIM)
            b_spread = tl.dot(b_qm * b_qm + b_qv, tl.trans(b_kv), b_spread, input_precision="tf32x3")
            if SECOND_ORDER:
                b_scores = tl.dot(b_qv * weight, tl.trans(b_km * b_km), b_scores, input_precision="tf32x3")
    b_scores += tl.load(log_size + o_n, mask=o_n < num_key, other=0.0)[None, :]
    if SECOND_ORDER:
        b_scores += b_spread * weight
    if RESIDUAL:
        # log(e^x - 1) / 2; e^x - 1 by its series where the difference would lose digits.
        b_x = tl.maximum(b_spread * (scale * scale), 0.0)
        b_less = tl.where(
            b_x < 0.03125, b_x * (1.0 - b_x * (0.5 - b_x * (0.16666667 - b_x * 0.041666667))), 1.0 - tl.exp(-b_x)
        )
        b_scores += (b_x + tl.log(b_less)) * 0.5
    target = scores + (batch_head * num_query + o_m[:, None]) * num_key + o_n[None, :]
    tl.store(target, b_scores, mask=(o_m < num_query)[:, None] & (o_n < num_key)[None, :])


def block_scores_triton(
    query_mean: torch.Tensor,
    query_variance: torch.Tensor,
    key_mean: torch.Tensor,
    key_variance: torch.Tensor,
    key_size: torch.Tensor,
    centre: torch.Tensor,
    *,
    beta: float,
    log_count: bool,
    second_order: bool,
    residual: bool,
    scale: float,
) -> torch.Tensor:
    """Same meaning as `scores.block_scores`, or `residual_scores`, of fp32 moments.

    Args:
        centre: (B, Hkv, 1, D), what to subtract from the key means.
    """
    batch, heads, num_query, dim = query_mean.shape
    kv_heads, num_key = key_mean.shape[1:3]
    scores = query_mean.new_empty((batch, heads, num_query, num_key))
    log_size = key_size.log() if log_count else torch.zeros_like(key_size)
    moments = [x.contiguous() for x in (query_mean, query_variance, key_mean, key_variance, centre)]
    block_d = 16
    with torch.cuda.device_of(scores):
        block_scores_kernel[triton.cdiv(num_key, 64), triton.cdiv(num_query, 64), batch * heads](
            *moments, log_size, scores, scale, beta * scale**2, heads // kv_heads, num_query, num_key,
            HEAD_DIM=dim, PADDED_DIM=triton.cdiv(dim, block_d) * block_d, BLOCK_D=block_d, BLOCK_M=64, BLOCK_N=64,
            SECOND_ORDER=second_order, RESIDUAL=residual, num_warps=8, num_stages=2,
        )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["num_key", "kept"])
def select_blocks_kernel(  # type: ignore[no-untyped-def]
    scores, block_index, mask, num_key, kept, COLUMNS: tl.constexpr, STORE_MASK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, COLUMNS)
    column = o_n < num_key
    b_s = tl.load(scores + row * num_key + o_n, mask=column, other=float("-inf"))
    # Integers that ascend with the scores. -0 becomes 0, which it equals; NaN becomes the largest.
    b_s = tl.where(b_s == 0.0, 0.0, b_s)
    bits = b_s.to(tl.int32, bitcast=True)
    keys = tl.where(b_s != b_s, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    keys = tl.where(column, keys, -(1 << 32))
    # The largest threshold that `kept` keys reach is the smallest key kept; bit by bit, from the sign down.
    threshold = tl.full([], -(1 << 31), tl.int64)
    for bit in tl.range(0, 32):
        higher = threshold + (tl.full([], 1 << 31, tl.int64) >> bit)
        threshold = tl.where(tl.sum((keys >= higher).to(tl.int32), 0) >= kept, higher, threshold)
    above, equal = keys > threshold, keys == threshold
    # What equals the threshold fills the list from the lowest index up.
    left = kept - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(block_index + row * kept + place, o_n, mask=taken)
    if STORE_MASK:
        tl.store(mask + row * num_key + o_n, taken.to(tl.uint8), mask=column)


def select_blocks_triton(scores: torch.Tensor, kept: int, *, return_mask: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Same meaning as `selection.select_blocks` of fp32 scores (..., Nk).

    Returns:
        The lists, and as bool (..., Nk) which blocks they hold (empty unless asked for).
    """
    scores = scores.contiguous()
    num_key = scores.shape[-1]
    block_index = scores.new_empty((*scores.shape[:-1], kept), dtype=torch.int32)
    mask = scores.new_empty(scores.shape if return_mask else (0,), dtype=torch.bool)
    columns = triton.next_power_of_2(num_key)
    with torch.cuda.device_of(scores):
        select_blocks_kernel[scores.numel() // num_key,](
            scores, block_index, mask.view(torch.uint8), num_key, kept,
            COLUMNS=columns, STORE_MASK=return_mask, num_warps=min(16, max(1, columns // 512)),
        )  # fmt: skip
    return block_index, mask
