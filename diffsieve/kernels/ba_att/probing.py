"""A few query blocks that attend as a token order and a number of kept blocks make them: what calibrations measure.

Shapes: B batch, H query heads, Hkv key heads, L tokens, D channels, N blocks, R query blocks that are measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..block_sparse import block_sparse_attention, choose_backend
from .centroids import add_centroids
from .fused import fuses, gather_with_means, gather_with_statistics
from .ordering import Grid, Orders, gather_tokens, token_orders
from .scores import score_blocks
from .selection import block_mask, select_blocks
from .statistics import BlockStatistics, block_statistics

__all__ = ["OrderedProbes", "Probes", "probe_count"]

# Query blocks measured for each candidate. Every order has blocks of its own, so that few of them are noisy: with half
# of the blocks kept, 30 captured heads of mini-wan had 0.5 dB more squared error than with their best orders by 7 of 31
# blocks, less than 0.1 dB by all of them. But all blocks of a short sequence cost 6.5 dense calls, more than 11 sparse
# steps of that clip save.
_MOST_PROBES = 32
_LARGEST_SHARE = 1 / 4


def probe_count(length: int, block_size: int) -> int:
    """Query blocks measured where the caller names no number: 32, but at most a quarter of the whole blocks."""
    return max(1, min(_MOST_PROBES, int(length // block_size * _LARGEST_SHARE)))


@dataclass(frozen=True)
class Probes:
    """The tensors of a call without their text, and the settings of the measurement; fields as in `ba_attention`.

    Attributes:
        probe_blocks: query blocks measured.
        scoring: arguments of `score_blocks` beside its tensors, `block_size` and the score.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grid_thw: Grid | None
    block_size: int
    window: int | None
    descending: bool
    compensate: str
    score: str
    scoring: dict[str, Any]
    scale: float
    probe_blocks: int
    backend: str

    @property
    def attend(self) -> Callable[..., Any]:
        """`block_sparse_attention` with these settings."""
        return partial(block_sparse_attention, block_size=self.block_size, scale=self.scale, backend=self.backend)

    def ordered(self, orders: Orders) -> "OrderedProbes":
        """Put the tokens into an order, and score the key blocks for the query blocks that are measured."""
        query, key, value, block_size = self.query, self.key, self.value, self.block_size
        chosen = choose_backend(query, key, block_size=block_size, backend=self.backend).name
        fused = chosen not in ("torch", "reference") and fuses(key, block_size)
        order = token_orders(
            query,
            key,
            grid_thw=self.grid_thw,
            orders=orders,
            block_size=block_size,
            window=self.window,
            descending=self.descending,
            fused=fused,
        )
        ordered_key, key_stats = gather_with_statistics(key, order.key, block_size, fused=fused)
        rows = min(block_size, query.shape[2])
        places = _probe_positions(query.shape[2], rows, self.probe_blocks, query.device)
        tokens = places if order.query is None else order.query[..., places]
        probe_query = gather_tokens(query, tokens)
        scores = score_blocks(
            self.score, block_statistics(probe_query, rows), key_stats, ordered_key, block_size, **self.scoring
        )
        if self.compensate == "centroid":
            ordered_value, value_mean = gather_with_means(value, order.key, block_size, fused=fused)
        else:
            ordered_value, value_mean = gather_tokens(value, order.key), None
        return OrderedProbes(self, tokens, probe_query, ordered_key, key_stats, ordered_value, value_mean, scores)


@dataclass(frozen=True)
class OrderedProbes:
    """The query blocks measured, and all keys, in one token order.

    Attributes:
        tokens: int64 (R * n,) or (B, H, R * n), the token at each place of `query`.
        query: (B, H, R * n, D).
        scores: fp32 (B, H, R, N).
    """

    probes: Probes
    tokens: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    key_stats: BlockStatistics
    value: torch.Tensor
    value_mean: torch.Tensor | None
    scores: torch.Tensor

    def sparse(self, kept: int) -> torch.Tensor:
        """Attention (B, H, R * n, D) over the `kept` best key blocks of each query block, compensated if asked for."""
        probes = self.probes
        blocks = select_blocks(self.scores, kept)
        if self.value_mean is None:
            out: torch.Tensor = probes.attend(self.query, self.key, self.value, blocks)
            return out
        out, lse = probes.attend(self.query, self.key, self.value, blocks, return_lse=True)
        mask = block_mask(blocks, None, self.scores.shape[-1])
        inputs = (out, lse, self.query, self.key_stats.mean, self.value_mean, self.key_stats.size, mask)
        return add_centroids(*inputs, block_size=probes.block_size, scale=probes.scale)[0]

    def dense(self, given: torch.Tensor | None) -> torch.Tensor:
        """Dense attention of the same queries: rows of `given` (B, H, L, D), or computed."""
        if given is not None:
            return gather_tokens(given, self.tokens)
        every = torch.arange(self.scores.shape[-1], dtype=torch.int32, device=self.query.device)
        every = every.expand(self.scores.shape).contiguous()
        out: torch.Tensor = self.probes.attend(self.query, self.probes.key, self.probes.value, every)
        return out


def _probe_positions(length: int, rows: int, probe_blocks: int, device: torch.device) -> torch.Tensor:
    """Positions of the tokens of the probe blocks, (R * rows,): the middles of R equal parts, whole blocks only."""
    whole = length // rows
    count = min(probe_blocks, whole)
    block = (2 * torch.arange(count, device=device) + 1) * whole // (2 * count)
    return (block[:, None] * rows + torch.arange(rows, device=device)).flatten()
