"""Block-sparse attention forward in Triton, for NVIDIA GPUs from sm_80 on.

Legend: BM queries per program, BN keys per step, D head dimension padded to a power of two. One program computes BM
rows of one query block: exact online softmax over the kept key blocks, in base 2, accumulated in fp32.

A weight is exp2(s * c - max * c), s a product of a query and a key and c the scale in base 2: one instruction, but the
second product is rounded, the first is not. From logits near 10^5 on the largest weight is off 1 by up to 0.003. That
cancels out of weights over their sum until rounding weights to 16 bits, for the product with the values, undoes it in
one of the two. So programs with a row maximum of 2^13 or more get a flag (below it the largest weight is rounded to 1,
see `hopper_kernel.py`), and a second launch computes them by exp2((s - max) * c), of which the largest is exactly 1.
fp32 rounds no weights; there the only launch subtracts first.

The lists are ascending, so the short block at the end of the keys can only be the last entry: the main loop needs no
mask on the logits. Entries out of range are clamped, and loads never pass the true lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..sizes import cdiv, next_power_of_2
from .descriptors import allows_descriptor, descriptor_strides
from .tiles import TileConfig, reads_shared, select_tile
from .tuned_tiles import tuned_tile

_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
_MAX_EXPONENT = tl.constexpr(2.0**13)


@triton.jit
def _load_rows(  # type: ignore[no-untyped-def]
    source, batch, head, row, length, stride_b, stride_h, stride_l, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, USE_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Rows `row` .. `row + ROWS - 1` of one head, zero beyond `length`: [ROWS, D]."""
    if USE_DESCRIPTOR:
        # The descriptor holds the true shape: the copy engine fills rows beyond it with zeros.
        return source.load([batch, head, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        o_l = row + tl.arange(0, ROWS)
        o_d = tl.arange(0, BLOCK_D)
        base = source + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        pointers = base + o_l.to(tl.int64)[:, None] * stride_l + o_d.to(tl.int64)[None, :] * stride_d
        mask = (o_l < length)[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (o_d < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _online_softmax_step(  # type: ignore[no-untyped-def]
    b_q, b_k, b_v, b_acc, b_max, b_sum, start, len_k, inner, outer,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add BN keys to the running output [BM, D], row maxima [BM] of products times `inner`, and row sums [BM]."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
    if MASKED:
        o_n = start + tl.arange(0, BLOCK_N)
        b_s = tl.where((o_n < len_k)[None, :], b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * inner)
    b_p = tl.exp2((b_s * inner - b_new[:, None]) * outer)
    b_alpha = tl.exp2((b_max - b_new) * outer)
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision=PRECISION)
    return b_acc, b_new, b_sum


# Lengths and list widths must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["heads_per_kv", "len_q", "len_k", "width"])
def block_sparse_fwd_kernel(  # type: ignore[no-untyped-def]
    query, key, value, out, lse, flags, block_index, block_count, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd,
    stride_ob, stride_oh, stride_ol, stride_od,
    heads_per_kv, len_q, len_k, width,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_COUNT: tl.constexpr, STORE_LSE: tl.constexpr, USE_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr, SUBTRACT_FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = head // heads_per_kv
    batch_head = batch.to(tl.int64) * tl.num_programs(1) + head
    list_row = batch_head * tl.cdiv(len_q, BLOCK_SIZE) + row // BLOCK_SIZE
    list_start = block_index + list_row * width
    if flags is not None:
        flags += batch_head * tl.num_programs(0) + tl.program_id(0)
        if SUBTRACT_FIRST:
            flagged = tl.load(flags)
            if flagged == 0:
                return
    if HAS_COUNT:
        kept = tl.minimum(tl.maximum(tl.load(block_count + list_row), 0), width)
    else:
        kept = width

    b_q = _load_rows(
        query, batch, head, row, len_q, stride_qb, stride_qh, stride_ql, stride_qd,
        BLOCK_M, HEAD_DIM, BLOCK_D, USE_DESCRIPTOR,
    )  # fmt: skip
    # A weight is exp2((s * inner - max) * outer): the scale goes before the maximum is subtracted, or after.
    inner = 1.0 if SUBTRACT_FIRST else scale_log2
    outer = scale_log2 if SUBTRACT_FIRST else 1.0
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    full_blocks = len_k // BLOCK_SIZE
    last = tl.load(list_start + kept - 1, mask=kept > 0, other=-1)
    tail = (last >= full_blocks).to(tl.int32)
    for step in tl.range(0, (kept - tail) * STEPS, num_stages=NUM_STAGES):
        block = tl.maximum(tl.load(list_start + step // STEPS), 0)
        start = tl.minimum(block, full_blocks) * BLOCK_SIZE + (step % STEPS) * BLOCK_N
        b_k = _load_rows(
            key, batch, kv_head, start, len_k, stride_kb, stride_kh, stride_kl, stride_kd,
            BLOCK_N, HEAD_DIM, BLOCK_D, USE_DESCRIPTOR,
        )  # fmt: skip
        b_v = _load_rows(
            value, batch, kv_head, start, len_k, stride_vb, stride_vh, stride_vl, stride_vd,
            BLOCK_N, HEAD_DIM, BLOCK_D, USE_DESCRIPTOR,
        )  # fmt: skip
        b_acc, b_max, b_sum = _online_softmax_step(
            b_q, b_k, b_v, b_acc, b_max, b_sum, start, len_k, inner, outer, BLOCK_N, False, PRECISION
        )
    for step in tl.range(0, tail * STEPS, num_stages=1):
        start = full_blocks * BLOCK_SIZE + step * BLOCK_N
        b_k = _load_rows(
            key, batch, kv_head, start, len_k, stride_kb, stride_kh, stride_kl, stride_kd,
            BLOCK_N, HEAD_DIM, BLOCK_D, USE_DESCRIPTOR,
        )  # fmt: skip
        b_v = _load_rows(
            value, batch, kv_head, start, len_k, stride_vb, stride_vh, stride_vl, stride_vd,
            BLOCK_N, HEAD_DIM, BLOCK_D, USE_DESCRIPTOR,
        )  # fmt: skip
        b_acc, b_max, b_sum = _online_softmax_step(
            b_q, b_k, b_v, b_acc, b_max, b_sum, start, len_k, inner, outer, BLOCK_N, True, PRECISION
        )

    if flags is not None and not SUBTRACT_FIRST:
        # NaN fails the comparison. Rows without any kept block have the sum 0, and no maximum.
        b_large = tl.where(b_sum == 0.0, 0, tl.where(tl.abs(b_max) < _MAX_EXPONENT, 0, 1))
        tl.store(flags, tl.max(b_large, 0))
    # A row without any kept block has sum 0: output 0, log-sum-exp -inf.
    b_acc = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    o_m = row + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    base = out + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    pointers = base + o_m.to(tl.int64)[:, None] * stride_ol + o_d.to(tl.int64)[None, :] * stride_od
    mask = (o_m < len_q)[:, None] & (o_d < HEAD_DIM)[None, :]
    tl.store(pointers, b_acc.to(out.dtype.element_ty), mask=mask)
    if STORE_LSE:
        b_lse = tl.where(b_sum == 0.0, float("-inf"), (b_max * outer + tl.log2(b_sum)) * _LN_2)
        tl.store(lse + batch_head * len_q + o_m, b_lse, mask=o_m < len_q)


def is_interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1, so that the kernel runs on CPU tensors."""
    return isinstance(block_sparse_fwd_kernel, InterpretedFunction)


def block_sparse_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    *,
    block_size: int,
    scale: float,
    return_lse: bool,
    tile: TileConfig | None = None,
    use_descriptors: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Same meaning as `reference.block_sparse_attention_reference`; the log-sum-exp is None unless asked for.

    Args:
        tile: overrides those that were tuned for this GPU (`tuned_tiles`) and the table of `tiles.py`.
        use_descriptors: tensor descriptors (TMA) or plain pointers; by default descriptors where the strides allow
            them and the tensor cores read shared memory. On others (sm_120) they would keep the queries in registers.
    """
    batch, heads, len_q, dim = query.shape
    kv_heads, len_k = key.shape[1:3]
    padded_dim = max(16, next_power_of_2(dim))
    # The interpreter has no capability of its own: it runs the tiles of Hopper.
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (9, 0)
    if tile is None and query.is_cuda:
        tile = tuned_tile(query.device, triton.__version__, padded_dim, block_size, query.dtype)
    if tile is None:
        tile = select_tile(capability, padded_dim, block_size, query.element_size())
    if use_descriptors is None:
        use_descriptors = reads_shared(capability) and all(allows_descriptor(x) for x in (query, key, value))

    out = torch.empty_like(query)
    lse = query.new_empty((batch, heads, len_q), dtype=torch.float32) if return_lse else None
    block_index = block_index.contiguous()
    block_count = None if block_count is None else block_count.contiguous()
    sources: list[Tensor | TensorDescriptor] = [query, key, value]
    if use_descriptors:
        sources = [
            _descriptor(query, tile.block_m),
            _descriptor(key, tile.block_n),
            _descriptor(value, tile.block_n),
        ]
    grid = (cdiv(len_q, tile.block_m), heads, batch)
    second_launch = query.element_size() == 2
    flags = query.new_empty((batch, heads, grid[0]), dtype=torch.int32) if second_launch else None
    with torch.cuda.device_of(query):
        for subtract_first in (False, True) if second_launch else (True,):
            block_sparse_fwd_kernel[grid](
                *sources, out, lse, flags, block_index, block_count, scale * _LOG2_E,
                *query.stride(), *key.stride(), *value.stride(), *out.stride(),
                heads // kv_heads, len_q, len_k, block_index.shape[-1],
                BLOCK_SIZE=block_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
                HEAD_DIM=dim, BLOCK_D=padded_dim,
                HAS_COUNT=block_count is not None, STORE_LSE=return_lse, USE_DESCRIPTOR=use_descriptors,
                PRECISION="ieee", NUM_STAGES=tile.num_stages, SUBTRACT_FIRST=subtract_first,
                num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
    return out, lse


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), descriptor_strides(x), [1, 1, rows, x.shape[3]])
