"""Enriched attention backward in Triton: query-major for the queries, key-major for keys and values of each level.

Legend as in `access_kernels.py`; P softmax weights, dS gradient of the logits, delta the row sums of P dP. Weights
enter P in every level. No atomics: each sum has one fixed order, so two runs are bitwise equal.
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

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dq_step(b_s, b_k, b_v, b_do, b_lse, b_delta, b_dq, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add keys with base-2 logits `b_s` [.., M, N] to the gradient of the queries [.., M, D], not yet scaled."""
    axis: tl.constexpr = len(b_s.shape) - 1
    if axis == 1:
        b_vt = tl.trans(b_v)
    else:
        b_vt = tl.permute(b_v, (0, 2, 1))
    b_p = tl.exp2(b_s - tl.expand_dims(b_lse, axis))
    b_dp = tl.dot(b_do, b_vt, input_precision=PRECISION)
    b_ds = b_p * (b_dp - tl.expand_dims(b_delta, axis))
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["heads", "heads_per_kv", "length"])
def enriched_bwd_dq_kernel(  # type: ignore[no-untyped-def]
    query, key, value, out, grad_out, lse, grad_lse, grad_query, delta,
    coarse_keys, coarse_values, indices, widths, scale, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd,
    stride_ob, stride_oh, stride_ol, stride_od,
    stride_gb, stride_gh, stride_gl, stride_gd,
    heads, heads_per_kv, length,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    COARSE_N: tl.constexpr, FINE_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ENRICH: tl.constexpr, DISJOINT: tl.constexpr, SAME_STRIDES: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """As the forward kernel; `grad_query` has the strides of `query`. Also writes delta for the key-major kernel."""
    row = tl.program_id(0) * ROWS
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // heads_per_kv
    batch_kv = batch * (heads // heads_per_kv) + kv_head

    o_m = row + tl.arange(0, ROWS)
    m_m = o_m < length
    q_offset = batch * stride_qb + head * stride_qh
    b_q = gather_rows(query + q_offset, o_m, m_m, stride_ql, stride_qd, HEAD_DIM, BLOCK_D)  # [ROWS, D]
    b_o = gather_rows(
        out + batch * stride_ob + head * stride_oh, o_m, m_m, stride_ol, stride_od, HEAD_DIM, BLOCK_D
    )  # fmt: skip
    b_do = gather_rows(
        grad_out + batch * stride_gb + head * stride_gh, o_m, m_m, stride_gl, stride_gd, HEAD_DIM, BLOCK_D
    )  # fmt: skip
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        b_delta -= tl.load(grad_lse + batch_head * length + o_m, mask=m_m, other=0.0)
    tl.store(delta + batch_head * length + o_m, b_delta, mask=m_m)
    # Rows without any key have log-sum-exp -inf, like padding: their weights become 0 with +inf instead.
    b_lse = tl.load(lse + batch_head * length + o_m, mask=m_m, other=float("inf")) * _LOG2_E
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
    b_dq = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)

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
                b_dq = _dq_step(b_s, b_k, b_v, b_do, b_lse, b_delta, b_dq, PRECISION)

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
            b_dq = _dq_step(b_s, b_k, b_v, b_do, b_lse, b_delta, b_dq, PRECISION)
    else:
        UNITS: tl.constexpr = ROWS // UNIT
        GROUPS: tl.constexpr = UNIT // BLOCK
        b_q3 = tl.reshape(b_q, [UNITS, UNIT, BLOCK_D])
        b_do3 = tl.reshape(b_do, [UNITS, UNIT, BLOCK_D])
        b_dq3 = tl.reshape(b_dq, [UNITS, UNIT, BLOCK_D])
        b_lse3 = tl.reshape(b_lse, [UNITS, UNIT])
        b_delta3 = tl.reshape(b_delta, [UNITS, UNIT])
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
                b_dq3 = _dq_step(b_s, b_k, b_v, b_do3, b_lse3, b_delta3, b_dq3, PRECISION)
        b_dq = tl.reshape(b_dq3, [ROWS, BLOCK_D])
    store_rows(grad_query + q_offset, o_m, m_m, stride_ql, stride_qd, b_dq * scale, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_parent(  # type: ignore[no-untyped-def]
    b_x, parent, parent_row, part_rows, splits, b_token, block, length,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add what the mean above hands down to its children: their share of its raw tokens times its gradient.

    That gradient comes in `splits` parts of `part_rows` rows each.
    """
    o_d = tl.arange(0, BLOCK_D)
    b_parent = tl.zeros([BLOCK_D], dtype=tl.float32)
    for split in range(splits):
        row = parent_row + split * part_rows
        b_parent += tl.load(parent + row * HEAD_DIM + o_d, mask=o_d < HEAD_DIM, other=0.0)
    count = tl.minimum(length - block * (SPAN * BLOCK), SPAN * BLOCK).to(tl.float32)
    b_count = tl.maximum(tl.minimum(length - b_token * SPAN, SPAN), 0).to(tl.float32)
    return b_x + (b_count / count)[:, None] * b_parent[None, :]


@triton.jit(do_not_specialize=["heads", "heads_per_kv", "length", "room", "n_slots", "cap", "splits"])
def enriched_bwd_dkdv_kernel(  # type: ignore[no-untyped-def]
    query, key, value, grad_out, lse, delta, grad_key, grad_value, part_key, part_value, parent_key, parent_value,
    begins, counts, queries, slot_firsts, slot_blocks, used, own_index, own_width, scale, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd,
    stride_gb, stride_gh, stride_gl, stride_gd,
    heads, heads_per_kv, length, room, n_slots, cap, splits,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, DENSE: tl.constexpr, MERGE: tl.constexpr, DISJOINT: tl.constexpr,
    GROUPED: tl.constexpr, SAME_STRIDES: tl.constexpr, KEYS: tl.constexpr, KEY_STEP: tl.constexpr, ROWS: tl.constexpr,
    SWAP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Keys and values of one level (SPAN raw tokens under each) against the queries that meet them.

    DENSE, the coarsest level: KEY_STEP tokens against `cap` queries of one query head; partial sums go to part number
    program_id(2). Otherwise the S tokens of one block against the entries of its list, each SPAN * S raw queries. A
    block with more than `cap` entries is cut into several programs, the first `n_slots` ones, which write partial sums
    to the slots of that block; all others write the final gradient. SWAP has queries in the rows of the products;
    GROUPED says that several query heads share the keys.
    """
    batch_kv = tl.program_id(1).to(tl.int64)
    n_kv_heads = heads // heads_per_kv
    batch = batch_kv // n_kv_heads
    kv_head = batch_kv % n_kv_heads
    n_l = tl.cdiv(length, SPAN)
    n_blocks = tl.cdiv(n_l, BLOCK)
    item = tl.program_id(0)
    if DENSE:
        block = item
        splits_per_head = tl.cdiv(length, cap)
        head = kv_head * heads_per_kv + tl.program_id(2) // splits_per_head
        first = (tl.program_id(2) % splits_per_head) * cap
        n_rows = tl.minimum(cap, length - first)
    else:
        head = kv_head * heads_per_kv
        is_slot = item < n_slots
        if is_slot:
            if item >= tl.load(used + batch_kv * 2 + 1):
                return
            block = tl.load(slot_blocks + batch_kv * n_slots + item)
        else:
            block = item - n_slots
        count = tl.load(counts + batch_kv * n_blocks + block)
        if (count > cap) != is_slot:
            return
        begin = tl.load(begins + batch_kv * n_blocks + block)
        if is_slot:
            skipped = (item - tl.load(slot_firsts + batch_kv * n_blocks + block)) * cap
            begin += skipped
            count = tl.minimum(count - skipped, cap)
        list_start = queries + batch_kv * room + begin
        n_rows = count * (SPAN * BLOCK)

    o_key = tl.arange(0, KEYS)
    o_n = block * KEY_STEP + o_key
    m_n = (o_key < KEY_STEP) & (o_n < n_l)
    k_offset = batch * stride_kb + kv_head * stride_kh
    v_offset = batch * stride_vb + kv_head * stride_vh
    b_k = gather_rows(key + k_offset, o_n, m_n, stride_kl, stride_kd, HEAD_DIM, BLOCK_D)  # [KEYS, D]
    b_v = gather_rows(value + v_offset, o_n, m_n, stride_vl, stride_vd, HEAD_DIM, BLOCK_D)
    b_whole, b_last = log2_weights(length, n_l, SPAN)
    b_bias = bias_of(o_n, m_n, n_l, b_whole, b_last)
    if SWAP:
        b_dk = tl.zeros([BLOCK_D, KEYS], dtype=tl.float32)
        b_dv = tl.zeros([BLOCK_D, KEYS], dtype=tl.float32)
    else:
        b_dk = tl.zeros([KEYS, BLOCK_D], dtype=tl.float32)
        b_dv = tl.zeros([KEYS, BLOCK_D], dtype=tl.float32)

    o_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    if SAME_STRIDES:  # of queries and output gradients: their addresses then differ by a constant
        stride_gb, stride_gh, stride_gl, stride_gd = stride_qb, stride_qh, stride_ql, stride_qd
    q_batch = query + batch * stride_qb
    g_batch = grad_out + batch * stride_gb
    # Raw queries of an entry. Where a step stays inside one entry, its number is a scalar.
    ENTRY: tl.constexpr = SPAN * BLOCK
    for start in tl.range(0, n_rows, ROWS, num_stages=NUM_STAGES):
        o_r = start + tl.arange(0, ROWS)
        m_m = o_r < n_rows
        o_head = head
        if DENSE:
            o_m = first + o_r
        elif ENTRY >= ROWS:
            entry = tl.load(list_start + start // ENTRY)
            if GROUPED:
                # An entry is head in the group times number of lists, plus the list: the heads share their keys.
                o_head = head + entry // n_blocks
                entry = entry % n_blocks
            o_m = entry * ENTRY + start % ENTRY + tl.arange(0, ROWS)
        else:
            o_u = o_r.to(tl.uint32)
            b_entry = tl.load(list_start + o_u // ENTRY, mask=m_m, other=0)
            if GROUPED:
                o_head = head + (b_entry // n_blocks)
                b_entry = b_entry % n_blocks
            o_m = b_entry * ENTRY + (o_u % ENTRY).to(tl.int32)
        m_m = m_m & (o_m < length)
        mask = m_m[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (o_d < HEAD_DIM)
        o_row = o_m.to(tl.int64)
        q_rows = q_batch + (o_head * stride_qh + o_row * stride_ql)[:, None] + o_d * stride_qd
        g_rows = g_batch + (o_head * stride_gh + o_row * stride_gl)[:, None] + o_d * stride_gd
        b_q = tl.load(q_rows, mask=mask, other=0.0)  # [ROWS, D]
        b_do = tl.load(g_rows, mask=mask, other=0.0)
        statistic = (batch * heads + o_head) * length + o_row
        b_lse = tl.load(lse + statistic, mask=m_m, other=float("inf")) * _LOG2_E
        b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
        b_delta = tl.load(delta + statistic, mask=m_m, other=0.0)
        # The logits are b_s * scale_log2 + b_shift.
        if SWAP:
            b_shift = b_bias[None, :] - b_lse[:, None]  # [ROWS, KEYS]
        else:
            b_shift = b_bias[:, None] - b_lse[None, :]  # [KEYS, ROWS]
        if DISJOINT:
            own = own_index + ((batch * heads + o_head) * n_l + o_m // SPAN) * own_width
            for k in range(own_width):
                b_id = tl.load(own + k, mask=m_m, other=-1)
                if SWAP:
                    b_shift = tl.where(b_id[:, None] == o_n[None, :], float("-inf"), b_shift)
                else:
                    b_shift = tl.where(b_id[None, :] == o_n[:, None], float("-inf"), b_shift)
        if SWAP:
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_p = tl.exp2(b_s * scale_log2 + b_shift)  # [ROWS, KEYS]
            b_ds = b_p * (b_dp - b_delta[:, None])
            b_dv = tl.dot(tl.trans(b_do), b_p.to(b_do.dtype), b_dv, input_precision=PRECISION)  # [D, KEYS]
            b_dk = tl.dot(tl.trans(b_q), b_ds.to(b_q.dtype), b_dk, input_precision=PRECISION)
        else:
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
            b_p = tl.exp2(b_s * scale_log2 + b_shift)  # [KEYS, ROWS]
            b_ds = b_p * (b_dp - b_delta[None, :])
            b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)  # [KEYS, D]
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)

    if SWAP:
        b_dk = tl.trans(b_dk)
        b_dv = tl.trans(b_dv)
    b_dk = b_dk * scale
    if DENSE:
        part = (tl.program_id(2) * tl.num_programs(1) + batch_kv) * n_l
        store_rows(part_key + part * HEAD_DIM, o_n, m_n, HEAD_DIM, 1, b_dk, HEAD_DIM, BLOCK_D)
        store_rows(part_value + part * HEAD_DIM, o_n, m_n, HEAD_DIM, 1, b_dv, HEAD_DIM, BLOCK_D)
    elif is_slot:
        part = (batch_kv * n_slots + item) * BLOCK
        store_rows(part_key + part * HEAD_DIM, o_key, m_n, HEAD_DIM, 1, b_dk, HEAD_DIM, BLOCK_D)
        store_rows(part_value + part * HEAD_DIM, o_key, m_n, HEAD_DIM, 1, b_dv, HEAD_DIM, BLOCK_D)
    else:
        if MERGE:
            row = batch_kv * n_blocks + block
            rows = tl.num_programs(1).to(tl.int64) * n_blocks
            b_dk = _add_parent(
                b_dk, parent_key, row, rows, splits, o_n, block, length, SPAN, BLOCK, HEAD_DIM, BLOCK_D
            )  # fmt: skip
            b_dv = _add_parent(
                b_dv, parent_value, row, rows, splits, o_n, block, length, SPAN, BLOCK, HEAD_DIM, BLOCK_D
            )  # fmt: skip
        store_rows(grad_key + k_offset, o_n, m_n, stride_kl, stride_kd, b_dk, HEAD_DIM, BLOCK_D)
        store_rows(grad_value + v_offset, o_n, m_n, stride_vl, stride_vd, b_dv, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["kv_heads", "length", "n_slots", "cap", "splits"])
def enriched_bwd_reduce_kernel(  # type: ignore[no-untyped-def]
    grad_key, grad_value, part_key, part_value, parent_key, parent_value, counts, slot_firsts, slot_blocks, used,
    stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd,
    kv_heads, length, n_slots, cap, splits,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, MERGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the slots of each block that was cut, in the order of its list."""
    slot = tl.program_id(0)
    batch_kv = tl.program_id(1).to(tl.int64)
    if slot >= tl.load(used + batch_kv * 2 + 1):
        return
    n_l = tl.cdiv(length, SPAN)
    n_blocks = tl.cdiv(n_l, BLOCK)
    block = tl.load(slot_blocks + batch_kv * n_slots + slot)
    if slot != tl.load(slot_firsts + batch_kv * n_blocks + block):
        return
    end = slot + tl.cdiv(tl.load(counts + batch_kv * n_blocks + block), cap)
    o_key = tl.arange(0, BLOCK)
    o_n = block * BLOCK + o_key
    m_n = o_n < n_l
    b_dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for s in range(slot, end):
        part = (batch_kv * n_slots + s) * BLOCK * HEAD_DIM
        b_dk += gather_rows(part_key + part, o_key, m_n, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
        b_dv += gather_rows(part_value + part, o_key, m_n, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
    if MERGE:
        row = batch_kv * n_blocks + block
        rows = tl.num_programs(1).to(tl.int64) * n_blocks
        b_dk = _add_parent(b_dk, parent_key, row, rows, splits, o_n, block, length, SPAN, BLOCK, HEAD_DIM, BLOCK_D)
        b_dv = _add_parent(b_dv, parent_value, row, rows, splits, o_n, block, length, SPAN, BLOCK, HEAD_DIM, BLOCK_D)
    k_offset = batch_kv // kv_heads * stride_kb + batch_kv % kv_heads * stride_kh
    v_offset = batch_kv // kv_heads * stride_vb + batch_kv % kv_heads * stride_vh
    store_rows(grad_key + k_offset, o_n, m_n, stride_kl, stride_kd, b_dk, HEAD_DIM, BLOCK_D)
    store_rows(grad_value + v_offset, o_n, m_n, stride_vl, stride_vd, b_dv, HEAD_DIM, BLOCK_D)
