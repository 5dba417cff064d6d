"""The order that would have suited each head best, by its exact recall in the steps to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..kernels.ba_att import (
    CANDIDATE_ORDERS,
    block_scores,
    block_statistics,
    gather_tokens,
    kept_blocks,
    select_blocks,
    token_orders,
)
from ..kernels.ba_att.ordering import Grid
from ..processors import AttentionCall, observe_attention
from .mass import block_mass, kept_share

# Orders of the heads: transformer -> layer -> names.
OrdersTable = dict[str, dict[str, list[str]]]


def recall_of_orders(
    query: torch.Tensor, key: torch.Tensor, *, grid_thw: Grid, densities: Sequence[float], block_size: int
) -> torch.Tensor:
    """Measure the recall of every candidate order with the default score, over all query blocks.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, L, D).
        grid_thw: (frames, height, width).
        densities: shares of the blocks kept, S of them.
        block_size: tokens per block.

    Returns:
        (S, H, orders), mean over the batch.
    """
    found = []
    for name in CANDIDATE_ORDERS:
        order = token_orders(query, key, grid_thw=grid_thw, orders=name, block_size=block_size)
        tokens = gather_tokens(query, order.query), gather_tokens(key, order.key)
        scores = block_scores(*(block_statistics(x, block_size) for x in tokens))
        mass = block_mass(query, key, order, block_size=block_size, scale=query.shape[-1] ** -0.5)
        kept = [kept_blocks(scores.shape[-1], density) for density in densities]
        found.append(torch.stack([kept_share(mass, select_blocks(scores, k), None).mean(0) for k in kept]))
    return torch.stack(found, dim=-1)


class Hindsight:
    """Collects recalls during a dense run, then gives the best orders for each density."""

    def __init__(self, densities: Sequence[float], block_size: int) -> None:
        self._densities, self._block_size = list(densities), block_size
        self._sums: dict[str, torch.Tensor] = {}

    @contextmanager
    def watching(self, pipe: Any, steps: Sequence[int]) -> Iterator[None]:
        """Measure in a `with` block around the dense run, in these steps."""
        with observe_attention(pipe, self._add, steps=steps):
            yield

    def table(self, density: float) -> OrdersTable:
        """Return the order with the largest mean recall for each head."""
        number = self._densities.index(density)
        table: OrdersTable = {}
        for layer, sums in self._sums.items():
            transformer, name = layer.split(".", 1)
            best = sums[number].argmax(dim=-1).tolist()
            table.setdefault(transformer, {})[name] = [CANDIDATE_ORDERS[order] for order in best]
        return table

    def _add(self, call: AttentionCall) -> None:
        recall = recall_of_orders(
            call.query, call.key, grid_thw=call.grid_thw, densities=self._densities, block_size=self._block_size
        )
        before = self._sums.get(call.layer)
        self._sums[call.layer] = recall if before is None else before + recall
