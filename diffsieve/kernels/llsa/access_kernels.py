"""What the forward and backward kernels share: which tokens a query meets at each level, and with what weight.

Legend: S block size, M coarse levels, n_l tokens at level l, SPAN = S**l raw tokens under one token of level l,
D head dimension padded to a power of two. Token ids and list entries are int32; entries of -1 stand for nothing.
"""

import triton
import triton.language as tl


@triton.jit
def log2_weights(length, n_l, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Base-2 logarithms of the raw tokens under a token of a level, and under its last one: [1], [1].

    Computed once for a level: a logarithm per logit would cost more than the softmax.
    """
    b_whole = tl.log2(tl.full([1], SPAN, dtype=tl.float32))
    b_count = tl.full([1], 0, dtype=tl.int32) + (length - (n_l - 1) * SPAN)
    return b_whole, tl.log2(b_count.to(tl.float32))


@triton.jit
def bias_of(o_n, m_n, n_l, b_whole, b_last):  # type: ignore[no-untyped-def]
    """What is added to the base-2 logits of tokens `o_n` of a level, minus infinity where masked: like `o_n`."""
    return tl.where(m_n, tl.where(o_n == n_l - 1, b_last, b_whole), float("-inf"))


@triton.jit
def children(list_start, o_n, width, n_tokens, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tokens number `o_n` among the children of a list of blocks, and whether they exist: [N], [N]."""
    # Unsigned numbers: divisions become shifts, and one comparison finds negative entries as well.
    o_u = o_n.to(tl.uint32)
    o_c = o_u // BLOCK
    b_block = tl.load(list_start + o_c, mask=o_c < width, other=-1)
    b_token = b_block * BLOCK + (o_u % BLOCK).to(tl.int32)
    return b_token, (b_block.to(tl.uint32) < tl.cdiv(n_tokens, BLOCK)) & (b_token < n_tokens)


@triton.jit
def children_of_groups(  # type: ignore[no-untyped-def]
    lists, o_group, n_groups, o_n, width, n_tokens, BLOCK: tl.constexpr
):  # fmt: skip
    """`children` for the lists of several query groups at once: [UNITS, N], [UNITS, N]."""
    o_u = o_n.to(tl.uint32)
    o_c = o_u // BLOCK
    m_list = (o_group < n_groups)[:, None] & (o_c < width)[None, :]
    b_block = tl.load(lists + o_group[:, None] * width + o_c[None, :], mask=m_list, other=-1)
    b_token = b_block * BLOCK + (o_u % BLOCK).to(tl.int32)[None, :]
    return b_token, (b_block.to(tl.uint32) < tl.cdiv(n_tokens, BLOCK)) & (b_token < n_tokens)


@triton.jit
def gather_rows(  # type: ignore[no-untyped-def]
    base, b_token, m_n, stride_l, stride_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rows of one head, zero where masked: [N, D]."""
    o_d = tl.arange(0, BLOCK_D)
    pointers = base + b_token.to(tl.int64)[:, None] * stride_l + o_d.to(tl.int64)[None, :] * stride_d
    mask = m_n[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (o_d < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def gather_rows_of_groups(  # type: ignore[no-untyped-def]
    base, b_token, m_n, stride_l, stride_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """`gather_rows` for several query groups at once: [UNITS, N, D]."""
    o_d = tl.arange(0, BLOCK_D)
    pointers = base + b_token.to(tl.int64)[:, :, None] * stride_l + o_d.to(tl.int64)[None, None, :] * stride_d
    mask = m_n[:, :, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (o_d < HEAD_DIM)[None, None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(  # type: ignore[no-untyped-def]
    base, b_token, m_n, stride_l, stride_d, b_x, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Store [N, D] to rows of one head."""
    o_d = tl.arange(0, BLOCK_D)
    pointers = base + b_token.to(tl.int64)[:, None] * stride_l + o_d.to(tl.int64)[None, :] * stride_d
    mask = m_n[:, None] & (o_d < HEAD_DIM)[None, :]
    tl.store(pointers, b_x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def represented_below(index, width, o_m, m_m, o_n, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Disjoint mode: whether query row m selected token n of the level, so that its children stand for it: [M, N].

    `index` points to the lists of this level and head, one per SPAN raw queries.
    """
    own = index + (o_m // SPAN).to(tl.int64) * width
    drop = tl.full([o_m.shape[0], o_n.shape[0]], 0, dtype=tl.int1)
    for k in range(width):
        b_id = tl.load(own + k, mask=m_m, other=-1)
        drop = drop | (b_id[:, None] == o_n[None, :])
    return drop
