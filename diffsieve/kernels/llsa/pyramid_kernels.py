"""Pooling in Triton: one or two levels of the pyramids of several tensors in one read, sums in fp32.

Legend as in `access_kernels.py`. One program covers S * S tokens of the source level of one head: S means of the next
level and, with TWO_LEVELS, the one mean of the level after.
"""

import triton
import triton.language as tl


@triton.jit
def _weighted(  # type: ignore[no-untyped-def]
    base, o_source, o_d, stride_l, stride_d, length, SPAN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Source tokens times the raw tokens under each, zero beyond the length: [PARENTS, D] in fp32."""
    pointers = base + o_source.to(tl.int64)[:, None] * stride_l + o_d.to(tl.int64)[None, :] * stride_d
    mask = (o_source < tl.cdiv(length, SPAN))[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (o_d < HEAD_DIM)[None, :]
    b_x = tl.load(pointers, mask=mask, other=0.0)
    if SPAN == 1:
        return b_x.to(tl.float32)
    b_count = tl.maximum(tl.minimum(length - o_source * SPAN, SPAN), 0)
    return b_x.to(tl.float32) * b_count.to(tl.float32)[:, None]


@triton.jit
def _pool(  # type: ignore[no-untyped-def]
    source, first, second, stride_b, stride_h, stride_l, stride_d, tile, batch_head, heads, length,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PARENTS: tl.constexpr, TWO_LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """PARENTS means at a time. A thread adds up the tokens of its own means: no exchange, eight loads in flight."""
    n_first = tl.cdiv(length, SPAN * BLOCK)
    base = source + batch_head // heads * stride_b + batch_head % heads * stride_h
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < HEAD_DIM)[None, :]
    b_total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for step in range(BLOCK // PARENTS):
        o_first = tile * BLOCK + step * PARENTS + tl.arange(0, PARENTS)
        b_sum = tl.zeros([PARENTS, BLOCK_D], dtype=tl.float32)
        for sixteen in range(0, BLOCK, 16):
            for eight in tl.static_range(0, min(BLOCK, 16), 8):
                o_source = o_first * BLOCK + sixteen + eight
                b_0 = _weighted(base, o_source, o_d, stride_l, stride_d, length, SPAN, HEAD_DIM, BLOCK_D)
                b_1 = _weighted(base, o_source + 1, o_d, stride_l, stride_d, length, SPAN, HEAD_DIM, BLOCK_D)
                b_2 = _weighted(base, o_source + 2, o_d, stride_l, stride_d, length, SPAN, HEAD_DIM, BLOCK_D)
                b_3 = _weighted(base, o_source + 3, o_d, stride_l, stride_d, length, SPAN, HEAD_DIM, BLOCK_D)
                b_4 = _weighted(base, o_source + 4, o_d, stride_l, stride_d, length, SPAN, HEAD_DIM, BLOCK_D)
                b_5 = _weighted(base, o_source + 5, o_d, stride_l, stride_d, length, SPAN, HEAD_DIM, BLOCK_D)
                b_6 = _weighted(base, o_source + 6, o_d, stride_l, stride_d, length, SPAN, HEAD_DIM, BLOCK_D)
                b_7 = _weighted(base, o_source + 7, o_d, stride_l, stride_d, length, SPAN, HEAD_DIM, BLOCK_D)
                b_sum += ((b_0 + b_1) + (b_2 + b_3)) + ((b_4 + b_5) + (b_6 + b_7))
        b_count = tl.maximum(tl.minimum(length - o_first * (SPAN * BLOCK), SPAN * BLOCK), 1)
        target = first + (batch_head * n_first + o_first.to(tl.int64))[:, None] * HEAD_DIM + o_d[None, :]
        b_mean = b_sum / b_count.to(tl.float32)[:, None]
        tl.store(target, b_mean.to(first.dtype.element_ty), mask=(o_first < n_first)[:, None] & m_d)
        b_total += tl.sum(b_sum, 0)
    if TWO_LEVELS:
        SPAN_2: tl.constexpr = SPAN * BLOCK * BLOCK
        count = tl.minimum(length - tile * SPAN_2, SPAN_2).to(tl.float32)
        target = second + (batch_head * tl.cdiv(length, SPAN_2) + tile) * HEAD_DIM + o_d
        tl.store(target, (b_total / count).to(second.dtype.element_ty), mask=o_d < HEAD_DIM)


@triton.jit(do_not_specialize=["length"])
def pyramid_fwd_kernel(  # type: ignore[no-untyped-def]
    sources, firsts, seconds, strides, heads, batch_heads, length,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PARENTS: tl.constexpr, TWO_LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tensor number program_id(2); tuples with one entry per tensor, `strides` with four. SPAN raw tokens per source
    token."""
    tile = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(len(sources)):
        if (tl.program_id(2) == i) & (batch_head < batch_heads[i]):
            _pool(
                sources[i], firsts[i], seconds[i], strides[4 * i], strides[4 * i + 1], strides[4 * i + 2],
                strides[4 * i + 3], tile, batch_head, heads[i], length,
                BLOCK, SPAN, PARENTS, TWO_LEVELS, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
