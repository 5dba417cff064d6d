"""Which token order suits which head, measured on a few query blocks with exact attention."""

from collections.abc import Sequence
from typing import Literal

import torch

from diffsieve.errors import UserInputError

from ..block_sparse import choose_backend
from .fused import fuses, gather_with_statistics
from .ordering import CANDIDATE_ORDERS, NEEDS_GRID, Grid, gather_tokens, token_orders
from .scores import score_blocks
from .selection import kept_blocks, select_blocks
from .statistics import block_statistics, split_blocks

__all__ = ["calibrate_orders", "choose_orders"]

# Attention weights of (probe rows x keys) held at a time (256 MiB in fp32).
_CHUNK = 1 << 26


def calibrate_orders(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    grid_thw: Grid | None,
    density: float,
    block_size: int = 128,
    beta: float = 0.5,
    center_keys: bool = True,
    log_count: bool = True,
    descending: bool = True,
    window: int | None = None,
    second_order: bool = True,
    score: Literal["moments", "residual", "halfk"] = "moments",
    text_prefix: int = 0,
    text_suffix: int = 0,
    scale: float | None = None,
    probe_blocks: int = 4,
    backend: str = "auto",
) -> torch.Tensor:
    """Measure, per head and candidate order, the attention mass that the order's own selection keeps.

    `probe_blocks` whole query blocks, spread evenly over the sequence in that order, attend to all keys exactly; the
    recall is the share of their mass inside the key blocks that the selection keeps for them. Costs about
    candidates * probe_blocks * block_size / (2 L) of one dense attention. Deterministic.

    Args:
        query: (B, H, L, D), after RoPE.
        key: (B, Hkv, L, D), after RoPE.
        probe_blocks: query blocks measured per candidate, at least 1.
        text_prefix: text tokens before the video tokens; left out of the measurement, as are
        text_suffix: text tokens after the video tokens.
        backend: that of the attention; with "torch" or "reference" no Triton kernel is used here either.
        grid_thw: as in `ba_attention`, like all other arguments.

    Returns:
        (H, 5) fp32 in [0, 1], mean over the batch (the branches of guidance), in the order of `CANDIDATE_ORDERS`; -inf
        where a candidate needs a grid and there is none.

    Raises:
        UserInputError: `density` or `probe_blocks` out of range, or as `token_orders` (not checked while compiling).
    """
    if not torch.compiler.is_compiling():
        if not 0 < density <= 1:
            raise UserInputError(f"density must be in (0, 1], got {density}")
        if probe_blocks < 1:
            raise UserInputError(f"probe_blocks must be at least 1, got {probe_blocks}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _calibrate_op(
        query.detach(),
        key.detach(),
        grid_thw,
        density,
        block_size,
        beta,
        center_keys,
        log_count,
        descending,
        window,
        second_order,
        score,
        text_prefix,
        text_suffix,
        scale,
        probe_blocks,
        backend,
    )


def choose_orders(recall: torch.Tensor, tie_margin: float = 0.005) -> torch.Tensor:
    """Choose the order of each head: the earliest candidate whose recall is less than `tie_margin` below the best.

    Args:
        recall: (H, C), from `calibrate_orders`.
        tie_margin: differences below it count as ties; recall units.

    Returns:
        (H,) int64 ids. A head whose recall holds NaN gets id 0.
    """
    best = recall.max(dim=-1, keepdim=True).values
    good = (best - recall < tie_margin) | (recall == best)
    return good.int().argmax(dim=-1)


# An operation of its own: it runs once a generation, and traced it would be hundreds of nodes per layer to compile.
@torch.library.custom_op("diffsieve::calibrate_orders", mutates_args=())
def _calibrate_op(
    query: torch.Tensor,
    key: torch.Tensor,
    grid: Sequence[int] | None,
    density: float,
    block_size: int,
    beta: float,
    center_keys: bool,
    log_count: bool,
    descending: bool,
    window: int | None,
    second_order: bool,
    score: str,
    text_prefix: int,
    text_suffix: int,
    scale: float,
    probe_blocks: int,
    backend: str,
) -> torch.Tensor:
    grid_thw = None if grid is None else (grid[0], grid[1], grid[2])
    video = slice(text_prefix, query.shape[2] - text_suffix)
    query, key = query[:, :, video], key[:, :, video]
    heads, length = query.shape[1:3]
    chosen = choose_backend(query, key, block_size=block_size, backend=backend).name
    fused = chosen not in ("torch", "reference") and fuses(key, block_size)
    rows = min(block_size, length)
    probes = _probe_positions(length, rows, probe_blocks, query.device)
    mass_of: dict[str, torch.Tensor] = {}
    recalls = []
    for name in CANDIDATE_ORDERS:
        if grid_thw is None and name in NEEDS_GRID:
            recalls.append(torch.full((heads,), -torch.inf, device=query.device))
            continue
        order = token_orders(
            query,
            key,
            grid_thw=grid_thw,
            orders=name,
            block_size=block_size,
            window=window,
            descending=descending,
            fused=fused,
        )
        ordered_key, key_stats = gather_with_statistics(key, order.key, block_size, fused=fused)
        probe_rows = probes if order.query is None else order.query[..., probes]
        probe_query = gather_tokens(query, probe_rows)
        scores = score_blocks(
            score,
            block_statistics(probe_query, rows),
            key_stats,
            ordered_key,
            block_size,
            beta=beta,
            center_keys=center_keys,
            log_count=log_count,
            second_order=second_order,
            scale=scale,
        )
        kept = select_blocks(scores, kept_blocks(scores.shape[-1], density))

        walk = "hilbert" if name == "hilbert_window" else name  # the two share their query order
        if walk not in mass_of:
            mass_of[walk] = _attention_mass(probe_query, key, rows, scale)
        by_block = _sum_blocks(_ordered_mass(mass_of[walk], order.key), block_size)
        recalls.append(by_block.gather(-1, kept.long()).sum(-1).mean((0, 2)).float())
    return torch.stack(recalls, dim=1)


@_calibrate_op.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((query.shape[1], len(CANDIDATE_ORDERS)), dtype=torch.float32)


def _probe_positions(length: int, rows: int, probe_blocks: int, device: torch.device) -> torch.Tensor:
    """Positions of the tokens of the probe blocks, (R * rows,): the middles of R equal parts, whole blocks only."""
    whole = length // rows
    count = min(probe_blocks, whole)
    block = (2 * torch.arange(count, device=device) + 1) * whole // (2 * count)
    return (block[:, None] * rows + torch.arange(rows, device=device)).flatten()


def _attention_mass(probe_query: torch.Tensor, key: torch.Tensor, rows: int, scale: float) -> torch.Tensor:
    """Mean attention weight that each probe block pays to each key, (B, H, R, L)."""
    batch, heads = probe_query.shape[:2]
    dtype = torch.promote_types(key.dtype, torch.float32)
    group = heads // key.shape[1]
    heads_at_once = max(1, _CHUNK // (batch * rows * key.shape[2]))
    parts = []
    for head in range(0, heads, heads_at_once):
        queries = probe_query[:, head : head + heads_at_once].to(dtype) * scale
        source = torch.arange(head, head + queries.shape[1], device=key.device) // group
        keys = key.index_select(1, source).to(dtype).transpose(-1, -2)
        blocks = queries.split(rows, dim=2)
        parts.append(torch.stack([torch.softmax(block @ keys, dim=-1).mean(dim=2) for block in blocks], dim=2))
    return torch.cat(parts, dim=1)


def _ordered_mass(mass: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    if perm is None:
        return mass
    if perm.dim() == 1:
        return mass.index_select(-1, perm)
    perm = perm.repeat_interleave(mass.shape[1] // perm.shape[1], dim=1)
    return mass.gather(-1, perm[:, :, None].expand_as(mass))


def _sum_blocks(mass: torch.Tensor, block_size: int) -> torch.Tensor:
    whole, tail = split_blocks(mass.transpose(-1, -2), block_size)
    sums = torch.cat([whole.sum(dim=3), tail.sum(dim=2, keepdim=True)], dim=2) if tail.shape[2] else whole.sum(dim=3)
    return sums.transpose(-1, -2)
