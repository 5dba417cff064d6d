"""The transpose of nested lists in Triton: for each key the queries that keep it, in one launch per level.

Legend as in `access_kernels.py`; level r holds n_r tokens, each with a list of the tokens of its level that it keeps.
Lists are nested: what a token keeps are children of what its parent keeps. So the queries of a key are among the
children of the queries of the key's parent, and only those lists are searched.
"""

import triton
import triton.language as tl


@triton.jit
def _members(  # type: ignore[no-untyped-def]
    index, parents, n_items, start, n_r, width, first_key,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COARSEST: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Number ROWS of the queries looked through, from `start` on, and which of S keys they keep: [ROWS], [ROWS, S]."""
    o_u = (start + tl.arange(0, ROWS)).to(tl.uint32)
    if COARSEST:
        b_row = o_u.to(tl.int32)
        m_row = b_row < n_items
    else:
        b_parent = tl.load(parents + o_u // BLOCK, mask=o_u // BLOCK < n_items, other=0)
        b_head = 0
        if GROUPED:
            n_parents = tl.cdiv(n_r, BLOCK)
            b_head = b_parent // n_parents
            b_parent = b_parent % n_parents
        b_token = b_parent * BLOCK + (o_u % BLOCK).to(tl.int32)
        m_row = (o_u // BLOCK < n_items) & (b_token < n_r)
        b_row = b_head * n_r + b_token
    o_s = tl.arange(0, BLOCK)
    b_member = tl.full([ROWS, BLOCK], 0, dtype=tl.int1)
    for k in range(width):
        b_id = tl.load(index + b_row.to(tl.int64) * width + k, mask=m_row, other=-1)
        b_member = b_member | ((b_id - first_key)[:, None] == o_s[None, :])
    return b_row, b_member & (first_key + o_s < n_r)[None, :]


@triton.jit(do_not_specialize=["n_r", "width", "group", "parent_room", "room", "n_slots", "cap"])
def transpose_nested_kernel(  # type: ignore[no-untyped-def]
    index, parent_begins, parent_counts, parent_queries, begins, counts, queries, slot_firsts, slot_blocks, used,
    n_r, width, group, parent_room, room, n_slots, cap,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COARSEST: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """The S keys under one key of the level above, of one key head; at the COARSEST level, any S keys.

    A first pass counts, a second one writes: under each key its queries come in the order of the parent's list, which
    is ascending. Where the lists stand in `queries`, and which slots the long ones get, depends on which program comes
    first; what is in them does not. A query is its head in the group times n_r, plus the token.
    """
    parent = tl.program_id(0)
    batch_kv = tl.program_id(1).to(tl.int64)
    first_key = parent * BLOCK
    o_s = tl.arange(0, BLOCK)
    m_s = first_key + o_s < n_r
    index += batch_kv * group * n_r * width
    if COARSEST:
        parents = index
        n_items = group * n_r
        n_rows = n_items
    else:
        o_parent = batch_kv * tl.cdiv(n_r, BLOCK) + parent
        parents = parent_queries + batch_kv * parent_room + tl.load(parent_begins + o_parent)
        n_items = tl.load(parent_counts + o_parent)
        n_rows = n_items * BLOCK

    b_count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, n_rows, ROWS):
        b_row, b_member = _members(
            index, parents, n_items, start, n_r, width, first_key, BLOCK, ROWS, COARSEST, GROUPED
        )  # fmt: skip
        b_count += tl.sum(b_member.to(tl.int32), 0)
    b_parts = tl.where(b_count > cap, tl.cdiv(b_count, cap), 0)
    begin = tl.atomic_add(used + batch_kv * 2, tl.sum(b_count, 0))
    slot = tl.atomic_add(used + batch_kv * 2 + 1, tl.sum(b_parts, 0))
    b_begin = begin + tl.cumsum(b_count, 0) - b_count
    b_slot = slot + tl.cumsum(b_parts, 0) - b_parts
    o_key = batch_kv * n_r + first_key + o_s
    tl.store(begins + o_key, b_begin, mask=m_s)
    tl.store(counts + o_key, b_count, mask=m_s)
    tl.store(slot_firsts + o_key, b_slot, mask=m_s)
    for part in range(tl.max(b_parts, 0)):
        tl.store(slot_blocks + batch_kv * n_slots + b_slot + part, first_key + o_s, mask=part < b_parts)

    for start in range(0, n_rows, ROWS):
        b_row, b_member = _members(
            index, parents, n_items, start, n_r, width, first_key, BLOCK, ROWS, COARSEST, GROUPED
        )  # fmt: skip
        b_rank = tl.cumsum(b_member.to(tl.int32), 0)
        target = queries + batch_kv * room + (b_begin[None, :] + b_rank - 1)
        tl.store(target, tl.broadcast_to(b_row[:, None], [ROWS, BLOCK]), mask=b_member)
        b_begin += tl.sum(b_member.to(tl.int32), 0)
