"""LLSA in Triton, for NVIDIA GPUs from sm_80 on: launches of this folder's kernels. Nothing here is differentiable.

Pyramids are lists of levels 0..M, lists of kept blocks are I_1 .. I_M, as in `reference.py`. Coarse levels are
contiguous and in the dtype of the inputs; all accumulation is in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .backward_kernels import enriched_bwd_dkdv_kernel, enriched_bwd_dq_kernel, enriched_bwd_reduce_kernel
from .forward_kernels import enriched_fwd_kernel
from .levels import level_lengths
from .pyramid_kernels import pyramid_fwd_kernel
from .selection_kernels import topk_fwd_kernel
from .tiles import KeyTile, QueryTile, backward_key_tile, backward_query_tile, forward_tile
from .transpose import TransposedIndex, transpose_index

_LOG2_E = 1.4426950408889634
# Raw queries that one program of the key-major kernel takes from a list before the list is cut.
_LIST_ROWS = 2048
# Programs that the coarsest level is cut into, about: enough to fill a GPU several times.
_DENSE_PROGRAMS, _DENSE_MIN_ROWS = 1024, 1024


def pyramid_triton(x: Tensor, block_size: int, levels: int) -> list[Tensor]:
    """`x` itself and its means of levels 1..M `(B, H, n_l, D)`, contiguous, in the dtype of `x`."""
    batch, heads, length, dim = x.shape
    lengths = level_lengths(length, block_size, levels)
    result = [x] + [x.new_empty((batch, heads, n, dim)) for n in lengths[1:]]
    parents = max(1, min(block_size, 64 // block_size))
    with torch.cuda.device_of(x):
        for level in range(0, levels, 2):
            two = level + 2 <= levels
            source, first = result[level], result[level + 1]
            grid = (triton.cdiv(lengths[level], block_size**2), batch * heads)
            pyramid_fwd_kernel[grid](
                source, first, result[level + 2] if two else first, *source.stride(), heads, length,
                BLOCK=block_size, SPAN=block_size**level, PARENTS=parents, TWO_LEVELS=two,
                HEAD_DIM=dim, BLOCK_D=_padded(dim), num_warps=4,
            )  # fmt: skip
    return result


def hierarchical_topk_triton(
    q_pyramid: Sequence[Tensor], k_pyramid: Sequence[Tensor], topk: int | Sequence[int], block_size: int
) -> list[Tensor]:
    """Same meaning as `reference.hierarchical_topk_reference`; `topk` is one width of lists or one per level."""
    levels = len(k_pyramid) - 1
    topk = [topk] * levels if isinstance(topk, int) else topk
    chosen: list[Tensor] = []
    for level in range(levels, 0, -1):
        query, key, kept = _coarse(q_pyramid[level]), _coarse(k_pyramid[level]), topk[level - 1]
        batch, heads, n_tokens, dim = query.shape
        index = torch.empty((batch, heads, n_tokens, kept), dtype=torch.int32, device=query.device)
        coarsest = not chosen
        step = 16 if coarsest else min(16, block_size)
        candidates = n_tokens if coarsest else chosen[0].shape[3] * block_size
        padded_kept = triton.next_power_of_2(kept)
        block_n = min(128 if dim <= 128 else 64, max(16, triton.next_power_of_2(candidates)))
        with torch.cuda.device_of(query):
            topk_fwd_kernel[triton.cdiv(n_tokens, step), batch * heads](
                query, key, index if coarsest else chosen[0], index, heads, heads // key.shape[1], n_tokens, kept,
                0 if coarsest else chosen[0].shape[3],
                BLOCK=block_size, ROWS=16, ROW_STEP=step, BLOCK_N=block_n, KP=padded_kept, COARSEST=coarsest,
                HEAD_DIM=dim, BLOCK_D=_padded(dim), PRECISION=_precision(query.dtype),
                num_warps=4 if padded_kept <= 256 else 8, num_stages=1,
            )  # fmt: skip
        chosen.insert(0, index)
    return chosen


def enriched_attention_fwd_triton(
    query: Tensor,
    k_pyramid: Sequence[Tensor],
    v_pyramid: Sequence[Tensor],
    indices: Sequence[Tensor],
    *,
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
    tile: QueryTile | None = None,
) -> tuple[Tensor, Tensor]:
    """Same meaning as `reference.enriched_attention_reference`, output in the memory order of `query`.

    Args:
        tile: overrides the table of `tiles.py`.
    """
    batch, heads, length, dim = query.shape
    if tile is None:
        tile = forward_tile(_padded(dim), block_size, query.element_size())
    key, value = k_pyramid[0], v_pyramid[0]
    out = torch.empty_like(query)
    lse = query.new_empty((batch, heads, length), dtype=torch.float32)
    with torch.cuda.device_of(query):
        enriched_fwd_kernel[triton.cdiv(length, tile.rows), batch * heads](
            query, key, value, out, lse, *_levels(query, k_pyramid, v_pyramid, indices, enrich), scale * _LOG2_E,
            *query.stride(), *key.stride(), *value.stride(), *out.stride(),
            heads, heads // key.shape[1], length,
            BLOCK=block_size, LEVELS=len(indices), ROWS=tile.rows, UNIT=max(16, block_size),
            COARSE_N=tile.coarse_n, FINE_N=tile.fine_n, HEAD_DIM=dim, BLOCK_D=_padded(dim),
            ENRICH=enrich, DISJOINT=disjoint, PRECISION=_precision(query.dtype), NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out, lse


def enriched_attention_bwd_triton(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    k_pyramid: Sequence[Tensor],
    v_pyramid: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    indices: Sequence[Tensor],
    transposed: Sequence[TransposedIndex | tuple[Tensor, Tensor]] | None = None,
    *,
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
    merge: bool = False,
    query_tile: QueryTile | None = None,
    list_tile: KeyTile | None = None,
    coarsest_tile: KeyTile | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the queries, and of keys and values level by level. Two runs are bitwise equal.

    Args:
        grad_out, grad_lse: gradients of output and (optional) log-sum-exp.
        out, lse: what the forward returned.
        transposed: `transpose_index(indices[l], n_(l+1))` per level; made here when None, or with grouped heads.
        merge: carry the gradients of pooled tokens down to the raw ones on the way: the lists then hold the complete
            gradients of raw keys and values and nothing else.
        query_tile, list_tile, coarsest_tile: override the table of `tiles.py`.

    Returns:
        Gradient of `query`; gradients of the levels of keys; of values. Level 0 is in the dtype and memory order of
        the inputs, levels 1..M are in fp32 and absent without `enrich` or with `merge`.
    """
    batch, heads, length, dim = query.shape
    key, value = k_pyramid[0], v_pyramid[0]
    kv_heads = key.shape[1]
    padded, size = _padded(dim), query.element_size()
    query_tile = query_tile or backward_query_tile(padded, block_size, size)
    levels = len(indices)
    tiles = {
        level: (coarsest_tile if level == levels else list_tile)
        or backward_key_tile(padded, block_size, size, coarsest=level == levels)
        for level in range(levels + 1)
    }

    query, key, value = (_with_own_memory(x) for x in (query, key, value))
    grad_query = torch.empty_like(query)
    delta = torch.empty_like(lse)
    coarse_keys, coarse_values, lists, widths = _levels(query, k_pyramid, v_pyramid, indices, enrich)
    shared = {
        "BLOCK": block_size, "HEAD_DIM": dim, "BLOCK_D": padded, "PRECISION": _precision(query.dtype),
    }  # fmt: skip
    with torch.cuda.device_of(query):
        enriched_bwd_dq_kernel[triton.cdiv(length, query_tile.rows), batch * heads](
            query, key, value, out, grad_out, lse, lse if grad_lse is None else grad_lse.contiguous(),
            grad_query, delta,
            coarse_keys, coarse_values, lists, widths, scale, scale * _LOG2_E,
            *query.stride(), *key.stride(), *value.stride(), *out.stride(), *grad_out.stride(),
            heads, heads // kv_heads, length,
            LEVELS=levels, ROWS=query_tile.rows, UNIT=max(16, block_size),
            COARSE_N=query_tile.coarse_n, FINE_N=query_tile.fine_n, ENRICH=enrich, DISJOINT=disjoint,
            HAS_GRAD_LSE=grad_lse is not None, NUM_STAGES=query_tile.num_stages,
            num_warps=query_tile.num_warps, num_stages=query_tile.num_stages, **shared,
        )  # fmt: skip

        key_grads: list[Tensor] = []
        value_grads: list[Tensor] = []
        for level in range(levels if enrich else 0, -1, -1):
            k_level = coarse_keys[level - 1] if level else key
            v_level = coarse_values[level - 1] if level else value
            tile = tiles[level]
            own = lists[level - 1] if level else lists[0]
            tail = (
                scale, scale * _LOG2_E, *query.stride(), *k_level.stride(), *v_level.stride(), *grad_out.stride(),
                heads, heads // kv_heads, length,
            )  # fmt: skip
            options = shared | {
                "SPAN": block_size**level, "DISJOINT": disjoint and level > 0, "ROWS": tile.rows, "SWAP": tile.swap,
                "NUM_STAGES": tile.num_stages, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
            }  # fmt: skip
            if level == levels:
                tiles_of_keys = triton.cdiv(k_level.shape[2], tile.keys)
                cap = _rows_per_split(length, tiles_of_keys * batch * heads)
                splits = triton.cdiv(length, cap) * (heads // kv_heads)
                parts = [k_level.new_empty((splits, *k_level.shape), dtype=torch.float32) for _ in range(2)]
                enriched_bwd_dkdv_kernel[tiles_of_keys, batch * kv_heads, splits](
                    query, k_level, v_level, grad_out, lse, delta, *parts, *parts, *parts, own, own, own, own,
                    0, own, own.shape[3], *tail, 1, cap,
                    DENSE=True, MERGE=False, KEYS=tile.keys, KEY_STEP=tile.keys, **options,
                )  # fmt: skip
                key_grads.insert(0, parts[0].sum(0))
                value_grads.insert(0, parts[1].sum(0))
                continue
            index = lists[level]
            if transposed is None or heads != kv_heads:
                index = index.view(batch, kv_heads, -1, index.shape[3])
                offsets, queries = transpose_index(index, lists[level].shape[2])
            else:
                offsets, queries = (x.contiguous() for x in transposed[level])
            cut = _cut_lists(offsets, queries.shape[2], max(1, _LIST_ROWS // block_size ** (level + 1)))
            dtype = torch.float32 if level else query.dtype
            grads = [torch.empty_like(x, dtype=dtype) for x in (k_level, v_level)]
            n_blocks = offsets.shape[2] - 1
            parts = [
                query.new_empty((batch, kv_heads, cut.n_slots, block_size, dim), dtype=torch.float32) for _ in range(2)
            ]
            merged = merge and enrich
            parents = [key_grads[0], value_grads[0]] if merged else parts
            enriched_bwd_dkdv_kernel[cut.n_slots + n_blocks, batch * kv_heads](
                query, k_level, v_level, grad_out, lse, delta, *grads, *parts, *parents,
                offsets, queries, cut.slot_end, cut.slot_block, lists[level].shape[3], own, own.shape[3],
                *tail, cut.n_slots, cut.cap,
                DENSE=False, MERGE=merged, KEYS=max(16, block_size), KEY_STEP=block_size, **options,
            )  # fmt: skip
            enriched_bwd_reduce_kernel[cut.n_slots, batch * kv_heads](
                *grads, *parts, *parents, cut.slot_end, cut.slot_block, *k_level.stride(), *v_level.stride(),
                kv_heads, length, cut.n_slots,
                BLOCK=block_size, SPAN=block_size**level, MERGE=merged, HEAD_DIM=dim, BLOCK_D=padded, num_warps=4,
            )  # fmt: skip
            key_grads.insert(0, grads[0])
            value_grads.insert(0, grads[1])
    if merge:
        return grad_query, key_grads[:1], value_grads[:1]
    return grad_query, key_grads, value_grads


class _CutLists(NamedTuple):
    cap: int  # entries per program
    n_slots: int  # room for the parts of cut lists, per batch and head
    slot_end: Tensor  # (B, Hkv, n) int32: running count of slots, up to and with each block
    slot_block: Tensor  # (B, Hkv, n_slots) int32: block of each slot, n for unused ones


def _cut_lists(offsets: Tensor, entries: int, cap: int) -> _CutLists:
    """Cut lists of more than `cap` entries into parts of `cap`. No list has more than twice its length over `cap`."""
    n_slots = max(1, 2 * entries // cap)
    counts = offsets[..., 1:] - offsets[..., :-1]
    slot_end = torch.where(counts > cap, (counts + cap - 1) // cap, 0).cumsum(-1, dtype=torch.int32)
    slots = torch.arange(n_slots, dtype=torch.int32, device=offsets.device)
    slots = slots.expand(*offsets.shape[:2], n_slots).contiguous()
    slot_block = torch.searchsorted(slot_end, slots, right=True, out_int32=True)
    return _CutLists(cap, n_slots, slot_end, slot_block)


def _rows_per_split(length: int, programs: int) -> int:
    """Queries per program of the coarsest level: a power of two that depends on the shape alone."""
    rows = max(_DENSE_MIN_ROWS, triton.next_power_of_2(triton.cdiv(length * programs, _DENSE_PROGRAMS)))
    return min(rows, max(16, triton.next_power_of_2(length)))


def _levels(
    query: Tensor, k_pyramid: Sequence[Tensor], v_pyramid: Sequence[Tensor], indices: Sequence[Tensor], enrich: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...], tuple[int, ...]]:
    """Coarse keys, coarse values, lists and list widths as the kernels take them, levels 1..M each."""
    lists = tuple(index.contiguous() for index in indices)
    widths = tuple(index.shape[3] for index in indices)
    if not enrich:
        # Never read, but a kernel wants as many pointers as there are levels.
        return (query,) * len(lists), (query,) * len(lists), lists, widths
    keys, values = (
        tuple(_coarse(x.to(query.dtype)) for x in pyramid[1 : len(lists) + 1]) for pyramid in (k_pyramid, v_pyramid)
    )
    return keys, values, lists, widths


def _with_own_memory(x: Tensor) -> Tensor:
    """`x`, or a copy where its gradient cannot have the same strides: the kernels write one with those of the input."""
    like = torch.empty_like(x)
    return x if like.stride() == x.stride() else like.copy_(x)


def _coarse(x: Tensor) -> Tensor:
    return x.contiguous()


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _precision(dtype: torch.dtype) -> str:
    """fp32 products are exact unless PyTorch's own setting allows TF32."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"
