"""An order or a selection from outside in place of BA-Att's own: the seam for research and for other methods."""

from dataclasses import dataclass
from typing import Protocol

import torch

from .ordering import Grid, TokenOrders

__all__ = ["BlockOrder", "BlockSelector", "CustomSelection"]


class BlockOrder(Protocol):
    """Gives the permutations of queries (B, H, L, D) and keys (B, Hkv, L, D)."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, grid_thw: Grid | None) -> TokenOrders: ...


class BlockSelector(Protocol):
    """Gives int32 kept key blocks (B, H, Nq, K), ascending, and valid counts (B, H, Nq) or `None` for all K.

    `query` and `key` come in the token order of the blocks; `kept` blocks per row is what the density asks for.
    """

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, *, kept: int, block_size: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


@dataclass(frozen=True)
class CustomSelection:
    """What replaces a step of BA-Att; `None` keeps BA-Att's own. All else (gather, attention, counts) stays the same.

    Args:
        order: in place of `token_orders`.
        select: in place of statistics, scores and top-k.
    """

    order: BlockOrder | None = None
    select: BlockSelector | None = None
