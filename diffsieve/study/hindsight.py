"""The order that suits each head best in hindsight: the one whose output is closest to dense in the steps to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels.ba_att import CANDIDATE_ORDERS, ba_attention
from ..processors import AttentionCall, BAAttConfig, observe_attention
from ..processors.ba_att import kernel_arguments

# Orders of the heads: transformer -> layer -> names.
OrdersTable = dict[str, dict[str, list[str]]]


@torch.no_grad()
def errors_of_orders(call: AttentionCall, *, densities: Sequence[float], block_size: int, backend: str) -> torch.Tensor:
    """Measure how far the output of every candidate order is from dense attention, with the preset default.

    Args:
        call: of a layer.
        densities: shares of the blocks kept, S of them.
        block_size: tokens per block.
        backend: of the attention.

    Returns:
        (S, H, orders): distance over the norm of the dense output, mean over the batch.
    """
    query, key, value = call.query, call.key, call.value
    dense = F.scaled_dot_product_attention(query, key, value, enable_gqa=key.shape[1] != query.shape[1]).float()
    size = dense.norm(dim=(-1, -2))
    found = []
    for density in densities:
        config = BAAttConfig(density=density, block_size=block_size, backend=backend)
        selection, rest = kernel_arguments(config, second_order=True)
        errors = []
        for name in CANDIDATE_ORDERS:
            out = ba_attention(query, key, value, grid_thw=call.grid_thw, orders=name, **selection, **rest)
            assert isinstance(out, torch.Tensor)
            errors.append(((out.float() - dense).norm(dim=(-1, -2)) / size).mean(0))
        found.append(torch.stack(errors, dim=-1))
    return torch.stack(found)


class Hindsight:
    """Collects errors during a dense run, then gives the best orders for each density."""

    def __init__(self, densities: Sequence[float], block_size: int, backend: str) -> None:
        self._densities, self._block_size, self._backend = list(densities), block_size, backend
        self._sums: dict[str, torch.Tensor] = {}

    @contextmanager
    def watching(self, pipe: Any, steps: Sequence[int]) -> Iterator[None]:
        """Measure in a `with` block around the dense run, in these steps."""
        with observe_attention(pipe, self._add, steps=steps):
            yield

    def table(self, density: float) -> OrdersTable:
        """Return the order with the smallest mean error for each head."""
        number = self._densities.index(density)
        table: OrdersTable = {}
        for layer, sums in self._sums.items():
            transformer, name = layer.split(".", 1)
            best = sums[number].argmin(dim=-1).tolist()
            table.setdefault(transformer, {})[name] = [CANDIDATE_ORDERS[order] for order in best]
        return table

    def _add(self, call: AttentionCall) -> None:
        errors = errors_of_orders(call, densities=self._densities, block_size=self._block_size, backend=self._backend)
        before = self._sums.get(call.layer)
        self._sums[call.layer] = errors if before is None else before + errors
