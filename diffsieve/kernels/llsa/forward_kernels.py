"""Enriched attention forward in Triton: one joint softmax over raw, pooled and coarsest tokens.

One program computes ROWS queries of one head, ROWS at most S * S. All of them meet the same coarse tokens, which are
streamed in tiles of COARSE_N keys with two-dimensional products. The raw keys differ between groups of S queries:
there a batched product takes UNIT rows at a time, and small blocks share a unit (S = 8 has two groups in 16 rows).

The limit is the number of instructions. So addresses inside a head are 32 bits wide, list entries are read once per
block, steps over keys that are all there with full weight mask nothing, and scale, weight and row maximum are one
multiplication and addition per logit. Legend as in `access_kernels.py`; logits are in base 2.
"""

import triton
import triton.language as tl

from .access_kernels import represented_below, store_rows

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    base, b_token, m_n, stride_l, stride_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr = False
):  # fmt: skip
    """Rows of one head, zero where masked, for tokens [N] or [UNITS, N]: [.., D]. WIDE: by 64-bit offsets."""
    axis: tl.constexpr = len(b_token.shape)
    o_d = tl.arange(0, BLOCK_D)
    if axis == 1:
        o_d = o_d[None, :]
    else:
        o_d = o_d[None, None, :]
    if WIDE:
        b_token = b_token.to(tl.int64)
        o_d = o_d.to(tl.int64)
    mask = tl.expand_dims(m_n, axis)
    if HEAD_DIM != BLOCK_D:
        mask = mask & (o_d < HEAD_DIM)
    return tl.load(base + (tl.expand_dims(b_token * stride_l, axis) + o_d * stride_d), mask=mask, other=0.0)


@triton.jit
def _listed(list_start, start, width, n_tokens, N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Children number `start` to `start + N` of a list, and whether they exist: [N], [N]."""
    n_blocks = tl.cdiv(n_tokens, BLOCK)
    if N >= BLOCK:
        o_c = start // BLOCK + tl.arange(0, N // BLOCK)
        b_block = tl.load(list_start + o_c, mask=o_c < width, other=-1)
        b_block = tl.where(b_block.to(tl.uint32) < n_blocks, b_block, n_blocks)
        b_token = tl.reshape(b_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], [N])
    else:
        b_block = tl.load(list_start + start // BLOCK)
        b_block = tl.where(b_block.to(tl.uint32) < n_blocks, b_block, n_blocks)
        b_token = b_block * BLOCK + start % BLOCK + tl.arange(0, N)
    return b_token, b_token < n_tokens


@triton.jit
def _listed_of_groups(  # type: ignore[no-untyped-def]
    lists, o_group, n_groups, start, width, n_tokens, N: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`_listed` for the lists of several query groups at once: [UNITS, N], [UNITS, N]."""
    n_blocks = tl.cdiv(n_tokens, BLOCK)
    UNITS: tl.constexpr = o_group.shape[0]
    PER_STEP: tl.constexpr = N // BLOCK if N >= BLOCK else 1
    WITHIN: tl.constexpr = BLOCK if N >= BLOCK else N
    o_c = start // BLOCK + tl.arange(0, PER_STEP)
    mask = (o_group < n_groups)[:, None] & (o_c < width)[None, :]
    b_block = tl.load(lists + o_group[:, None] * width + o_c[None, :], mask=mask, other=-1)
    b_first = tl.where(b_block.to(tl.uint32) < n_blocks, b_block, n_blocks) * BLOCK
    if N < BLOCK:
        b_first += start % BLOCK
    b_token = tl.reshape(b_first[:, :, None] + tl.arange(0, WITHIN)[None, None, :], [UNITS, N])
    return b_token, b_token < n_tokens


@triton.jit
def _whole_blocks(lists, o_list, m_list, width, n_whole, KP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens, in whole blocks, at the beginning of all these lists that have a full weight: a scalar.

    Args:
        n_whole: tokens of the level that stand for as many raw tokens as a token of it can.
    """
    o_k = tl.arange(0, KP)
    b_block = tl.load(lists + o_list[:, None] * width + o_k[None, :], mask=m_list[:, None] & (o_k < width), other=-1)
    whole = b_block.to(tl.uint32) < n_whole // BLOCK
    # Where the first entry is that does not: what lies before is whole whatever comes behind.
    return tl.min(tl.min(tl.where(whole, width, o_k[None, :]), 1), 0) * BLOCK


@triton.jit
def _softmax_step(b_s, b_v, b_acc, b_max, b_sum, scale, weight, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add keys with dot products `b_s` [.., M, N] to the output [.., M, D], row maxima and row sums [.., M].

    Args:
        scale: factor of the products, positive, in base 2.
        weight: added to all scaled products.
    """
    axis: tl.constexpr = len(b_s.shape) - 1
    b_new = tl.maximum(b_max, tl.max(b_s, axis) * scale + weight)
    # A row may have met nothing yet: -inf minus -inf is not a number.
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s * scale + tl.expand_dims(weight - b_base, axis))
    b_alpha = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_alpha + tl.sum(b_p, axis)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * tl.expand_dims(b_alpha, axis), input_precision=PRECISION)
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=["heads", "heads_per_kv", "length"])
def enriched_fwd_kernel(  # type: ignore[no-untyped-def]
    query, key, value, out, lse, coarse_keys, coarse_values, indices, widths, shortfalls, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd,
    stride_ob, stride_oh, stride_ol, stride_od,
    heads, heads_per_kv, length,
    BLOCK: tl.constexpr, LOG2_BLOCK: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    KP: tl.constexpr, COARSE_N: tl.constexpr, FINE_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ENRICH: tl.constexpr, DISJOINT: tl.constexpr, SAME_STRIDES: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`shortfalls`: per level, what is added to dot products of the last token for its smaller weight. KP: width of the
    longest list padded to a power of two. WIDE: a head spans 2**31 elements."""
    row = tl.program_id(0) * ROWS
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    batch_kv = batch * (heads // heads_per_kv) + kv_head

    o_m = row + tl.arange(0, ROWS)
    m_m = o_m < length
    b_q = _rows(
        query + batch * stride_qb + head * stride_qh, o_m, m_m, stride_ql, stride_qd, HEAD_DIM, BLOCK_D, WIDE
    )  # [ROWS, D]  # fmt: skip
    b_acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([ROWS], dtype=tl.float32)
    o_one = tl.arange(0, 1)

    if ENRICH:
        for level in tl.static_range(1, LEVELS + 1):
            # A constexpr cannot be assigned twice, so the span S**level is written out.
            n_l = tl.cdiv(length, BLOCK**level)
            n_whole = length // BLOCK**level
            k_base = coarse_keys[level - 1] + batch_kv * n_l * HEAD_DIM
            v_base = coarse_values[level - 1] + batch_kv * n_l * HEAD_DIM
            own_index = indices[level - 1] + batch_head * n_l * widths[level - 1]
            weight = 1.0 * level * LOG2_BLOCK
            if level == LEVELS:
                count = n_l
                plain = n_whole
            else:
                width = widths[level]
                count = width * BLOCK
                n_parents = tl.cdiv(length, BLOCK ** (level + 1))
                parent = row // BLOCK ** (level + 1)
                list_start = indices[level] + (batch_head * n_parents + parent) * width
                plain = _whole_blocks(list_start, o_one, o_one == 0, width, n_whole, KP, BLOCK)
            for start in tl.range(0, count, COARSE_N, num_stages=NUM_STAGES):
                if level == LEVELS:
                    b_token = start + tl.arange(0, COARSE_N)
                    m_n = b_token < n_l
                else:
                    b_token, m_n = _listed(list_start, start, width, n_l, COARSE_N, BLOCK)
                b_k = _rows(k_base, b_token, m_n, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
                b_v = _rows(v_base, b_token, m_n, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
                if start + COARSE_N > plain:
                    b_less = tl.where(b_token == n_l - 1, shortfalls[level - 1], 0.0)
                    b_s += tl.where(m_n, b_less, float("-inf"))[None, :]
                if DISJOINT:
                    drop = represented_below(own_index, widths[level - 1], o_m, m_m, b_token, BLOCK**level)
                    b_s = tl.where(drop, float("-inf"), b_s)
                b_acc, b_max, b_sum = _softmax_step(b_s, b_v, b_acc, b_max, b_sum, scale_log2, weight, PRECISION)

    if SAME_STRIDES:  # of keys and values: their addresses then differ by a constant
        stride_vb, stride_vh, stride_vl, stride_vd = stride_kb, stride_kh, stride_kl, stride_kd
    k_base = key + batch * stride_kb + kv_head * stride_kh
    v_base = value + batch * stride_vb + kv_head * stride_vh
    n_groups = tl.cdiv(length, BLOCK)
    width = widths[0]
    lists = indices[0] + batch_head * n_groups * width
    if ROWS == BLOCK:
        list_start = lists + (row // BLOCK) * width
        plain = _whole_blocks(list_start, o_one, o_one == 0, width, length, KP, BLOCK)
        for start in tl.range(0, width * BLOCK, FINE_N, num_stages=NUM_STAGES):
            b_token, m_n = _listed(list_start, start, width, length, FINE_N, BLOCK)
            b_k = _rows(k_base, b_token, m_n, stride_kl, stride_kd, HEAD_DIM, BLOCK_D, WIDE)
            b_v = _rows(v_base, b_token, m_n, stride_vl, stride_vd, HEAD_DIM, BLOCK_D, WIDE)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            if start + FINE_N > plain:
                b_s = tl.where(m_n[None, :], b_s, float("-inf"))
            b_acc, b_max, b_sum = _softmax_step(b_s, b_v, b_acc, b_max, b_sum, scale_log2, 0.0, PRECISION)
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
            plain = _whole_blocks(lists, o_group, o_group < n_groups, width, length, KP, BLOCK)
            for start in tl.range(0, width * BLOCK, FINE_N, num_stages=NUM_STAGES):
                b_token, m_n = _listed_of_groups(lists, o_group, n_groups, start, width, length, FINE_N, BLOCK)
                b_k = _rows(k_base, b_token, m_n, stride_kl, stride_kd, HEAD_DIM, BLOCK_D, WIDE)
                b_v = _rows(v_base, b_token, m_n, stride_vl, stride_vd, HEAD_DIM, BLOCK_D, WIDE)
                b_s = tl.dot(b_q3, tl.permute(b_k, (0, 2, 1)), input_precision=PRECISION)
                if start + FINE_N > plain:
                    b_s = tl.where(m_n[:, None, :], b_s, float("-inf"))
                if GROUPS > 1:
                    b_s = tl.where((o_r // BLOCK == group)[None, :, None], b_s, float("-inf"))
                b_acc3, b_max3, b_sum3 = _softmax_step(
                    b_s, b_v, b_acc3, b_max3, b_sum3, scale_log2, 0.0, PRECISION
                )  # fmt: skip
        b_acc = tl.reshape(b_acc3, [ROWS, BLOCK_D])
        b_max = tl.reshape(b_max3, [ROWS])
        b_sum = tl.reshape(b_sum3, [ROWS])

    b_acc = b_acc * (1.0 / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
    o_base = out + batch * stride_ob + head * stride_oh
    store_rows(o_base, o_m, m_m, stride_ol, stride_od, b_acc, HEAD_DIM, BLOCK_D)
    b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max + tl.log2(b_sum)) * _LN_2)
    tl.store(lse + batch_head * length + o_m, b_lse, mask=m_m)
