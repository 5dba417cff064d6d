"""Enriched attention forward in Triton: one joint softmax over raw, pooled and coarsest tokens.

One program computes ROWS queries of one head, ROWS at most S * S. All of them meet the same coarse tokens, which are
streamed in tiles of COARSE_N keys with two-dimensional products. The raw keys differ between groups of S queries:
there a batched product takes UNIT rows at a time, and small blocks share a unit (S = 8 has two groups in 16 rows).
Legend as in `access_kernels.py`; logits are in base 2, weights are added to them in fp32 after the product.
"""

import triton
import triton.language as tl

from .access_kernels import (
    bias_of,
    children,
    children_of_groups,
    gather_rows,
    gather_rows_of_groups,
    log2_weights,
    represented_below,
    store_rows,
)

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _softmax_step(b_s, b_v, b_acc, b_max, b_sum, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add keys with logits `b_s` [.., M, N] to the output [.., M, D], row maxima and row sums [.., M]."""
    axis: tl.constexpr = len(b_s.shape) - 1
    b_new = tl.maximum(b_max, tl.max(b_s, axis))
    # A row may have met nothing yet: -inf minus -inf is not a number.
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - tl.expand_dims(b_base, axis))
    b_alpha = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_alpha + tl.sum(b_p, axis)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * tl.expand_dims(b_alpha, axis), input_precision=PRECISION)
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=["heads", "heads_per_kv", "length"])
def enriched_fwd_kernel(  # type: ignore[no-untyped-def]
    query, key, value, out, lse, coarse_keys, coarse_values, indices, widths, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd,
    stride_ob, stride_oh, stride_ol, stride_od,
    heads, heads_per_kv, length,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    COARSE_N: tl.constexpr, FINE_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ENRICH: tl.constexpr, DISJOINT: tl.constexpr, SAME_STRIDES: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    batch_kv = batch * (heads // heads_per_kv) + kv_head

    o_m = row + tl.arange(0, ROWS)
    m_m = o_m < length
    q_base = query + batch * stride_qb + head * stride_qh
    b_q = gather_rows(q_base, o_m, m_m, stride_ql, stride_qd, HEAD_DIM, BLOCK_D)  # [ROWS, D]
    b_acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([ROWS], dtype=tl.float32)

    if ENRICH:
        for level in tl.static_range(1, LEVELS + 1):
            # A constexpr cannot be assigned twice, so the span S**level is written out.
            n_l = tl.cdiv(length, BLOCK**level)
            k_base = coarse_keys[level - 1] + batch_kv * n_l * HEAD_DIM
            v_base = coarse_values[level - 1] + batch_kv * n_l * HEAD_DIM
            own_index = indices[level - 1] + batch_head * n_l * widths[level - 1]
            b_whole, b_last = log2_weights(length, n_l, BLOCK**level)
            if level == LEVELS:
                count = n_l
            else:
                width = widths[level]
                count = width * BLOCK
                n_parents = tl.cdiv(length, BLOCK ** (level + 1))
                parent = row // BLOCK ** (level + 1)
                list_start = indices[level] + (batch_head * n_parents + parent) * width
            for start in tl.range(0, count, COARSE_N, num_stages=NUM_STAGES):
                o_n = start + tl.arange(0, COARSE_N)
                if level == LEVELS:
                    b_token = o_n
                    m_n = o_n < n_l
                else:
                    b_token, m_n = children(list_start, o_n, width, n_l, BLOCK)
                b_k = gather_rows(k_base, b_token, m_n, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
                b_v = gather_rows(v_base, b_token, m_n, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
                b_s = b_s * scale_log2 + bias_of(b_token, m_n, n_l, b_whole, b_last)[None, :]
                if DISJOINT:
                    drop = represented_below(own_index, widths[level - 1], o_m, m_m, b_token, BLOCK**level)
                    b_s = tl.where(drop, float("-inf"), b_s)
                b_acc, b_max, b_sum = _softmax_step(b_s, b_v, b_acc, b_max, b_sum, PRECISION)

    if SAME_STRIDES:  # of keys and values: their addresses then differ by a constant
        stride_vb, stride_vh, stride_vl, stride_vd = stride_kb, stride_kh, stride_kl, stride_kd
    k_base = key + batch * stride_kb + kv_head * stride_kh
    v_base = value + batch * stride_vb + kv_head * stride_vh
    n_groups = tl.cdiv(length, BLOCK)
    width = widths[0]
    lists = indices[0] + batch_head * n_groups * width
    if ROWS == BLOCK:
        list_start = lists + (row // BLOCK) * width
        for start in tl.range(0, width * BLOCK, FINE_N, num_stages=NUM_STAGES):
            o_n = start + tl.arange(0, FINE_N)
            b_token, m_n = children(list_start, o_n, width, length, BLOCK)
            b_k = gather_rows(k_base, b_token, m_n, stride_kl, stride_kd, HEAD_DIM, BLOCK_D)
            b_v = gather_rows(v_base, b_token, m_n, stride_vl, stride_vd, HEAD_DIM, BLOCK_D)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            b_s = b_s * scale_log2 + tl.where(m_n, 0.0, float("-inf"))[None, :]
            b_acc, b_max, b_sum = _softmax_step(b_s, b_v, b_acc, b_max, b_sum, PRECISION)
    else:
        UNITS: tl.constexpr = ROWS // UNIT
        GROUPS: tl.constexpr = UNIT // BLOCK
        b_q3 = tl.reshape(b_q, [UNITS, UNIT, BLOCK_D])
        b_acc3 = tl.reshape(b_acc, [UNITS, UNIT, BLOCK_D])
        b_max3 = tl.reshape(b_max, [UNITS, UNIT])
        b_sum3 = tl.reshape(b_sum, [UNITS, UNIT])
        o_u = tl.arange(0, UNITS)
        o_r = tl.arange(0, UNIT)
        for group in tl.static_range(0, GROUPS):
            o_group = row // BLOCK + o_u * GROUPS + group
            for start in tl.range(0, width * BLOCK, FINE_N, num_stages=NUM_STAGES):
                o_n = start + tl.arange(0, FINE_N)
                b_token, m_n = children_of_groups(lists, o_group, n_groups, o_n, width, length, BLOCK)
                b_k = gather_rows_of_groups(k_base, b_token, m_n, stride_kl, stride_kd, HEAD_DIM, BLOCK_D)
                b_v = gather_rows_of_groups(v_base, b_token, m_n, stride_vl, stride_vd, HEAD_DIM, BLOCK_D)
                b_s = tl.dot(b_q3, tl.permute(b_k, (0, 2, 1)), input_precision=PRECISION)
                b_s = b_s * scale_log2 + tl.where(m_n, 0.0, float("-inf"))[:, None, :]
                if GROUPS > 1:
                    b_s = tl.where((o_r // BLOCK == group)[None, :, None], b_s, float("-inf"))
                b_acc3, b_max3, b_sum3 = _softmax_step(b_s, b_v, b_acc3, b_max3, b_sum3, PRECISION)
        b_acc = tl.reshape(b_acc3, [ROWS, BLOCK_D])
        b_max = tl.reshape(b_max3, [ROWS])
        b_sum = tl.reshape(b_sum3, [ROWS])

    b_acc = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    o_base = out + batch * stride_ob + head * stride_oh
    store_rows(o_base, o_m, m_m, stride_ol, stride_od, b_acc, HEAD_DIM, BLOCK_D)
    b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_sum)) * _LN_2)
    tl.store(lse + batch_head * length + o_m, b_lse, mask=m_m)
