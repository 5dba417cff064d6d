"""What the ops of LLSA do on Triton, as functions of a list of tensors that `replayed` can repeat.

A short call waits for its host, and most of its time went into finding out the same launches every time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..replay import Tensors, replayed
from .triton_backend import (
    enriched_attention_bwd_triton,
    enriched_attention_fwd_triton,
    hierarchical_topk_triton,
    pyramids_triton,
    with_own_memory,
)


def select(query: Tensor, key: Tensor, value: Tensor | None, block_size: int, kept: Sequence[int]) -> list[Tensor]:
    """I_1 .. I_M; given `value`, then levels 1..M of the keys and of the values."""
    tensors = (query, key) if value is None else (query, key, value)
    return list(replayed(_select, tensors, block_size, tuple(kept)))


def attend(
    query: Tensor, key: Tensor, value: Tensor, indices: Sequence[Tensor], pooled: Sequence[Tensor],
    block_size: int, scale: float, enrich: bool, disjoint: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp. Arguments as in the op."""
    tensors = query, key, value, *indices, *pooled
    out, lse = replayed(_attend, tensors, len(indices), block_size, scale, enrich, disjoint)
    return out, lse


def differentiate(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    indices: Sequence[Tensor], pooled: Sequence[Tensor],
    block_size: int, scale: float, enrich: bool, disjoint: bool, nested: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, not always in their memory order. Arguments as in the op."""
    # Here, as launches alone cannot repeat a copy.
    query, key, value = (with_own_memory(x) for x in (query, key, value))
    tensors = grad_out, grad_lse, query, key, value, out, lse, *indices, *pooled
    options = len(indices), block_size, scale, enrich, disjoint, nested
    grad_query, grad_key, grad_value = replayed(_differentiate, tensors, *options)
    return grad_query, grad_key, grad_value


def _select(tensors: Sequence[Tensor], block_size: int, kept: tuple[int, ...]) -> list[Tensor]:
    query, key, *values = pyramids_triton(tensors, block_size=block_size, levels=len(kept))
    chosen = hierarchical_topk_triton(query, key, topk=kept, block_size=block_size)
    return [*chosen, *(x for levels in (key, *values) for x in levels[1:])] if values else chosen


def _pyramids(
    key: Tensor, value: Tensor, pooled: Sequence[Tensor], block_size: int, levels: int, enrich: bool
) -> list[list[Tensor]]:
    """Keys and values of all levels: those that came with the lists, or made here where they are needed."""
    if pooled:
        return [[key, *pooled[:levels]], [value, *pooled[levels:]]]
    if not enrich:
        return [[key], [value]]
    return pyramids_triton((key, value), block_size=block_size, levels=levels)


def _attend(
    tensors: Sequence[Tensor], levels: int, block_size: int, scale: float, enrich: bool, disjoint: bool
) -> tuple[Tensor, Tensor]:
    query, key, value, *others = tensors
    keys, values = _pyramids(key, value, others[levels:], block_size, levels, enrich)
    return enriched_attention_fwd_triton(
        query, keys, values, others[:levels], block_size=block_size, scale=scale, enrich=enrich, disjoint=disjoint
    )


def _differentiate(
    tensors: Tensors, levels: int, block_size: int, scale: float, enrich: bool, disjoint: bool, nested: bool
) -> tuple[Tensor, ...]:
    grad_out, grad_lse, query, key, value, out, lse, *others = tensors
    keys, values = _pyramids(key, value, others[levels:], block_size, levels, enrich)  # type: ignore[arg-type]
    grad_query, grad_keys, grad_values = enriched_attention_bwd_triton(
        grad_out, grad_lse, query, keys, values, out, lse, others[:levels],  # type: ignore[arg-type]
        block_size=block_size, scale=scale, enrich=enrich, disjoint=disjoint, nested=nested, merge=True,
    )  # fmt: skip
    return grad_query, grad_keys[0], grad_values[0]
