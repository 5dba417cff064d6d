"""The order that suits each head best by a measurement on all rows of chosen steps of the dense run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels.ba_att import CANDIDATE_ORDERS, ba_attention, token_orders
from ..processors import AttentionCall, BAAttConfig, observe_attention
from ..processors.ba_att import kernel_arguments
from .mass import block_mass, kept_share

# Orders of the heads: transformer -> layer -> names.
OrdersTable = dict[str, dict[str, list[str]]]

Losses = Callable[..., torch.Tensor]
"""What each order loses in a call: (S, H, orders) for S densities, mean over the batch."""


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
        errors = []
        for name in CANDIDATE_ORDERS:
            out, _ = _attend(call, name, density, block_size, backend)
            errors.append(((out.float() - dense).norm(dim=(-1, -2)) / size).mean(0))
        found.append(torch.stack(errors, dim=-1))
    return torch.stack(found)


@torch.no_grad()
def mass_lost_by_orders(
    call: AttentionCall, *, densities: Sequence[float], block_size: int, backend: str
) -> torch.Tensor:
    """Measure which share of the exact attention mass every candidate order skips; arguments as `errors_of_orders`."""
    query, key = call.query, call.key
    losses = []
    for name in CANDIDATE_ORDERS:
        order = token_orders(query, key, grid_thw=call.grid_thw, orders=name, block_size=block_size)
        mass = block_mass(query, key, order, block_size=block_size, scale=query.shape[-1] ** -0.5)
        infos = [_attend(call, name, density, block_size, backend)[1] for density in densities]
        losses.append(torch.stack([1 - kept_share(mass, x.block_index, x.block_count).mean(0) for x in infos]))
    return torch.stack(losses, dim=-1)


def _attend(call: AttentionCall, order: str, density: float, block_size: int, backend: str) -> tuple[Any, Any]:
    config = BAAttConfig(density=density, block_size=block_size, backend=backend)
    selection, rest = kernel_arguments(config, second_order=True)
    result = ba_attention(
        call.query,
        call.key,
        call.value,
        grid_thw=call.grid_thw,
        orders=order,
        return_info=True,
        **selection,
        **rest,
    )
    assert isinstance(result, tuple)
    return result


class BestOrders:
    """Adds up what each order loses in the calls of a dense run, then gives the best orders for each density."""

    def __init__(
        self, losses: Losses, steps: Collection[int], densities: Sequence[float], block_size: int, backend: str
    ) -> None:
        """Args: losses: what is measured; steps: in which; densities: at which; the others as in `BAAttConfig`."""
        self.steps = frozenset(steps)
        self._losses, self._densities = losses, list(densities)
        self._block_size, self._backend = block_size, backend
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, call: AttentionCall) -> None:
        """Measure a call, if it is of these steps."""
        if call.step in self.steps:
            losses = self._losses(call, densities=self._densities, block_size=self._block_size, backend=self._backend)
            before = self._sums.get(call.layer)
            self._sums[call.layer] = losses if before is None else before + losses

    def table(self, density: float) -> OrdersTable:
        """Return the order with the smallest mean loss for each head."""
        number = self._densities.index(density)
        table: OrdersTable = {}
        for layer, sums in self._sums.items():
            transformer, name = layer.split(".", 1)
            best = sums[number].argmin(dim=-1).tolist()
            table.setdefault(transformer, {})[name] = [CANDIDATE_ORDERS[order] for order in best]
        return table


@contextmanager
def watching(pipe: Any, watchers: Collection[BestOrders]) -> Iterator[None]:
    """Measure for all of them in a `with` block around the dense run."""

    def tell(call: AttentionCall) -> None:
        for watcher in watchers:
            watcher.add(call)

    if not watchers:
        yield
        return
    with observe_attention(pipe, tell, steps=frozenset().union(*(watcher.steps for watcher in watchers))):
        yield
