"""Block-sparse attention backward in Triton: query-major for the queries, key-major for keys and values.

Legend: BM queries and BN keys per step, D head dimension padded to a power of two; P softmax weights, dS gradient of
the logits, delta the row sums of P dP. The key-major kernel walks, for each key block, the query blocks that keep it.
No atomics: each sum has one fixed order, so two runs are bitwise equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sizes import cdiv, next_power_of_2
from .tiles import BackwardTile, select_backward_tile
from .triton_backend import _load_rows, block_sparse_attention_triton

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _store_rows(  # type: ignore[no-untyped-def]
    target, batch, head, row, length, stride_b, stride_h, stride_l, stride_d, b_x,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    o_l = row + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    base = target + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    pointers = base + o_l.to(tl.int64)[:, None] * stride_l + o_d.to(tl.int64)[None, :] * stride_d
    tl.store(pointers, b_x.to(target.dtype.element_ty), mask=(o_l < length)[:, None] & (o_d < HEAD_DIM)[None, :])


@triton.jit
def _load_lse(lse, o_m, length):  # type: ignore[no-untyped-def]
    """Base-2 log-sum-exp; +inf for padding and for rows without keys, so that their weights come out as 0."""
    b_lse = tl.load(lse + o_m, mask=o_m < length, other=float("inf")) * _LOG2_E
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit(do_not_specialize=["heads_per_kv", "len_q", "len_k", "width"])
def block_sparse_bwd_dq_kernel(  # type: ignore[no-untyped-def]
    query, key, value, out, grad_out, lse, grad_lse, grad_query, delta, block_index, block_count, scale, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd,
    stride_ob, stride_oh, stride_ol, stride_od,
    stride_gb, stride_gh, stride_gl, stride_gd,
    stride_xb, stride_xh, stride_xl, stride_xd,
    heads_per_kv, len_q, len_k, width,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_COUNT: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Strides g are those of `grad_out`, x those of `grad_query`. Also writes delta for the key-major kernel."""
    row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = head // heads_per_kv
    batch_head = batch.to(tl.int64) * tl.num_programs(1) + head
    list_row = batch_head * tl.cdiv(len_q, BLOCK_SIZE) + row // BLOCK_SIZE
    list_start = block_index + list_row * width
    if HAS_COUNT:
        kept = tl.minimum(tl.maximum(tl.load(block_count + list_row), 0), width)
    else:
        kept = width
    b_q = _load_rows(
        query, batch, head, row, len_q, stride_qb, stride_qh, stride_ql, stride_qd, BLOCK_M, HEAD_DIM, BLOCK_D, False
    )  # fmt: skip
    b_o = _load_rows(
        out, batch, head, row, len_q, stride_ob, stride_oh, stride_ol, stride_od, BLOCK_M, HEAD_DIM, BLOCK_D, False
    )  # fmt: skip
    b_do = _load_rows(
        grad_out, batch, head, row, len_q, stride_gb, stride_gh, stride_gl, stride_gd,
        BLOCK_M, HEAD_DIM, BLOCK_D, False,
    )  # fmt: skip
    o_m = row + tl.arange(0, BLOCK_M)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        b_delta -= tl.load(grad_lse + batch_head * len_q + o_m, mask=o_m < len_q, other=0.0)
    tl.store(delta + batch_head * len_q + o_m, b_delta, mask=o_m < len_q)
    b_lse = _load_lse(lse + batch_head * len_q, o_m, len_q)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    last_block = tl.cdiv(len_k, BLOCK_SIZE) - 1
    for step in tl.range(0, kept * STEPS, num_stages=NUM_STAGES):
        block = tl.minimum(tl.maximum(tl.load(list_start + step // STEPS), 0), last_block)
        start = block * BLOCK_SIZE + (step % STEPS) * BLOCK_N
        b_k = _load_rows(
            key, batch, kv_head, start, len_k, stride_kb, stride_kh, stride_kl, stride_kd,
            BLOCK_N, HEAD_DIM, BLOCK_D, False,
        )  # fmt: skip
        b_v = _load_rows(
            value, batch, kv_head, start, len_k, stride_vb, stride_vh, stride_vl, stride_vd,
            BLOCK_N, HEAD_DIM, BLOCK_D, False,
        )  # fmt: skip
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BN]
        b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        # Keys beyond the length are rows of zeros: whatever their weight, they add nothing to the product below.
        b_ds = b_p * (b_dp - b_delta[:, None])
        o_n = start + tl.arange(0, BLOCK_N)
        b_ds = tl.where((o_n < len_k)[None, :], b_ds, 0.0)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    _store_rows(
        grad_query, batch, head, row, len_q, stride_xb, stride_xh, stride_xl, stride_xd, b_dq * scale,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "heads_per_kv", "len_q", "len_k", "entries"])
def block_sparse_bwd_dkdv_kernel(  # type: ignore[no-untyped-def]
    query, key, value, grad_out, lse, delta, grad_key, grad_value, offsets, queries, scale, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd,
    stride_kb, stride_kh, stride_kl, stride_kd,
    stride_vb, stride_vh, stride_vl, stride_vd,
    stride_gb, stride_gh, stride_gl, stride_gd,
    stride_xb, stride_xh, stride_xl, stride_xd,
    stride_yb, stride_yh, stride_yl, stride_yd,
    heads, heads_per_kv, len_q, len_k, entries,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Strides g are those of `grad_out`, x and y those of `grad_key` and `grad_value`."""
    start = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    n_q = tl.cdiv(len_q, BLOCK_SIZE)
    n_k = tl.cdiv(len_k, BLOCK_SIZE)
    batch_kv = batch.to(tl.int64) * tl.num_programs(1) + kv_head
    bounds = offsets + batch_kv * (n_k + 1) + start // BLOCK_SIZE
    begin = tl.load(bounds)
    end = tl.load(bounds + 1)
    list_start = queries + batch_kv * entries + begin

    b_k = _load_rows(
        key, batch, kv_head, start, len_k, stride_kb, stride_kh, stride_kl, stride_kd,
        BLOCK_N, HEAD_DIM, BLOCK_D, False,
    )  # fmt: skip
    b_v = _load_rows(
        value, batch, kv_head, start, len_k, stride_vb, stride_vh, stride_vl, stride_vd,
        BLOCK_N, HEAD_DIM, BLOCK_D, False,
    )  # fmt: skip
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    STEPS: tl.constexpr = BLOCK_SIZE // BLOCK_M
    for step in tl.range(0, (end - begin) * STEPS, num_stages=NUM_STAGES):
        # An entry is head in the group times number of query blocks, plus the query block.
        entry = tl.load(list_start + step // STEPS)
        head = kv_head * heads_per_kv + entry // n_q
        row = (entry % n_q) * BLOCK_SIZE + (step % STEPS) * BLOCK_M
        b_q = _load_rows(
            query, batch, head, row, len_q, stride_qb, stride_qh, stride_ql, stride_qd,
            BLOCK_M, HEAD_DIM, BLOCK_D, False,
        )  # fmt: skip
        b_do = _load_rows(
            grad_out, batch, head, row, len_q, stride_gb, stride_gh, stride_gl, stride_gd,
            BLOCK_M, HEAD_DIM, BLOCK_D, False,
        )  # fmt: skip
        o_m = row + tl.arange(0, BLOCK_M)
        row_base = (batch.to(tl.int64) * heads + head) * len_q
        b_lse = _load_lse(lse + row_base, o_m, len_q)
        b_delta = tl.load(delta + row_base + o_m, mask=o_m < len_q, other=0.0)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BM]
        b_p = tl.exp2(b_s * scale_log2 - b_lse[None, :])
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        b_ds = b_p * (b_dp - b_delta[None, :])
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    _store_rows(
        grad_key, batch, kv_head, start, len_k, stride_xb, stride_xh, stride_xl, stride_xd, b_dk * scale,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    _store_rows(
        grad_value, batch, kv_head, start, len_k, stride_yb, stride_yh, stride_yl, stride_yd, b_dv,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


def block_sparse_attention_triton_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    *,
    block_size: int,
    scale: float,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    query_tile: BackwardTile | None = None,
    key_tile: BackwardTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Two runs are bitwise equal.

    Args:
        grad_out, grad_lse: gradients of output and (optional) log-sum-exp.
        out, lse: what the forward returned; computed again when None.
        query_tile, key_tile: override the table of `tiles.py`.
    """
    batch, heads, len_q, dim = query.shape
    kv_heads, len_k = key.shape[1:3]
    padded_dim = max(16, next_power_of_2(dim))
    query_tile = query_tile or select_backward_tile("query", padded_dim, block_size, query.element_size())
    key_tile = key_tile or select_backward_tile("key", padded_dim, block_size, query.element_size())
    if out is None or lse is None:
        out, lse = block_sparse_attention_triton(
            query, key, value, block_index, block_count, block_size=block_size, scale=scale, return_lse=True
        )
    assert lse is not None
    grads = [torch.empty_like(x) for x in (query, key, value)]
    delta = torch.empty_like(lse)
    block_index = block_index.contiguous()
    block_count = None if block_count is None else block_count.contiguous()
    offsets, queries = _queries_of_keys(block_index, block_count, kv_heads, -(-len_k // block_size))
    scales = scale, scale * _LOG2_E.value
    sizes = {"BLOCK_SIZE": block_size, "HEAD_DIM": dim, "BLOCK_D": padded_dim, "PRECISION": "ieee"}
    with torch.cuda.device_of(query):
        block_sparse_bwd_dq_kernel[cdiv(len_q, query_tile.block_m), heads, batch](
            query, key, value, out, grad_out, lse, lse if grad_lse is None else grad_lse.contiguous(), grads[0], delta,
            block_index, block_count, *scales,
            *query.stride(), *key.stride(), *value.stride(), *out.stride(), *grad_out.stride(), *grads[0].stride(),
            heads // kv_heads, len_q, len_k, block_index.shape[-1],
            BLOCK_M=query_tile.block_m, BLOCK_N=query_tile.block_n,
            HAS_COUNT=block_count is not None, HAS_GRAD_LSE=grad_lse is not None, NUM_STAGES=query_tile.num_stages,
            num_warps=query_tile.num_warps, num_stages=query_tile.num_stages, **sizes,
        )  # fmt: skip
        block_sparse_bwd_dkdv_kernel[cdiv(len_k, key_tile.block_n), kv_heads, batch](
            query, key, value, grad_out, lse, delta, grads[1], grads[2], offsets, queries, *scales,
            *query.stride(), *key.stride(), *value.stride(), *grad_out.stride(),
            *grads[1].stride(), *grads[2].stride(),
            heads, heads // kv_heads, len_q, len_k, queries.shape[-1],
            BLOCK_M=key_tile.block_m, BLOCK_N=key_tile.block_n, NUM_STAGES=key_tile.num_stages,
            num_warps=key_tile.num_warps, num_stages=key_tile.num_stages, **sizes,
        )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _queries_of_keys(block_index: Tensor, block_count: Tensor | None, kv_heads: int, n_k: int) -> tuple[Tensor, Tensor]:
    """For each key block the query blocks that keep it, ascending, over the heads of a group one after the other.

    Returns:
        Offsets `(B, Hkv, n_k + 1)` int32 and entries `(B, Hkv, G * Nq * K)` int32 with G = H / Hkv: head in the group
        times Nq plus query block. Out-of-range blocks are clamped, as in the forward.
    """
    batch, width = block_index.shape[0], block_index.shape[3]
    keys = block_index.clamp(0, n_k - 1)
    if block_count is not None:
        listed = torch.arange(width, device=keys.device) < block_count[..., None]
        keys = torch.where(listed, keys, n_k)
    keys, position = keys.view(batch, kv_heads, -1).sort(dim=-1, stable=True)
    bounds = torch.arange(n_k + 1, dtype=keys.dtype, device=keys.device).expand(batch, kv_heads, -1).contiguous()
    return torch.searchsorted(keys, bounds, out_int32=True), (position // width).int()
