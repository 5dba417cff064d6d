"""The centroid term of BA-Att in Triton: one pass over the block means that continues a finished online softmax.

Legend: BM queries per program (all of one query block), BN block means per step, D channels padded to a power of two.
The pass starts from the output and log-sum-exp over the kept keys, as if these were one key seen already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)


# Lengths must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["heads_per_kv", "length", "num_query", "num_key"])
def add_centroids_fwd_kernel(  # type: ignore[no-untyped-def]
    query, key_mean, value_mean, size_log2, kept, out, lse, new_out, new_lse, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_ob, stride_oh, stride_ol, stride_od,
    stride_nb, stride_nh, stride_nl, stride_nd,
    heads_per_kv, length, num_query, num_key,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    heads = tl.num_programs(1)
    batch_head = batch.to(tl.int64) * heads + head
    batch_kv = batch.to(tl.int64) * (heads // heads_per_kv) + head // heads_per_kv
    o_m = row + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    row_mask = o_m < length
    mask = row_mask[:, None] & (o_d < HEAD_DIM)[None, :]
    o_m64, o_d64 = o_m.to(tl.int64)[:, None], o_d.to(tl.int64)[None, :]
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    q_base = query + batch64 * stride_qb + head64 * stride_qh
    out_base = out + batch64 * stride_ob + head64 * stride_oh
    b_q = tl.load(q_base + o_m64 * stride_ql + o_d64 * stride_qd, mask=mask, other=0.0)
    b_acc = tl.load(out_base + o_m64 * stride_ol + o_d64 * stride_od, mask=mask, other=0.0).to(tl.float32)
    b_max = tl.load(lse + batch_head * length + o_m, mask=row_mask, other=float("-inf")) / _LN_2
    b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)

    kept_row = kept + (batch_head * num_query + row // BLOCK_SIZE) * num_key
    for start in tl.range(0, num_key, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        column = o_n < num_key
        mean_offset = (batch_kv * num_key + o_n.to(tl.int64))[:, None] * HEAD_DIM + o_d64
        mean_mask = column[:, None] & (o_d < HEAD_DIM)[None, :]
        b_k = tl.load(key_mean + mean_offset, mask=mean_mask, other=0.0)
        b_v = tl.load(value_mean + mean_offset, mask=mean_mask, other=0.0)
        skipped = tl.load(kept_row + o_n, mask=column, other=1) == 0
        # A masked column has the bias -inf: it drops out whatever its logit is.
        b_bias = tl.where(skipped, tl.load(size_log2 + o_n, mask=column, other=0.0), float("-inf"))
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2 + b_bias[None, :]
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # Nothing kept and nothing skipped so far: stay at weight 0 instead of exp(-inf + inf).
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_alpha = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision=PRECISION)
        b_max = b_new

    b_acc = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    new_base = new_out + batch64 * stride_nb + head64 * stride_nh
    tl.store(new_base + o_m64 * stride_nl + o_d64 * stride_nd, b_acc.to(new_out.dtype.element_ty), mask=mask)
    b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_sum)) * _LN_2)
    tl.store(new_lse + batch_head * length + o_m, b_lse, mask=row_mask)


def add_centroids_triton(
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
    """Same meaning as `centroids.add_centroids`; `block_size` a power of two, at least 16, fp32 log-sum-exp."""
    batch, heads, length, dim = query.shape
    num_query, num_key = kept.shape[2:]
    padded_dim = max(16, triton.next_power_of_2(dim))
    block_m = min(block_size, 128 if query.element_size() == 2 and padded_dim <= 128 else 64)
    key_mean, value_mean = (x.to(query.dtype).contiguous() for x in (key_mean, value_mean))
    new_out, new_lse = torch.empty_like(out), torch.empty_like(lse)
    with torch.cuda.device_of(query):
        add_centroids_fwd_kernel[triton.cdiv(length, block_m), heads, batch](
            query, key_mean, value_mean, size.log2(), kept.contiguous().view(torch.uint8), out, lse.contiguous(),
            new_out, new_lse, scale * _LOG2_E,
            *query.stride(), *out.stride(), *new_out.stride(),
            heads // key_mean.shape[1], length, num_query, num_key,
            BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=min(64, max(16, triton.next_power_of_2(num_key))),
            HEAD_DIM=dim, BLOCK_D=padded_dim, PRECISION="ieee",
            num_warps=8 if block_m == 128 else 4, num_stages=2,
        )  # fmt: skip
    return new_out, new_lse
