"""Selections to compare BA-Att with: the exact one, other methods' estimates, chance.

Each is a `CustomSelection`: order, budget and attention around it are those of BA-Att.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import UserInputError
from ..kernels.ba_att import (
    CustomSelection,
    TokenOrders,
    block_scores,
    block_statistics,
    residual_scores,
    select_blocks,
    token_orders,
)
from ..kernels.ba_att.ordering import Grid
from .mass import block_mass

# Logits held at a time by the anti-diagonal sampling (256 MiB in fp32).
_CHUNK = 1 << 26


def oracle() -> CustomSelection:
    """Keep the blocks with the largest exact attention mass: the upper bound of every score in the same order."""

    def select(
        query: torch.Tensor, key: torch.Tensor, *, kept: int, block_size: int, scale: float
    ) -> tuple[torch.Tensor, None]:
        mass = block_mass(query, key, TokenOrders(None, None), block_size=block_size, scale=scale)
        return select_blocks(mass, kept), None

    return CustomSelection(select=select)


def random_blocks(seed: int) -> CustomSelection:
    """Keep blocks drawn at random for every row, anew in every call: chance."""
    rng = torch.Generator("cpu").manual_seed(seed)

    def select(
        query: torch.Tensor, key: torch.Tensor, *, kept: int, block_size: int, scale: float
    ) -> tuple[torch.Tensor, None]:
        rows, columns = (-(-x.shape[2] // block_size) for x in (query, key))
        draws = torch.rand((*query.shape[:2], rows, columns), generator=rng)
        return select_blocks(draws.to(query.device), kept), None

    return CustomSelection(select=select)


def antidiagonal(stride: int) -> CustomSelection:
    """Score blocks by the sum of the logits on anti-diagonals, `stride` tokens apart (XAttention, arXiv 2503.16428).

    Groups of `stride` tokens attend to groups: the logit of two groups is the mean of the `stride` products on the
    anti-diagonal between them, its softmax over all groups is summed by blocks. Costs 1 / `stride` of the dense scores.

    Args:
        stride: divides the block size.
    """

    def select(
        query: torch.Tensor, key: torch.Tensor, *, kept: int, block_size: int, scale: float
    ) -> tuple[torch.Tensor, None]:
        return select_blocks(_antidiagonal_mass(query, key, stride, block_size, scale), kept), None

    return CustomSelection(select=select)


def head_budgets() -> CustomSelection:
    """Share the blocks of a layer among its heads by predicted gain; the total stays that of equal budgets.

    Blocks are ranked by `residual_scores`, the part of the attention that the means of a skipped block would miss. That
    of the k-th best block over all predicted mass of the row, averaged over the rows, is what a head gains by a k-th
    block. These gains fall with k, so taking the largest of all heads maximises the gain of the layer.
    """

    def select(
        query: torch.Tensor, key: torch.Tensor, *, kept: int, block_size: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        statistics = block_statistics(query, block_size), block_statistics(key, block_size)
        log_total = block_scores(*statistics, scale=scale).logsumexp(dim=-1)
        return select_by_head(residual_scores(*statistics, scale=scale), log_total, kept)

    return CustomSelection(select=select)


def select_by_head(scores: torch.Tensor, log_total: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select as `head_budgets` says, `kept` blocks per row on average over the heads.

    Args:
        scores: (B, H, Nq, Nk), logs of what each block is worth.
        log_total: (B, H, Nq), log of what that is a share of.
        kept: 1..Nk.

    Returns:
        int32 (B, H, Nq, K) ascending, entries past the count to be ignored; int32 (B, H, Nq), one count for each head.
    """
    batch, heads, rows, columns = scores.shape
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True)
    gain = (ranked.values - log_total[..., None]).exp().mean(dim=2)  # (B, H, Nk)
    gain[..., 0] = torch.inf  # every row keeps a block
    best = gain.flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, : heads * kept]
    taken = torch.zeros(batch, heads * columns, dtype=torch.int32, device=scores.device)
    count = taken.scatter_(1, best, 1).view(batch, heads, columns).sum(-1, dtype=torch.int32)
    position = torch.arange(columns, device=scores.device)
    index = torch.where(position < count[..., None, None], ranked.indices, columns)
    index = index.sort(dim=-1).values.clamp(max=columns - 1).to(torch.int32)
    return index, count[..., None].expand(batch, heads, rows).contiguous()


def one_sided_sort(side: str) -> CustomSelection:
    """Sort by norm the queries alone or the keys alone, ascending; the other side stays in raster order.

    Args:
        side: "query" or "key".
    """

    def order(query: torch.Tensor, key: torch.Tensor, grid_thw: Grid | None) -> TokenOrders:
        both = token_orders(query, key, grid_thw=grid_thw, orders="norm_sort", descending=False)
        return TokenOrders(both.query, None) if side == "query" else TokenOrders(None, both.key)

    return CustomSelection(order=order)


def _antidiagonal_mass(
    query: torch.Tensor, key: torch.Tensor, stride: int, block_size: int, scale: float
) -> torch.Tensor:
    """Predicted mass by block, (B, H, Nq, Nk)."""
    if block_size % stride:
        raise UserInputError(f"stride must divide the block size {block_size}, got {stride}")
    batch, heads = query.shape[:2]
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    left = _groups(query, stride).flip(3).flatten(3).float() * (scale / stride)  # (B, H, G, stride * D)
    right = _groups(key, stride).flatten(3).float()
    size = (key.shape[2] - stride * torch.arange(right.shape[2], device=key.device)).clamp(max=stride)
    per_block = block_size // stride
    groups_at_once = per_block * max(1, _CHUNK // (batch * heads * per_block * right.shape[2]))
    masses = []
    for rows in left.split(groups_at_once, dim=2):
        weights = torch.softmax(rows @ right.transpose(-1, -2) + size.float().log(), dim=-1)
        masses.append(_sum_runs(_sum_runs(weights, per_block, -1), per_block, -2))
    return torch.cat(masses, dim=2)


def _groups(tokens: torch.Tensor, stride: int) -> torch.Tensor:
    """Cut (B, H, L, D) into (B, H, G, stride, D); a short last group repeats its last token."""
    missing = -tokens.shape[2] % stride
    if missing:
        tokens = torch.cat([tokens, tokens[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
    return tokens.unflatten(2, (-1, stride))


def _sum_runs(values: torch.Tensor, run: int, dim: int) -> torch.Tensor:
    """Sum consecutive runs along a dimension; the last may be short."""
    values = values.movedim(dim, -1)
    values = F.pad(values, (0, -values.shape[-1] % run))
    return values.unflatten(-1, (-1, run)).sum(-1).movedim(-1, dim)
