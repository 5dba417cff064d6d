"""Block scores in Triton as one product over factors that are split for TF32 beforehand.

Legend: BM query blocks and BN key blocks of a program, BD channels per step. A factor has three segments of D channels,
D padded to a multiple of BD; the products of the first two add up to scale * Qm·Km + weight * Vq·Km², that of the third
is (Qm² + Vq)·Vk. Each segment holds its values rounded to 11 significant bits, and then what is left of them: see
`scores.matmul_split`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .forms import ScoreTile


@triton.jit
def _store_split(factor, offsets, values, mask, PADDED_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    high = ((values.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    tl.store(factor + offsets, high, mask=mask)
    tl.store(factor + offsets + PADDED_DIM, values - high, mask=mask)


@triton.jit(do_not_specialize=["rows", "rows_per_head"])
def split_moments_kernel(  # type: ignore[no-untyped-def]
    mean, variance, centre, factor, scale, weight, rows, rows_per_head,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_r < rows)[:, None] & (o_d < HEAD_DIM)[None, :]
    o_r64 = o_r.to(tl.int64)[:, None]
    b_m = tl.load(mean + o_r64 * HEAD_DIM + o_d[None, :], mask=mask, other=0.0)
    b_v = tl.load(variance + o_r64 * HEAD_DIM + o_d[None, :], mask=mask, other=0.0)
    if OF_KEYS:
        head = (o_r // rows_per_head).to(tl.int64)[:, None]
        b_m -= tl.load(centre + head * HEAD_DIM + o_d[None, :], mask=mask, other=0.0)
        first, second, third = b_m, b_m * b_m, b_v
    else:
        first, second, third = b_m * scale, b_v * weight, b_m * b_m + b_v
    store = (o_r < rows)[:, None] & (o_d < PADDED_DIM)[None, :]
    offsets = o_r64 * (6 * PADDED_DIM) + o_d[None, :]
    _store_split(factor, offsets, first, store, PADDED_DIM)
    _store_split(factor, offsets + 2 * PADDED_DIM, second, store, PADDED_DIM)
    _store_split(factor, offsets + 4 * PADDED_DIM, third, store, PADDED_DIM)


@triton.jit
def _add_product(  # type: ignore[no-untyped-def]
    b_sum, left, right, column, PADDED_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add BD channels; the product of the two rests is dropped."""
    o_d = column + tl.arange(0, BLOCK_D)[None, :]
    b_lh, b_ll = tl.load(left + o_d), tl.load(left + o_d + PADDED_DIM)
    b_rh, b_rl = tl.load(right + o_d), tl.load(right + o_d + PADDED_DIM)
    b_sum = tl.dot(b_ll, tl.trans(b_rh), b_sum, input_precision="tf32")
    b_sum = tl.dot(b_lh, tl.trans(b_rl), b_sum, input_precision="tf32")
    return tl.dot(b_lh, tl.trans(b_rh), b_sum, input_precision="tf32")


# Numbers of blocks must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["heads_per_kv", "num_query", "num_key"])
def split_scores_kernel(  # type: ignore[no-untyped-def]
    query_factor, key_factor, log_size, scores, scale, beta, heads_per_kv, num_query, num_key,
    PADDED_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SECOND_ORDER: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(2).to(tl.int64)
    batch_kv = batch_head // heads_per_kv
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end repeat the last one and are not stored.
    left = query_factor + ((batch_head * num_query + tl.minimum(o_m, num_query - 1)) * (6 * PADDED_DIM))[:, None]
    right = key_factor + ((batch_kv * num_key + tl.minimum(o_n, num_key - 1)) * (6 * PADDED_DIM))[:, None]
    STEPS: tl.constexpr = PADDED_DIM // BLOCK_D
    b_scores = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in tl.range(0, STEPS * 2 if SECOND_ORDER else STEPS):
        column = (step // STEPS) * (2 * PADDED_DIM) + (step % STEPS) * BLOCK_D
        b_scores = _add_product(b_scores, left, right, column, PADDED_DIM, BLOCK_D)
    b_scores += tl.load(log_size + o_n, mask=o_n < num_key, other=0.0)[None, :]
    if SECOND_ORDER or RESIDUAL:
        b_spread = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for step in tl.range(0, STEPS):
            b_spread = _add_product(
                b_spread, left, right, 4 * PADDED_DIM + step * BLOCK_D, PADDED_DIM, BLOCK_D
            )  # fmt: skip
        b_spread = b_spread * (scale * scale)
        if SECOND_ORDER:
            b_scores += b_spread * beta
        if RESIDUAL:
            # log(e^x - 1) / 2; e^x - 1 by its series where the difference would lose digits.
            b_x = tl.maximum(b_spread, 0.0)
            b_less = tl.where(
                b_x < 0.03125, b_x * (1.0 - b_x * (0.5 - b_x * (0.16666667 - b_x * 0.041666667))), 1.0 - tl.exp(-b_x)
            )
            b_scores += (b_x + tl.log(b_less)) * 0.5
    target = scores + (batch_head * num_query + o_m[:, None]) * num_key + o_n[None, :]
    tl.store(target, b_scores, mask=(o_m < num_query)[:, None] & (o_n < num_key)[None, :])


def split_scores_triton(
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
    tile: ScoreTile,
) -> torch.Tensor:
    """Same meaning as `scores.block_scores`, or `residual_scores`, of fp32 moments.

    Args:
        centre: (B, Hkv, 1, D), what to subtract from the key means.
    """
    batch, heads, num_query, dim = query_mean.shape
    kv_heads, num_key = key_mean.shape[1:3]
    scores = query_mean.new_empty((batch, heads, num_query, num_key))
    log_size = key_size.log() if log_count else torch.zeros_like(key_size)
    padded_dim = triton.cdiv(dim, tile.block_d) * tile.block_d
    centre = centre.contiguous()
    factors = []
    with torch.cuda.device_of(scores):
        for mean, variance, of_keys in ((query_mean, query_variance, False), (key_mean, key_variance, True)):
            rows, count = mean.numel() // dim, 8
            factor = mean.new_empty((rows, 6 * padded_dim))
            split_moments_kernel[triton.cdiv(rows, count),](
                mean.contiguous(), variance.contiguous(), centre, factor, scale, beta * scale**2, rows, num_key,
                HEAD_DIM=dim, PADDED_DIM=padded_dim, BLOCK_D=triton.next_power_of_2(padded_dim), ROWS=count,
                OF_KEYS=of_keys, num_warps=4,
            )  # fmt: skip
            factors.append(factor)
        grid = (triton.cdiv(num_key, tile.block_n), triton.cdiv(num_query, tile.block_m), batch * heads)
        split_scores_kernel[grid](
            *factors, log_size, scores, scale, beta, heads // kv_heads, num_query, num_key,
            PADDED_DIM=padded_dim, BLOCK_D=tile.block_d, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            SECOND_ORDER=second_order, RESIDUAL=residual, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return scores
