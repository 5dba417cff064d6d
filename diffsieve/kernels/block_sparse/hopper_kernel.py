"""Block-sparse attention forward for Hopper GPUs, in Gluon: copies by TMA, products by wgmma, warps with fixed roles.

Legend: BN keys per step, D head dimension, a tile is 64 rows of queries. One program computes CONSUMERS tiles of one
query block. Roles: one warp (the producer) copies keys and values into rings of STAGES slots in shared memory; each
tile has a warpgroup of its own (a consumer), which multiplies and keeps the exact online softmax, in base 2.

Steps run through the list from its end: the short block at the end of the keys can only be the last entry, so only
the first step that is computed needs a mask on its logits.

Barriers. Every ring slot has a pair: "full" (one arrival, by the producer, plus the bytes of the copy) and "empty"
(one arrival per consumer). Use number t of a ring takes slot t % STAGES as its (t // STAGES)-th use of it, and a
barrier's phase is the parity of that number:

    producer, use t:  wait empty[slot] for phase (t // STAGES) & 1 ^ 1;  expect the bytes on full[slot];  copy
    consumer, use t:  wait full[slot] for phase (t // STAGES) & 1;  product;  its end;  arrive on empty[slot]

- A new barrier counts as having completed the phase of parity 1, so the first use of each slot does not wait.
- Both sides are never a whole round apart: the producer cannot pass use t before all consumers have ended use
  t - STAGES, and no consumer can pass it before the copy. So one bit of parity tells phases apart.
- Producer and consumers compute the same number of steps from the same values: every copy is waited for by every
  consumer, so none is in flight when the program ends, and no wait lacks its arrival. The arrivals of the last uses
  have no wait; that of the last values is left out.
- No cycle: step t of a consumer waits for keys t, then for values t - 1, releases keys t, then values t - 1. The
  producer issues in the same order: keys 0, keys 1, values 0, keys 2, values 1, ... Use t of either ring waits for the
  end of use t - STAGES, and whatever that end waits for was issued before use t. So even STAGES = 1 ends.
- Zero steps (an empty list): the producer copies the queries alone, the consumers wait for these and write zeros. One
  step: the loop of the consumer is not entered.
- An arrival is made by one thread, after a barrier over its warpgroup that the compiler sets before it: all warps have
  ended their part of the product then.

FIXED_STABILISER keeps the row maxima of the first step for good, in bf16 only: nothing is rescaled, the true maximum is
no smaller, so no row sum falls below 1. Where later logits lie so far above that a sum leaves its range, the tile gets
a flag, and a second launch with ONLY_FLAGGED computes the programs of such tiles with the maximum of all keys.

Large logits get the flag too. With s a product of a query and a key and c the scale in base 2, a weight is
exp2(fma(s, c, -m)), m = round(max * c): one instruction, but m is rounded and the product is not. All weights of a row
have the same factor 2^r for it, |r| <= ulp(m) / 2. It cancels out of the sum of weights times values over the sum of
weights, as long as weights are not rounded; for the product with the values they are, to DTYPE, and the sum is not.
Where one key takes all of the weight the result is then off by round(2^r) / 2^r - 1, about 0.002 in bf16 for m near
10^5, which the weight 1 would not be. How large may m be?

- Below |m| = 2^13, |r| <= 2^-12 and |2^r - 1| < 1.7e-4. That is less than half the spacing of bf16 (2^-9) and of
  fp16 (2^-12) on either side of 1: the weight is rounded to 1. The quotient is the value times 1 -+ 1.7e-4, and since
  a value is a number of DTYPE, rounding gives it back: no error. In other rows up to 1.7e-4, 1e-4 in the mean square,
  joins the roundings of weights and output, which are larger.
- Else the second launch takes exp2((s - max) * c), two instructions. The largest weight is exactly 1, of however many
  keys; s - max is exact for s within a factor of 2 of max, so weights are as good as the products s themselves.

FIXED_STABILISER without a flag has no largest weight of 1 in any case: that is 2^x, 0 <= x < 100. Rounding it costs a
row of one key up to 2^-8 in bf16, and in the mean square over the fractions of x 0.0015 (with the output rounded after
it), less than the 2^-9 (0.00195) for rounding in the bound of all checks (`testing.error_bound`).
"""

# Gluon's own types stand in no signature: tensors, scalars and shared memory are told apart by name.
# b_* lives in registers, *_smem in shared memory, *_full and *_empty are barriers.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILE_ROWS = 64

_ROWS = gl.constexpr(TILE_ROWS)
_LN_2 = gl.constexpr(0.6931471805599453)
_MAX_SUM = gl.constexpr(2.0**100)
_MAX_EXPONENT = gl.constexpr(2.0**13)
# Registers per thread of the roles, as multiples of 8: 2 x 240 + 24 fit in what three warpgroups get (504).
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    query, key, value, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
    list_start, last, last_block, steps, batch, head, kv_head, row,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Copy the queries of all tiles, then keys and values step by step, the last entry of the list first."""
    mbarrier.expect(q_full, CONSUMERS * query.block_type.nbytes)
    for tile in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(query, [batch, head, row + tile * _ROWS, 0], q_full, q_smem.index(tile))
    STEPS: gl.constexpr = BLOCK_SIZE // BLOCK_N
    if steps > 0:
        start = last * BLOCK_SIZE + ((steps - 1) % STEPS) * BLOCK_N
        _copy(key, k_smem, k_full, k_empty, 0, batch, kv_head, start, STAGES)
        block = _entry(list_start, steps - 2, last_block, STEPS)
        for t in range(1, steps):
            step = steps - 1 - t
            before = start
            start = block * BLOCK_SIZE + (step % STEPS) * BLOCK_N
            # The entry of the next step is under way while this one waits for its slots.
            block = _entry(list_start, step - 1, last_block, STEPS)
            _copy(key, k_smem, k_full, k_empty, t, batch, kv_head, start, STAGES)
            _copy(value, v_smem, v_full, v_empty, t - 1, batch, kv_head, before, STAGES)
        _copy(value, v_smem, v_full, v_empty, steps - 1, batch, kv_head, start, STAGES)


@gluon.jit
def _entry(list_start, step, last_block, STEPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The key block of a step, in range; that of step 0 before it."""
    block = gl.load(list_start + gl.maximum(step, 0) // STEPS)
    return gl.minimum(gl.maximum(block, 0), last_block)


@gluon.jit
def _copy(source, smem, full, empty, t, batch, head, start, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Use t of a ring: BN rows of keys or values from `start`, once the slot is free."""
    slot = t % STAGES
    mbarrier.wait(empty.index(slot), ((t // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [batch, head, start, 0], full.index(slot), smem.index(slot))


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    out, lse, flags, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
    steps, first_keys, batch, head, batch_head, row, len_q, scale_log2,
    TILE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    QUERY_IN_REGISTERS: gl.constexpr, STORE_LSE: gl.constexpr, FIXED_STABILISER: gl.constexpr,
    ONLY_FLAGGED: gl.constexpr,
):  # fmt: skip
    """One tile of 64 queries: the product with the next keys runs beside that with the values of the step before."""
    DTYPE: gl.constexpr = q_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    # A weight is exp2((s * inner - max) * outer): the scale goes before the maximum is subtracted, or after.
    inner = 1.0 if ONLY_FLAGGED else scale_log2
    outer = scale_log2 if ONLY_FLAGGED else 1.0
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)

    b_max = gl.full([_ROWS], float("-inf"), gl.float32, S_ROWS)
    b_sum = gl.full([_ROWS], 0.0, gl.float32, S_ROWS)
    b_acc = gl.full([_ROWS, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
    b_zero = gl.full([_ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    q_tile = q_smem.index(TILE).reshape([_ROWS, HEAD_DIM])
    mbarrier.wait(q_full, 0)
    if QUERY_IN_REGISTERS:
        b_q = q_tile.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    else:
        b_q = q_tile

    if steps > 0:
        mbarrier.wait(k_full.index(0), 0)
        k_tile = k_smem.index(0).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
        b_s = warpgroup_mma(b_q, k_tile, b_zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        mbarrier.arrive(k_empty.index(0), count=1)
        # At least one key of this step exists, so every row has a finite maximum from here on.
        o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        b_s = gl.where((o_n < first_keys)[None, :], b_s, float("-inf"))
        b_max = gl.max(b_s, 1) * inner
        b_p = gl.exp2((b_s * inner - b_max[:, None]) * outer)
        # A thread holds columns 8 apart: sums over these stay inside it, the 8 that are left are added up at the end.
        b_part = gl.sum(b_p.reshape([_ROWS, BLOCK_N // 8, 8]), 1)
        PART_ROWS: gl.constexpr = gl.SliceLayout(1, b_part.type.layout)
        b_w = gl.convert_layout(b_p.to(DTYPE), P_LAYOUT)
        for t in range(1, steps):
            slot = t % STAGES
            mbarrier.wait(k_full.index(slot), (t // STAGES) & 1)
            k_tile = k_smem.index(slot).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
            b_s = warpgroup_mma(b_q, k_tile, b_zero, use_acc=False, is_async=True)
            before = (t - 1) % STAGES
            mbarrier.wait(v_full.index(before), ((t - 1) // STAGES) & 1)
            v_tile = v_smem.index(before).reshape([BLOCK_N, HEAD_DIM])
            b_acc = warpgroup_mma(b_w, v_tile, b_acc, is_async=True)
            # Products end in the order of their issue: with one left, the logits are there.
            b_s = warpgroup_mma_wait(1, deps=[b_s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            b_new = b_max
            if not FIXED_STABILISER:
                b_new = gl.maximum(b_max, gl.max(b_s, 1) * inner)
                b_alpha = gl.exp2((b_max - b_new) * outer)
                b_part = b_part * gl.convert_layout(b_alpha, PART_ROWS)[:, None]
            b_p = gl.exp2((b_s * inner - b_new[:, None]) * outer)
            b_part += gl.sum(b_p.reshape([_ROWS, BLOCK_N // 8, 8]), 1)
            b_max = b_new
            b_acc = warpgroup_mma_wait(0, deps=[b_acc])
            mbarrier.arrive(v_empty.index(before), count=1)
            if not FIXED_STABILISER:
                b_acc = b_acc * gl.convert_layout(b_alpha, O_ROWS)[:, None]
            b_w = gl.convert_layout(b_p.to(DTYPE), P_LAYOUT)
        final = steps - 1
        mbarrier.wait(v_full.index(final % STAGES), (final // STAGES) & 1)
        v_tile = v_smem.index(final % STAGES).reshape([BLOCK_N, HEAD_DIM])
        b_acc = warpgroup_mma(b_w, v_tile, b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        b_sum = gl.convert_layout(gl.sum(b_part, 1), S_ROWS)

    if not ONLY_FLAGGED:
        # NaN fails all comparisons. Rows without any kept block have the sum 0, and no maximum.
        b_bad = gl.where(b_sum == 0.0, 0, gl.where(gl.abs(b_max) < _MAX_EXPONENT, 0, 1))
        if FIXED_STABILISER:
            # Sums below 2^100 leave room for their reciprocals and for products with values.
            b_bad = gl.maximum(b_bad, gl.where(b_sum < _MAX_SUM, 0, 1))
            b_bad_acc = gl.max(gl.where(gl.abs(b_acc) < float("inf"), 0, 1), 1)
            b_bad = gl.maximum(b_bad, gl.convert_layout(b_bad_acc, S_ROWS))
        gl.store(flags + TILE, gl.max(b_bad, 0))
    # A row without any kept block has sum 0: output 0, log-sum-exp -inf.
    b_scale = 1.0 / gl.where(b_sum == 0.0, 1.0, b_sum)
    b_acc = b_acc * gl.convert_layout(b_scale, O_ROWS)[:, None]
    # The tile of queries is read by its own consumer alone, and was read for the last time: the output leaves from
    # there. The copy cuts off rows past the end of the queries.
    q_tile.store(b_acc.to(DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [batch, head, row + TILE * _ROWS, 0], q_smem.index(TILE))
    if STORE_LSE:
        o_m = row + TILE * _ROWS + gl.arange(0, _ROWS, S_ROWS)
        b_lse = gl.where(b_sum == 0.0, float("-inf"), (b_max * outer + gl.log2(b_sum)) * _LN_2)
        gl.store(lse + batch_head * len_q + o_m, b_lse, mask=o_m < len_q)
    tma.store_wait(0)


# Lengths and list widths must not cause a new compilation, whatever they are multiples of.
@gluon.jit(do_not_specialize=["heads_per_kv", "len_q", "len_k", "width", "list_stride"])
def block_sparse_fwd_hopper_kernel(  # type: ignore[no-untyped-def]
    query, key, value, out, lse, flags, block_index, block_count, scale_log2,
    heads_per_kv, len_q, len_k, width, list_stride,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, QUERY_IN_REGISTERS: gl.constexpr, HAS_COUNT: gl.constexpr, STORE_LSE: gl.constexpr,
    FIXED_STABILISER: gl.constexpr, ONLY_FLAGGED: gl.constexpr,
):  # fmt: skip
    """`query`, `key`, `value`, `out` are descriptors of (B, H, L, D) with blocks [1, 1, rows, D]; `row // 64` tiles.

    Lists hold `width` entries and start `list_stride` apart; 0: all query blocks share one.
    """
    row = gl.program_id(0) * (CONSUMERS * _ROWS)
    head = gl.program_id(1)
    batch = gl.program_id(2)
    kv_head = head // heads_per_kv
    batch_head = batch.to(gl.int64) * gl.num_programs(1) + head
    flags += (batch_head * gl.num_programs(0) + gl.program_id(0)) * CONSUMERS
    if ONLY_FLAGGED:  # one flag for each tile
        flagged = gl.load(flags)
        if CONSUMERS == 2:
            flagged += gl.load(flags + 1)
        if flagged == 0:
            return
    list_row = batch_head * gl.cdiv(len_q, BLOCK_SIZE) + row // BLOCK_SIZE
    list_start = block_index + list_row * list_stride
    if HAS_COUNT:
        kept = gl.minimum(gl.maximum(gl.load(block_count + list_row), 0), width)
    else:
        kept = width
    # Entries out of range are clamped. Of the last block only steps that hold a key are computed.
    STEPS: gl.constexpr = BLOCK_SIZE // BLOCK_N
    last_block = gl.cdiv(len_k, BLOCK_SIZE) - 1
    last = gl.load(list_start + gl.maximum(kept - 1, 0))
    last = gl.minimum(gl.maximum(last, 0), last_block)
    last_keys = len_k - last * BLOCK_SIZE
    last_steps = gl.minimum(gl.cdiv(last_keys, BLOCK_N), STEPS)
    steps = gl.where(kept > 0, (kept - 1) * STEPS + last_steps, 0)
    first_keys = last_keys - (last_steps - 1) * BLOCK_N

    q_smem = gl.allocate_shared_memory(query.dtype, [CONSUMERS, 1, 1, _ROWS, HEAD_DIM], query.layout)
    k_smem = gl.allocate_shared_memory(key.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], key.layout)
    v_smem = gl.allocate_shared_memory(value.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], value.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=CONSUMERS)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=CONSUMERS)
    # The copies must see the new barriers; the roles start after a barrier over the whole program.
    fence_async_shared()

    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    out, lse, flags, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                    steps, first_keys, batch, head, batch_head, row, len_q, scale_log2,
                    0, HEAD_DIM, BLOCK_N, STAGES, QUERY_IN_REGISTERS, STORE_LSE, FIXED_STABILISER, ONLY_FLAGGED,
                )),
                (_consume, (
                    out, lse, flags, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                    steps, first_keys, batch, head, batch_head, row, len_q, scale_log2,
                    1, HEAD_DIM, BLOCK_N, STAGES, QUERY_IN_REGISTERS, STORE_LSE, FIXED_STABILISER, ONLY_FLAGGED,
                )),
                (_produce, (
                    query, key, value, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                    list_start, last, last_block, steps, batch, head, kv_head, row,
                    BLOCK_SIZE, BLOCK_N, STAGES, CONSUMERS,
                )),
            ],
            [4, 1],
            [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out, lse, flags, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                    steps, first_keys, batch, head, batch_head, row, len_q, scale_log2,
                    0, HEAD_DIM, BLOCK_N, STAGES, QUERY_IN_REGISTERS, STORE_LSE, FIXED_STABILISER, ONLY_FLAGGED,
                )),
                (_produce, (
                    query, key, value, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
                    list_start, last, last_block, steps, batch, head, kv_head, row,
                    BLOCK_SIZE, BLOCK_N, STAGES, CONSUMERS,
                )),
            ],
            [1],
            [_PRODUCER_REGISTERS],
        )  # fmt: skip
