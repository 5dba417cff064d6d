"""Exact attention between blocks in Triton: two passes over the keys, no logits in memory.

The first pass takes the log-sum-exp of every row, the second adds up the weights of each key block. Products of bf16 or
fp16 values are exact in fp32, and all sums are fp32: no operand is rounded to TF32.

Legend: BM queries of a program, BN keys per step, D head dimension padded to a power of two. Logits are in base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..sizes import cdiv, next_power_of_2

_LOG2_E = 1.4426950408889634


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    b_q, key, o_n, valid, stride_kl, stride_kd, scale_log2, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits [BM, BN] of the keys `o_n`; those that are not valid count as zeros."""
    o_d = tl.arange(0, BLOCK_D)
    pointers = key + o_n.to(tl.int64)[:, None] * stride_kl + o_d.to(tl.int64)[None, :] * stride_kd
    mask = valid[:, None]
    if HEAD_DIM != BLOCK_D:
        mask = mask & (o_d < HEAD_DIM)[None, :]
    b_k = tl.load(pointers, mask=mask, other=0.0)
    return tl.dot(b_q, tl.trans(b_k)) * scale_log2


# Lengths must not cause a new compilation, whatever they are multiples of.
@triton.jit(do_not_specialize=["heads_per_kv", "len_q", "len_k", "num_key"])
def block_mass_kernel(  # type: ignore[no-untyped-def]
    query, key, mass, scale_log2,
    stride_qb, stride_qh, stride_ql, stride_qd, stride_kb, stride_kh, stride_kl, stride_kd,
    heads_per_kv, len_q, len_k, num_key,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # A query block is a number of programs, a key block a number of steps: one each up to 128 tokens.
    PARTS: tl.constexpr = (BLOCK_SIZE + BLOCK_M - 1) // BLOCK_M
    STEPS: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = part // PARTS
    o_m = block * BLOCK_SIZE + (part % PARTS) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    inside = o_m < tl.minimum((block + 1) * BLOCK_SIZE, len_q)
    query += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    key += batch.to(tl.int64) * stride_kb + (head // heads_per_kv).to(tl.int64) * stride_kh
    b_q = tl.load(
        query + o_m.to(tl.int64)[:, None] * stride_ql + o_d.to(tl.int64)[None, :] * stride_qd,
        mask=inside[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in tl.range(0, len_k, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        b_s = _logits(b_q, key, o_n, o_n < len_k, stride_kl, stride_kd, scale_log2, HEAD_DIM, BLOCK_D)
        b_s = tl.where((o_n < len_k)[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_s - b_new[:, None]), 1)
        b_max = b_new
    b_lse = b_max + tl.log2(b_sum)

    batch_head = batch.to(tl.int64) * tl.num_programs(1) + head
    mass += (batch_head * tl.num_programs(0) + part) * num_key
    for number in tl.range(0, num_key):
        last = tl.minimum((number + 1) * BLOCK_SIZE, len_k)
        b_row = tl.zeros([BLOCK_M], dtype=tl.float32)
        for step in tl.static_range(STEPS):
            o_n = number * BLOCK_SIZE + step * BLOCK_N + tl.arange(0, BLOCK_N)
            b_s = _logits(b_q, key, o_n, o_n < last, stride_kl, stride_kd, scale_log2, HEAD_DIM, BLOCK_D)
            b_row += tl.sum(tl.where((o_n < last)[None, :], tl.exp2(b_s - b_lse[:, None]), 0.0), 1)
        tl.store(mass + number, tl.sum(tl.where(inside, b_row, 0.0), 0))


def block_mass_triton(query: torch.Tensor, key: torch.Tensor, *, block_size: int, scale: float) -> torch.Tensor:
    """Sum the attention weights of every pair of blocks.

    Args:
        query: (B, H, Lq, D) bf16 or fp16, in the token order of the blocks, any strides; D at most 128.
        key: (B, Hkv, Lk, D), the same.
        block_size: tokens per block.
        scale: factor of the logits.

    Returns:
        (B, H, Nq, Nk) fp32, summed over the queries of the block: Lq in all per batch item and head.
    """
    batch, heads, len_q, dim = query.shape
    kv_heads, len_k = key.shape[1:3]
    num_query, num_key = cdiv(len_q, block_size), cdiv(len_k, block_size)
    rows = min(128, max(16, next_power_of_2(block_size)))
    parts = cdiv(block_size, rows)
    padded_dim = max(16, next_power_of_2(dim))
    mass = torch.empty((batch, heads, num_query * parts, num_key), dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(mass):
        block_mass_kernel[num_query * parts, heads, batch](
            query, key, mass, scale * _LOG2_E, *query.stride(), *key.stride(), heads // kv_heads, len_q, len_k, num_key,
            BLOCK_SIZE=block_size, BLOCK_M=rows, BLOCK_N=rows, HEAD_DIM=dim, BLOCK_D=padded_dim,
            num_warps=8 if rows == 128 else 4, num_stages=3 if padded_dim <= 64 else 2,
        )  # fmt: skip
    return mass if parts == 1 else mass.unflatten(2, (num_query, parts)).sum(dim=3)
