"""The centroid term of BA-Att over lists of skipped blocks: adds them to finished attention, and undoes the order.

Legend: BM queries of a program (all of one query block), BN skipped blocks per step, D channels padded to a power of
two. Weights are taken relative to the log-sum-exp over the kept keys, as if this were the largest logit: nothing is
rescaled on the way. Where the skipped blocks outweigh the kept ones by so much that numbers get too large for that,
the program says so, and a second launch does its work again with the running maximum of an online softmax.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..sizes import cdiv, next_power_of_2
from .forms import CentroidTile

_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)


# Lengths must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["heads_per_kv", "length", "num_query", "num_key", "width", "stride_perm"])
def add_skipped_kernel(  # type: ignore[no-untyped-def]
    query, key_mean, value_mean, skipped, skipped_count, out, lse, perm, new_out, new_lse, too_large,
    scale_log2, size_log2, last_size_log2, largest_sum,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_ob, stride_oh, stride_ol, stride_od,
    stride_nb, stride_nh, stride_nl, stride_nd, stride_perm,
    heads_per_kv, length, num_query, num_key, width,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    HAS_COUNT: tl.constexpr, HAS_PERM: tl.constexpr, ONLINE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    heads = tl.num_programs(1)
    batch_head = batch.to(tl.int64) * heads + head
    batch_kv = batch.to(tl.int64) * (heads // heads_per_kv) + head // heads_per_kv
    too_large += batch_head * tl.num_programs(0) + tl.program_id(0)
    if ONLINE:  # noqa: SIM102 - a condition for the compiler and one for the GPU
        if tl.load(too_large) == 0:
            return
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
    o_s = tl.arange(0, BLOCK_N)
    for start in tl.range(0, count, BLOCK_N):
        listed = o_s < count - start
        o_n = tl.load(skipped + start + o_s, mask=listed, other=0)
        b_bias = tl.where(o_n == num_key - 1, last_size_log2, size_log2)
        b_bias = tl.where(listed, b_bias, float("-inf"))
        offsets = o_n[:, None] * HEAD_DIM + o_d[None, :]
        if HEAD_DIM == BLOCK_D:
            b_k, b_v = tl.load(key_mean + offsets), tl.load(value_mean + offsets)
        else:
            b_k = tl.load(key_mean + offsets, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
            b_v = tl.load(value_mean + offsets, mask=(o_d < HEAD_DIM)[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        if ONLINE:
            b_s += b_bias[None, :]
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_p = tl.exp2(b_s - b_shift[:, None])
            b_alpha = tl.exp2(b_max - b_shift)
            b_sum = b_sum * b_alpha
            b_acc = b_acc * b_alpha[:, None]
            b_max = b_new
        else:
            b_p = tl.exp2(b_s + (b_bias[None, :] - b_max[:, None]))
        b_sum += tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    if not ONLINE:
        # Written so that NaN is too large.
        within = tl.sum((b_sum < largest_sum).to(tl.int32), 0)
        tl.store(too_large, (within < BLOCK_M).to(tl.int32))

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


def add_skipped_triton(
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
    tile: CentroidTile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same meaning as `centroids.add_centroids` of as many keys as queries, with the order undone in the output.

    Args:
        skipped: int32 (B, H, Nq, S), blocks to add, ascending; `skipped_count` int32 (B, H, Nq) of them, or all.
        block_size: a power of two, at least 16.
    """
    batch, heads, length, dim = query.shape
    num_query, num_key = skipped.shape[2], key_mean.shape[2]
    padded_dim = max(16, next_power_of_2(dim))
    block_m = min(block_size, tile.block_m)
    key_mean, value_mean = (x.to(query.dtype).contiguous() for x in (key_mean, value_mean))
    new_out, new_lse = torch.empty_like(out), torch.empty_like(lse)
    if perm is not None:
        perm, new_out = perm.contiguous(), out.new_empty((batch, length, heads, dim)).transpose(1, 2)
    programs = (cdiv(length, block_m), heads, batch)
    too_large = torch.empty(programs, dtype=torch.int32, device=query.device)
    with torch.cuda.device_of(query):
        for online in (False, True):
            add_skipped_kernel[programs](
                query, key_mean, value_mean, skipped.contiguous(),
                None if skipped_count is None else skipped_count.contiguous(), out, lse.contiguous(), perm, new_out,
                new_lse, too_large, scale * _LOG2_E, math.log2(block_size),
                math.log2(length - (num_key - 1) * block_size),
                # No weight is larger than the sum of all. fp16 ends at 65,504; in fp32 this leaves 2^63 to the values.
                2.0**15 if query.dtype == torch.float16 else 2.0**64,
                *query.stride(), *out.stride(), *new_out.stride(),
                length if perm is not None and perm.dim() == 3 else 0,
                heads // key_mean.shape[1], length, num_query, num_key, skipped.shape[3],
                BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=tile.block_n, HEAD_DIM=dim, BLOCK_D=padded_dim,
                PRECISION="ieee", HAS_COUNT=skipped_count is not None, HAS_PERM=perm is not None, ONLINE=online,
                num_warps=max(1, min(tile.num_warps, block_m // 16)), num_stages=tile.num_stages,
                maxnreg=None if online else tile.registers,
            )  # fmt: skip
    return new_out, new_lse
