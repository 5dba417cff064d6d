"""LLSA in Triton, for NVIDIA GPUs from sm_80 on: launches of this folder's kernels. Nothing here is differentiable.

Pyramids are lists of levels 0..M, lists of kept blocks are I_1 .. I_M, as in `reference.py`. Coarse levels are
contiguous and in the dtype of the inputs; all accumulation is in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..replay import launch
from ..sizes import cdiv, next_power_of_2
from .backward_kernels import enriched_bwd_dkdv_kernel, enriched_bwd_dq_kernel, enriched_bwd_reduce_kernel
from .forward_kernels import enriched_fwd_kernel
from .levels import level_lengths
from .pyramid_kernels import pyramid_fwd_kernel
from .selection_kernels import topk_fwd_kernel
from .tiles import (
    KeyTile,
    PoolTile,
    QueryTile,
    SelectionTile,
    backward_key_tile,
    backward_query_tile,
    forward_tile,
    pool_tile,
    selection_tile,
)
from .transpose import transpose_index
from .transpose_kernels import transpose_nested_kernel

_LOG2_E = 1.4426950408889634
# Raw queries that one program of the key-major kernel takes from a list before the list is cut.
_LIST_ROWS = 2048
# Programs that the coarsest level is cut into, about: enough to fill a GPU several times.
_DENSE_PROGRAMS, _DENSE_MIN_ROWS = 1024, 1024


def pyramids_triton(
    tensors: Sequence[Tensor], block_size: int, levels: int, tile: PoolTile | None = None
) -> list[list[Tensor]]:
    """For each tensor itself and its means of levels 1..M `(B, H, n_l, D)`, contiguous, in its dtype.

    Args:
        tensors: `(B, H, L, D)` each; H alone may differ. All are pooled by one launch per two levels.
        tile: overrides the table of `tiles.py`.
    """
    batch, _, length, dim = tensors[0].shape
    lengths = level_lengths(length, block_size, levels)
    results = [[x] + [x.new_empty((batch, x.shape[1], n, dim)) for n in lengths[1:]] for x in tensors]
    heads = tuple(x.shape[1] for x in tensors)
    padded = _padded(dim)
    tile = tile or pool_tile(padded, block_size)
    with torch.cuda.device_of(tensors[0]):
        for level in range(0, levels, 2):
            two = level + 2 <= levels
            sources, firsts, seconds = (
                tuple(result[n] for result in results) for n in (level, level + 1, level + 2 if two else level + 1)
            )
            grid = (cdiv(lengths[level], block_size**2), batch * max(heads), len(tensors))
            launch(
                pyramid_fwd_kernel, grid,
                sources, firsts, seconds, tuple(stride for x in sources for stride in x.stride()), heads,
                tuple(batch * h for h in heads), length,
                BLOCK=block_size, SPAN=block_size**level, PARENTS=tile.parents, TWO_LEVELS=two,
                HEAD_DIM=dim, BLOCK_D=padded, num_warps=tile.num_warps,
            )  # fmt: skip
    return results


def pyramid_triton(x: Tensor, block_size: int, levels: int) -> list[Tensor]:
    """`pyramids_triton` of one tensor."""
    return pyramids_triton([x], block_size, levels)[0]


def hierarchical_topk_triton(
    q_pyramid: Sequence[Tensor],
    k_pyramid: Sequence[Tensor],
    topk: int | Sequence[int],
    block_size: int,
    tile: SelectionTile | None = None,
    coarsest_tile: SelectionTile | None = None,
) -> list[Tensor]:
    """Same meaning as `reference.hierarchical_topk_reference`.

    Args:
        topk: one width of lists, or one per level.
        tile, coarsest_tile: override the tables of `tiles.py`.
    """
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
        padded_kept = next_power_of_2(kept)
        chosen_tile = (coarsest_tile if coarsest else tile) or selection_tile(
            _padded(dim), padded_kept, coarsest=coarsest
        )
        block_n = min(chosen_tile.block_n, max(16, next_power_of_2(candidates)))
        with torch.cuda.device_of(query):
            launch(
                topk_fwd_kernel, (cdiv(n_tokens, step), batch * heads),
                query, key, index if coarsest else chosen[0], index, heads, heads // key.shape[1], n_tokens, kept,
                0 if coarsest else chosen[0].shape[3],
                BLOCK=block_size, ROWS=16, ROW_STEP=step, BLOCK_N=block_n, KP=padded_kept, COARSEST=coarsest,
                ONE_STEP=candidates <= block_n, HEAD_DIM=dim, BLOCK_D=_padded(dim), PRECISION=_precision(query.dtype),
                num_warps=chosen_tile.num_warps, num_stages=1,
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
        launch(
            enriched_fwd_kernel, (cdiv(length, tile.rows), batch * heads),
            query, key, value, out, lse, *_levels(query, k_pyramid, v_pyramid, indices, enrich),
            _shortfalls(length, block_size, len(indices), scale * _LOG2_E), scale * _LOG2_E,
            *query.stride(), *key.stride(), *value.stride(), *out.stride(),
            heads, heads // key.shape[1], length,
            BLOCK=block_size, LOG2_BLOCK=block_size.bit_length() - 1, LEVELS=len(indices),
            ROWS=tile.rows, UNIT=max(16, block_size), KP=next_power_of_2(max(index.shape[3] for index in indices)),
            COARSE_N=tile.coarse_n, FINE_N=tile.fine_n, HEAD_DIM=dim, BLOCK_D=_padded(dim),
            ENRICH=enrich, DISJOINT=disjoint, SAME_STRIDES=key.stride() == value.stride(),
            PRECISION=_precision(query.dtype), WIDE=any(map(_is_wide, (query, key, value))), **_options(tile),
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
    *,
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
    nested: bool = False,
    merge: bool = False,
    query_tile: QueryTile | None = None,
    list_tile: KeyTile | None = None,
    coarsest_tile: KeyTile | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the queries, and of keys and values level by level. Two runs are bitwise equal.

    Args:
        grad_out, grad_lse: gradients of output and (optional) log-sum-exp.
        out, lse: what the forward returned.
        nested: the lists are those of `hierarchical_topk_triton`, what a token keeps being children of what its parent
            keeps; otherwise they may hold anything, and are transposed by a sort.
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
        or backward_key_tile(padded, block_size, size, coarsest=level == levels, disjoint=disjoint and level > 0)
        for level in range(levels + 1)
    }

    query, key, value = (with_own_memory(x) for x in (query, key, value))
    grad_query = torch.empty_like(query)
    delta = torch.empty_like(lse)
    coarse_keys, coarse_values, lists, widths = _levels(query, k_pyramid, v_pyramid, indices, enrich)
    shared = {
        "BLOCK": block_size, "HEAD_DIM": dim, "BLOCK_D": padded, "PRECISION": _precision(query.dtype),
    }  # fmt: skip
    with torch.cuda.device_of(query):
        launch(
            enriched_bwd_dq_kernel, (cdiv(length, query_tile.rows), batch * heads),
            query, key, value, out, grad_out, lse, lse if grad_lse is None else grad_lse.contiguous(),
            grad_query, delta,
            coarse_keys, coarse_values, lists, widths, scale, scale * _LOG2_E,
            *query.stride(), *key.stride(), *value.stride(), *out.stride(), *grad_out.stride(),
            heads, heads // kv_heads, length,
            LEVELS=levels, ROWS=query_tile.rows, UNIT=max(16, block_size),
            COARSE_N=query_tile.coarse_n, FINE_N=query_tile.fine_n, ENRICH=enrich, DISJOINT=disjoint,
            SAME_STRIDES=key.stride() == value.stride(), HAS_GRAD_LSE=grad_lse is not None,
            **_options(query_tile), **shared,
        )  # fmt: skip

        # The gradients of the level above, in `splits` parts.
        above: list[Tensor] = [lse, lse]
        splits = 0
        key_grads: list[Tensor] = []
        value_grads: list[Tensor] = []
        transposed = _transposed(lists, kv_heads, block_size, nested)
        # One level after the other writes its parts there and reads them.
        n_slots = max(by_key.n_slots for by_key in (transposed if enrich else transposed[:1]))
        parts = [query.new_empty((batch, kv_heads, n_slots, block_size, dim), dtype=torch.float32) for _ in range(2)]
        for level in range(levels if enrich else 0, -1, -1):
            k_level = coarse_keys[level - 1] if level else key
            v_level = coarse_values[level - 1] if level else value
            tile = tiles[level]
            own = lists[level - 1] if level else lists[0]
            strides = *query.stride(), *k_level.stride(), *v_level.stride(), *grad_out.stride()
            options = shared | {
                "SPAN": block_size**level, "DISJOINT": disjoint and level > 0,
                "SAME_STRIDES": query.stride() == grad_out.stride(), "ROWS": tile.rows, "SWAP": tile.swap,
            } | _options(tile)  # fmt: skip
            if level == levels:
                tiles_of_keys = cdiv(k_level.shape[2], tile.keys)
                cap = _rows_per_split(length, tiles_of_keys * batch * heads)
                splits = cdiv(length, cap) * (heads // kv_heads)
                above = [k_level.new_empty((splits, *k_level.shape), dtype=torch.float32) for _ in range(2)]
                launch(
                    enriched_bwd_dkdv_kernel, (tiles_of_keys, batch * kv_heads, splits),
                    query, k_level, v_level, grad_out, lse, delta, *above, *above, *above,
                    own, own, own, own, own, own, own, own.shape[3], scale, scale * _LOG2_E, *strides,
                    heads, heads // kv_heads, length, 0, 1, cap, splits,
                    DENSE=True, MERGE=False, GROUPED=False, KEYS=tile.keys, KEY_STEP=tile.keys, **options,
                )  # fmt: skip
                if not merge:
                    key_grads.insert(0, above[0].sum(0))
                    value_grads.insert(0, above[1].sum(0))
                continue
            by_key = transposed[level]
            merged = merge and enrich
            grads = [torch.empty_like(x, dtype=torch.float32 if level else query.dtype) for x in (k_level, v_level)]
            places = by_key.counts, by_key.slot_firsts, by_key.slot_blocks, by_key.used
            n_blocks = by_key.counts.shape[2]
            launch(
                enriched_bwd_dkdv_kernel, (by_key.n_slots + n_blocks, batch * kv_heads),
                query, k_level, v_level, grad_out, lse, delta, *grads, *parts, *above,
                by_key.begins, by_key.counts, by_key.queries, by_key.slot_firsts, by_key.slot_blocks, by_key.used,
                own, own.shape[3], scale, scale * _LOG2_E, *strides, heads, heads // kv_heads, length,
                by_key.queries.shape[2], by_key.n_slots, by_key.cap, splits,
                DENSE=False, MERGE=merged, GROUPED=heads != kv_heads, KEYS=max(16, block_size), KEY_STEP=block_size,
                **options,
            )  # fmt: skip
            launch(
                enriched_bwd_reduce_kernel, (by_key.n_slots, batch * kv_heads),
                *grads, *parts, *above, *places, *k_level.stride(), *v_level.stride(),
                kv_heads, length, by_key.n_slots, by_key.cap, splits,
                BLOCK=block_size, SPAN=block_size**level, MERGE=merged, HEAD_DIM=dim, BLOCK_D=padded, num_warps=4,
            )  # fmt: skip
            above, splits = grads, 1
            key_grads.insert(0, grads[0])
            value_grads.insert(0, grads[1])
    if merge:
        return grad_query, key_grads[:1], value_grads[:1]
    return grad_query, key_grads, value_grads


class _ByKey(NamedTuple):
    """The transposed lists of a level, in any order of the keys; long ones are cut into parts, each with a slot."""

    begins: Tensor  # (B, Hkv, n) int32: where in `queries` the list of a key begins
    counts: Tensor  # (B, Hkv, n) int32: its length
    queries: Tensor  # (B, Hkv, G * n * K) int32: head in the group times n, plus the token; ascending in each list
    cap: int  # entries of a part
    n_slots: int  # room for parts, per batch and key head
    slot_firsts: Tensor  # (B, Hkv, n) int32: first slot of a key with more than `cap` entries
    slot_blocks: Tensor  # (B, Hkv, n_slots) int32: key of each slot in use
    used: Tensor  # (B, Hkv, 2) int32: entries, slots in use


def _transposed(lists: Sequence[Tensor], kv_heads: int, block_size: int, nested: bool) -> list[_ByKey]:
    """Transpose all lists, level by level; heads of a group share their keys, so their lists come together."""
    batch, heads = lists[0].shape[:2]
    group = heads // kv_heads
    used = torch.zeros((len(lists), batch, kv_heads, 2), dtype=torch.int32, device=lists[0].device)
    result: list[_ByKey] = []
    for level in range(len(lists) - 1, -1, -1):
        index = lists[level]
        n_tokens, width = index.shape[2:]
        entries = group * n_tokens * width
        cap = max(1, _LIST_ROWS // block_size ** (level + 1))
        # No list has more than twice its length over `cap` parts.
        n_slots = max(1, 2 * entries // cap)
        if not nested:
            result.insert(0, _by_sort(index, kv_heads, cap, n_slots))
            continue
        rows = [index.new_empty((batch, kv_heads, n)) for n in (n_tokens, n_tokens, entries, n_tokens, n_slots)]
        begins, counts, queries, slot_firsts, slot_blocks = rows
        own = _ByKey(begins, counts, queries, cap, n_slots, slot_firsts, slot_blocks, used[level])
        coarsest = not result
        parent = own if coarsest else result[0]
        launch(
            transpose_nested_kernel, (cdiv(n_tokens, block_size), batch * kv_heads),
            index, parent.begins, parent.counts, parent.queries,
            begins, counts, queries, slot_firsts, slot_blocks, own.used,
            n_tokens, width, group, parent.queries.shape[2], entries, n_slots, cap,
            BLOCK=block_size, ROWS=max(16, min(128, 2048 // block_size)), COARSEST=coarsest, GROUPED=group > 1,
            num_warps=4,
        )  # fmt: skip
        result.insert(0, own)
    return result


def _by_sort(index: Tensor, kv_heads: int, cap: int, n_slots: int) -> _ByKey:
    """The transpose of any lists, out-of-range entries left out."""
    batch, _, n_tokens, width = index.shape
    offsets, queries = transpose_index(index.reshape(batch, kv_heads, -1, width), n_tokens)
    counts = offsets[..., 1:] - offsets[..., :-1]
    parts = torch.where(counts > cap, (counts + cap - 1) // cap, 0)
    ends = parts.cumsum(-1, dtype=torch.int32)
    slots = torch.arange(n_slots, dtype=torch.int32, device=index.device).expand(batch, kv_heads, n_slots).contiguous()
    return _ByKey(
        offsets[..., :-1].contiguous(), counts, queries, cap, n_slots, (ends - parts).int(),
        torch.searchsorted(ends, slots, right=True, out_int32=True), torch.stack([ends[..., -1], ends[..., -1]], -1),
    )  # fmt: skip


def _rows_per_split(length: int, programs: int) -> int:
    """Queries per program of the coarsest level: a power of two that depends on the shape alone."""
    rows = max(_DENSE_MIN_ROWS, next_power_of_2(cdiv(length * programs, _DENSE_PROGRAMS)))
    return min(rows, max(16, next_power_of_2(length)))


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
        tuple(_coarse(x if x.dtype == query.dtype else x.to(query.dtype)) for x in pyramid[1 : len(lists) + 1])
        for pyramid in (k_pyramid, v_pyramid)
    )
    return keys, values, lists, widths


def _options(tile: QueryTile | KeyTile) -> dict[str, Any]:
    """What a tile says to the compiler; the depth of the pipeline is an argument of the loops too."""
    options = {"NUM_STAGES": tile.num_stages, "num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return options if tile.max_registers is None else options | {"maxnreg": tile.max_registers}


def _shortfalls(length: int, block_size: int, levels: int, scale_log2: float) -> tuple[float, ...]:
    """Per level, log2 of the weight of the last token over that of the others, in units of the dot product."""
    result = []
    for level in range(1, levels + 1):
        span = block_size**level
        result.append(math.log2(((length - 1) % span + 1) / span) / scale_log2)
    return tuple(result)


def _is_wide(x: Tensor) -> bool:
    """Whether elements of one head are 2**31 or more apart: offsets of 32 bits do not reach them."""
    return (x.shape[2] - 1) * x.stride(2) + (x.shape[3] - 1) * x.stride(3) >= 2**31


def with_own_memory(x: Tensor) -> Tensor:
    """`x`, or a copy where its gradient cannot have the same strides: the kernels write one with those of the input.

    So it is where `x` has gaps, as a slice of fused queries, keys and values, or elements that share memory.
    """
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != expected:
            return torch.empty_like(x).copy_(x)
        expected *= size
    return x


def _coarse(x: Tensor) -> Tensor:
    return x.contiguous()


def _padded(dim: int) -> int:
    return max(16, next_power_of_2(dim))


def _precision(dtype: torch.dtype) -> str:
    """fp32 products are exact unless PyTorch's own setting allows TF32."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"
