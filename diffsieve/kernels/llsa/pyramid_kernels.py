"""Pooling in Triton: one or two levels of the pyramid in one read, means over raw tokens, sums in fp32.

Legend as in `access_kernels.py`. One program covers S * S tokens of its source level: S means of the next level and,
with TWO_LEVELS, the one mean of the level after.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "length"])
def pyramid_fwd_kernel(  # type: ignore[no-untyped-def]
    source, first, second, stride_b, stride_h, stride_l, stride_d, heads, length,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PARENTS: tl.constexpr, TWO_LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`source` has SPAN raw tokens under each token; PARENTS means at a time, a divisor of S."""
    tile = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    n_source = tl.cdiv(length, SPAN)
    n_first = tl.cdiv(length, SPAN * BLOCK)
    base = source + batch_head // heads * stride_b + batch_head % heads * stride_h
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    b_total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for step in range(BLOCK // PARENTS):
        o_first = tile * BLOCK + step * PARENTS + tl.arange(0, PARENTS)
        o_source = o_first[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [PARENTS, S]
        m_source = o_source < n_source
        pointers = base + o_source.to(tl.int64)[:, :, None] * stride_l + o_d.to(tl.int64)[None, None, :] * stride_d
        b_x = tl.load(pointers, mask=m_source[:, :, None] & m_d[None, None, :], other=0.0).to(tl.float32)
        # Raw tokens under each source token; padding has none.
        b_count = tl.where(m_source, tl.minimum(length - o_source * SPAN, SPAN), 0).to(tl.float32)
        b_sum = tl.sum(b_x * b_count[:, :, None], 1)  # [PARENTS, D]
        b_mean = b_sum / tl.maximum(tl.sum(b_count, 1), 1.0)[:, None]
        target = first + (batch_head * n_first + o_first.to(tl.int64))[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(target, b_mean.to(first.dtype.element_ty), mask=(o_first < n_first)[:, None] & m_d[None, :])
        b_total += tl.sum(b_sum, 0)
    if TWO_LEVELS:
        SPAN_2: tl.constexpr = SPAN * BLOCK * BLOCK
        count = tl.minimum(length - tile * SPAN_2, SPAN_2).to(tl.float32)
        target = second + (batch_head * tl.cdiv(length, SPAN_2) + tile) * HEAD_DIM + o_d
        tl.store(target, (b_total / count).to(second.dtype.element_ty), mask=m_d)
