"""Hierarchical top-k in Triton: scores and selection in one kernel, nothing but the lists in global memory.

Legend as in `access_kernels.py`; KP is the list width padded to a power of two. A candidate is one int64: the score,
mapped to an int32 of the same order, above the complement of the token id. Its order is that of the score, ties to the
lowest id, and no two candidates are equal, so that "the next best" is the largest below the last one.
"""

import triton
import triton.language as tl

from .access_kernels import children, gather_rows

_NOTHING = tl.constexpr(-(2**63))


@triton.jit
def _candidates(b_s, b_token, m_n):  # type: ignore[no-untyped-def]
    """Scores [M, N] of tokens [N] as int64 candidates. NaN counts as +inf; masked tokens are below every candidate."""
    b_s = tl.where(b_s == b_s, b_s, float("inf")) + 0.0  # adding zero makes -0 equal to 0
    b_bits = b_s.to(tl.int32, bitcast=True)
    b_bits = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    b_low = (0x7FFFFFFF - b_token).to(tl.int64)
    return tl.where(m_n[None, :], (b_bits.to(tl.int64) << 32) | b_low[None, :], _NOTHING)


@triton.jit
def _merge(b_best, b_new, kept, KP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The `kept` largest of the best so far [M, KP] and new candidates [M, N]: [M, KP], descending."""
    o_k = tl.arange(0, KP)
    b_last = tl.full([b_best.shape[0]], 2**63 - 1, dtype=tl.int64)
    b_result = tl.full(b_best.shape, _NOTHING, dtype=tl.int64)
    for k in range(kept):
        b_old = tl.max(tl.where(b_best < b_last[:, None], b_best, _NOTHING), 1)
        b_top = tl.max(tl.where(b_new < b_last[:, None], b_new, _NOTHING), 1)
        b_last = tl.maximum(b_old, b_top)
        b_result = tl.where((o_k == k)[None, :], b_last[:, None], b_result)
    return b_result


@triton.jit(do_not_specialize=["heads", "heads_per_kv", "n_tokens", "kept", "parent_width"])
def topk_fwd_kernel(  # type: ignore[no-untyped-def]
    query, key, parent_index, index, heads, heads_per_kv, n_tokens, kept, parent_width,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ROW_STEP: tl.constexpr, BLOCK_N: tl.constexpr, KP: tl.constexpr,
    COARSEST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROW_STEP query tokens, siblings unless COARSEST, against all tokens or the children of their parent's list."""
    row = tl.program_id(0) * ROW_STEP
    batch_head = tl.program_id(1).to(tl.int64)
    batch_kv = batch_head // heads * (heads // heads_per_kv) + batch_head % heads // heads_per_kv
    o_r = tl.arange(0, ROWS)
    o_m = row + o_r
    m_m = (o_m < n_tokens) & (o_r < ROW_STEP)
    q_base = query + batch_head * n_tokens * HEAD_DIM
    k_base = key + batch_kv * n_tokens * HEAD_DIM
    b_q = gather_rows(q_base, o_m, m_m, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
    if COARSEST:
        count = n_tokens
    else:
        count = parent_width * BLOCK
        list_start = parent_index + (batch_head * tl.cdiv(n_tokens, BLOCK) + row // BLOCK) * parent_width
    b_best = tl.full([ROWS, KP], _NOTHING, dtype=tl.int64)
    for start in range(0, count, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        if COARSEST:
            b_token = o_n
            m_n = o_n < n_tokens
        else:
            b_token, m_n = children(list_start, o_n, parent_width, n_tokens, BLOCK)
        b_k = gather_rows(k_base, b_token, m_n, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_best = _merge(b_best, _candidates(b_s, b_token, m_n), kept, KP)

    # Ascending ids, then -1: the padding is the largest int32 while sorting.
    b_id = 0x7FFFFFFF - (b_best & 0x7FFFFFFF).to(tl.int32)
    b_id = tl.sort(tl.where(b_best == _NOTHING, 0x7FFFFFFF, b_id), dim=1)
    b_id = tl.where(b_id == 0x7FFFFFFF, -1, b_id)
    o_k = tl.arange(0, KP)
    target = index + (batch_head * n_tokens + o_m)[:, None] * kept + o_k[None, :]
    tl.store(target, b_id, mask=m_m[:, None] & (o_k < kept)[None, :])
