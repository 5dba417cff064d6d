"""Hierarchical top-k in Triton: scores and selection in one kernel, nothing but the lists in global memory.

Score, mapped to an int32 of the same order, and token of a candidate are two words: a round finds the highest score of
each row, the lowest token that has it, and strikes that token out. Legend as in `access_kernels.py`; KP is the list
width padded to a power of two.
"""

import triton
import triton.language as tl

from .access_kernels import children, gather_rows

# Below the image of every score, and above every token.
_NOTHING = tl.constexpr(-(2**31))
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(b_s, m_n):  # type: ignore[no-untyped-def]
    """Scores [M, N] as int32 of the same order. NaN counts as +inf; masked columns [N] are below every score."""
    b_s = tl.where(b_s == b_s, b_s, float("inf")) + 0.0  # adding zero makes -0 equal to 0
    b_bits = b_s.to(tl.int32, bitcast=True)
    return tl.where(m_n[None, :], b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF), _NOTHING)


@triton.jit
def _best(b_score, b_token):  # type: ignore[no-untyped-def]
    """Highest score of each row [M, N] and the lowest token [M or 1, N] that has it: [M], [M]."""
    b_top = tl.max(b_score, 1)
    return b_top, tl.min(tl.where(b_score == b_top[:, None], b_token, _NO_TOKEN), 1)


@triton.jit(do_not_specialize=["heads", "heads_per_kv", "n_tokens", "kept", "parent_width"])
def topk_fwd_kernel(  # type: ignore[no-untyped-def]
    query, key, parent_index, index, heads, heads_per_kv, n_tokens, kept, parent_width,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ROW_STEP: tl.constexpr, BLOCK_N: tl.constexpr, KP: tl.constexpr,
    COARSEST: tl.constexpr, ONE_STEP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """ROW_STEP query tokens, siblings unless COARSEST, against all tokens or the children of their parent's list.

    ONE_STEP: there are at most BLOCK_N candidates.
    """
    row = tl.program_id(0) * ROW_STEP
    batch_head = tl.program_id(1).to(tl.int64)
    batch_kv = batch_head // heads * (heads // heads_per_kv) + batch_head % heads // heads_per_kv
    o_r = tl.arange(0, ROWS)
    o_k = tl.arange(0, KP)
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
    b_score = tl.full([ROWS, KP], _NOTHING, dtype=tl.int32)
    b_id = tl.full([ROWS, KP], _NO_TOKEN, dtype=tl.int32)
    for start in range(0, BLOCK_N if ONE_STEP else count, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        if COARSEST:
            b_token = o_n
            m_n = o_n < n_tokens
        else:
            b_token, m_n = children(list_start, o_n, parent_width, n_tokens, BLOCK)
        b_k = gather_rows(k_base, b_token, m_n, HEAD_DIM, 1, HEAD_DIM, BLOCK_D)
        b_new = _ordered(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), m_n)
        b_merged_score = tl.full([ROWS, KP], _NOTHING, dtype=tl.int32)
        b_merged = tl.full([ROWS, KP], _NO_TOKEN, dtype=tl.int32)
        for k in range(kept):
            b_top, b_pick = _best(b_new, b_token[None, :])
            if not ONE_STEP:
                b_old_top, b_old = _best(b_score, b_id)
                older = (b_old_top > b_top) | ((b_old_top == b_top) & (b_old < b_pick))
                b_top = tl.where(older, b_old_top, b_top)
                b_pick = tl.where(older, b_old, b_pick)
                b_score = tl.where(b_id == b_pick[:, None], _NOTHING, b_score)
                b_merged_score = tl.where((o_k == k)[None, :], b_top[:, None], b_merged_score)
            b_new = tl.where(b_token[None, :] == b_pick[:, None], _NOTHING, b_new)
            b_pick = tl.where(b_top == _NOTHING, _NO_TOKEN, b_pick)
            b_merged = tl.where((o_k == k)[None, :], b_pick[:, None], b_merged)
        b_score = b_merged_score
        b_id = b_merged

    b_id = tl.sort(b_id, dim=1)  # ascending, nothing last
    b_id = tl.where(b_id == _NO_TOKEN, -1, b_id)
    target = index + (batch_head * n_tokens + o_m)[:, None] * kept + o_k[None, :]
    tl.store(target, b_id, mask=m_m[:, None] & (o_k < kept)[None, :])
