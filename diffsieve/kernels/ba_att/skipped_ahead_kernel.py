"""As `skipped_kernel`, but means are fetched two steps ahead, and what only the last step needs comes after the loop.

Legend: BM queries of a program (all of one query block), BN skipped blocks per step, D channels padded to a power of
two. Weights are taken relative to the log-sum-exp over the kept keys, as if this were the largest logit: nothing is
rescaled on the way. Where the skipped blocks outweigh the kept ones by so much that numbers get too large for that,
or a row has no kept key and its weights are too small, the tile says so, and a second launch does its work again with
the running maximum of an online softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_means(  # type: ignore[no-untyped-def]
    key_mean, value_mean, o_n, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    o_d = tl.arange(0, BLOCK_D)
    offsets = o_n[:, None] * HEAD_DIM + o_d[None, :]
    if HEAD_DIM == BLOCK_D:
        return tl.load(key_mean + offsets), tl.load(value_mean + offsets)
    mask = (o_d < HEAD_DIM)[None, :]
    return tl.load(key_mean + offsets, mask=mask, other=0.0), tl.load(value_mean + offsets, mask=mask, other=0.0)


@triton.jit
def _add_step(  # type: ignore[no-untyped-def]
    b_s, b_v, b_max, b_sum, b_acc, size_log2, PRECISION: tl.constexpr, ONLINE: tl.constexpr
):  # fmt: skip
    """Add one step's blocks of logits `b_s` (base 2, without their sizes) and mean values `b_v`."""
    if ONLINE:
        b_s += size_log2
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_alpha = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_alpha
        b_acc = b_acc * b_alpha[:, None]
        b_max = b_new
        b_p = tl.exp2(b_s - b_shift[:, None])
    else:
        b_p = tl.exp2(b_s - (b_max - size_log2)[:, None])
    b_sum += tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_max, b_sum, b_acc


@triton.jit
def _add_to_tile(  # type: ignore[no-untyped-def]
    tile, tiles, query, key_mean, value_mean, skipped, skipped_count, out, lse, perm, new_out, new_lse, too_large,
    scale_log2, size_log2, last_size_log2, largest_sum,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_ob, stride_oh, stride_ol, stride_od,
    stride_nb, stride_nh, stride_nl, stride_nd, stride_perm,
    heads_per_kv, length, num_query, num_key, width,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    HAS_COUNT: tl.constexpr, HAS_PERM: tl.constexpr, ONLINE: tl.constexpr,
):  # fmt: skip
    row = tile * BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    heads = tl.num_programs(1)
    batch_head = batch.to(tl.int64) * heads + head
    batch_kv = batch.to(tl.int64) * (heads // heads_per_kv) + head // heads_per_kv
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    o_r = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    row_mask = o_r < length - row
    mask = row_mask[:, None] & (o_d < HEAD_DIM)[None, :]
    list_row = batch_head * num_query + row // BLOCK_SIZE
    skipped += list_row * width
    key_mean += batch_kv * num_key * HEAD_DIM
    value_mean += batch_kv * num_key * HEAD_DIM
    if HAS_COUNT:
        count = tl.load(skipped_count + list_row)
    else:
        count = width
    # The last step alone may have too few blocks, or the short one.
    whole = (tl.maximum(count, 1) - 1) // BLOCK_N * BLOCK_N
    o_s = tl.arange(0, BLOCK_N)
    ends_short = tl.load(skipped + count - 1, mask=count > 0, other=0) == num_key - 1
    # Blocks of the next step: read a step ahead, so that their means can be fetched two steps ahead.
    o_n = tl.load(skipped + o_s, mask=o_s < count, other=0)
    # From the first row of the program on, 32 bits are enough and take half of the registers.
    query += batch64 * stride_qb + head64 * stride_qh + row.to(tl.int64) * stride_ql
    out += batch64 * stride_ob + head64 * stride_oh + row.to(tl.int64) * stride_ol
    lse += batch_head * length + row
    b_q = tl.load(query + (o_r[:, None] * stride_ql + o_d[None, :] * stride_qd), mask=mask, other=0.0)
    b_lse = tl.load(lse + o_r, mask=row_mask, other=0.0) / _LN_2

    # What is there already has weight 1; without a kept key it is 0, and logits are taken as they are.
    b_max = b_lse if ONLINE else tl.where(b_lse == float("-inf"), 0.0, b_lse)
    b_sum = tl.where(b_lse == float("-inf"), 0.0, 1.0)
    b_acc = tl.load(out + (o_r[:, None] * stride_ol + o_d[None, :] * stride_od), mask=mask, other=0.0).to(tl.float32)
    for start in tl.range(0, whole, BLOCK_N):
        b_k, b_v = _load_means(key_mean, value_mean, o_n, HEAD_DIM, BLOCK_D)
        o_n = tl.load(skipped + start + BLOCK_N + o_s, mask=o_s < count - start - BLOCK_N, other=0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        b_max, b_sum, b_acc = _add_step(b_s, b_v, b_max, b_sum, b_acc, size_log2, PRECISION, ONLINE)
    b_bias = tl.where(ends_short & (o_s == count - whole - 1), last_size_log2 - size_log2, 0.0)
    b_bias = tl.where(o_s < count - whole, b_bias, float("-inf"))
    b_k, b_v = _load_means(key_mean, value_mean, o_n, HEAD_DIM, BLOCK_D)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2 + b_bias[None, :]
    b_max, b_sum, b_acc = _add_step(b_s, b_v, b_max, b_sum, b_acc, size_log2, PRECISION, ONLINE)
    if not ONLINE:
        # Written so that NaN is too large. Less than 1 is a row without a kept key, whose weights may be too small.
        within = tl.sum(((b_sum >= 1.0) & (b_sum < largest_sum)).to(tl.int32), 0)
        tl.store(too_large + batch_head * tiles + tile, (within < BLOCK_M).to(tl.int32))

    b_acc = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    new_out += batch64 * stride_nb + head64 * stride_nh
    places = row + o_r
    if HAS_PERM:
        # stride_perm: from one (batch item, head) to the next, 0 when all share one permutation.
        places = tl.load(perm + batch_head * stride_perm + places, mask=row_mask, other=0)
    places = places.to(tl.int64)[:, None] * stride_nl
    tl.store(new_out + places + o_d[None, :] * stride_nd, b_acc.to(new_out.dtype.element_ty), mask=mask)
    b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_sum)) * _LN_2)
    tl.store(new_lse + batch_head * length + row + o_r, b_lse, mask=row_mask)


# Lengths must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["tiles", "heads_per_kv", "length", "num_query", "num_key", "width", "stride_perm"])
def add_skipped_ahead_kernel(  # type: ignore[no-untyped-def]
    tiles, query, key_mean, value_mean, skipped, skipped_count, out, lse, perm, new_out, new_lse, too_large,
    scale_log2, size_log2, last_size_log2, largest_sum,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_ob, stride_oh, stride_ol, stride_od,
    stride_nb, stride_nh, stride_nl, stride_nd, stride_perm,
    heads_per_kv, length, num_query, num_key, width,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    HAS_COUNT: tl.constexpr, HAS_PERM: tl.constexpr, ONLINE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """`TILES` tiles of a head by each program, one of each if not `ONLINE`, which does again those that say so."""
    if ONLINE:
        batch_head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        first = tl.program_id(0) * TILES
        o_t = first + tl.arange(0, TILES)
        flags = tl.load(too_large + batch_head * tiles + o_t, mask=o_t < tiles, other=0)
        if tl.max(flags, 0) == 0:
            return
        for tile in tl.range(first, tl.minimum(first + TILES, tiles), num_stages=1):
            if tl.load(too_large + batch_head * tiles + tile) != 0:
                _add_to_tile(
                    tile, tiles, query, key_mean, value_mean, skipped, skipped_count, out, lse, perm, new_out, new_lse,
                    too_large, scale_log2, size_log2, last_size_log2, largest_sum,
                    stride_qb, stride_qh, stride_ql, stride_qd, stride_ob, stride_oh, stride_ol, stride_od,
                    stride_nb, stride_nh, stride_nl, stride_nd, stride_perm,
                    heads_per_kv, length, num_query, num_key, width, BLOCK_SIZE, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D,
                    PRECISION, HAS_COUNT, HAS_PERM, ONLINE,
                )  # fmt: skip
    else:
        _add_to_tile(
            tl.program_id(0), tiles, query, key_mean, value_mean, skipped, skipped_count, out, lse, perm, new_out,
            new_lse, too_large, scale_log2, size_log2, last_size_log2, largest_sum,
            stride_qb, stride_qh, stride_ql, stride_qd, stride_ob, stride_oh, stride_ol, stride_od,
            stride_nb, stride_nh, stride_nl, stride_nd, stride_perm,
            heads_per_kv, length, num_query, num_key, width, BLOCK_SIZE, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D,
            PRECISION, HAS_COUNT, HAS_PERM, ONLINE,
        )  # fmt: skip
