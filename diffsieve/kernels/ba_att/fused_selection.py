"""Scores and choice of blocks as Triton kernels, and the choice by heads with budgets of their own.

Shapes: B batch, H query heads, Hkv key heads, Nq and Nk blocks, D channels.
"""

import torch

from ..custom_ops import custom_op
from . import forms
from .budgets import check_budgets
from .scores import mean_key
from .selection import select_blocks_by_head, skipped_blocks
from .statistics import BlockStatistics

__all__ = ["list_blocks_by_head", "list_blocks_fused", "score_blocks_fused", "selects"]

# Scores of one row that a program holds in registers.
_MAX_COLUMNS = 16_384


def selects(num_key: int) -> bool:
    """Whether the kernels of the selection serve so many key blocks."""
    return num_key <= _MAX_COLUMNS


def score_blocks_fused(
    score: str,
    query: BlockStatistics,
    key: BlockStatistics,
    *,
    beta: float,
    center_keys: bool,
    log_count: bool,
    second_order: bool,
    scale: float,
) -> torch.Tensor:
    """`scores.block_scores` ("moments") or `scores.residual_scores` of fp32 statistics, without a gradient."""
    centre = mean_key(key) if center_keys else torch.zeros_like(key.mean[:, :, :1])
    out: torch.Tensor = _score_blocks_op(
        query.mean, query.variance, key.mean, key.variance, key.size, centre,
        float(beta), log_count, second_order, score == "residual", float(scale),
    )  # fmt: skip
    return out


def list_blocks_fused(scores: torch.Tensor, kept: int, *, return_skipped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`selection.select_blocks` of fp32 scores (..., Nk), with its rule for ties, and the list of the other blocks.

    Returns:
        int32 (..., kept) and (..., Nk - kept), both ascending; the second is empty unless asked for.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _list_blocks_op(scores, kept, return_skipped)
    return found


def list_blocks_by_head(
    scores: torch.Tensor, budgets: torch.Tensor, *, return_skipped: bool, fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the best key blocks of every row, as many as its head has, and the other blocks.

    Args:
        scores: fp32 (B, H, Nq, Nk), as in `selection.select_blocks`.
        budgets: int64 or int32 (H,) on the CPU, each in [1, Nk]; their values are read when it runs.
        return_skipped: whether to list the other blocks too.
        fused: by a Triton kernel; see `selects`.

    Returns:
        int32 (B, H, Nq, Nk) and (B, H, Nq): the kept blocks, ascending, and how many; later entries hold Nk - 1. Then
        the same of the skipped blocks, empty unless asked for.

    Raises:
        UserInputError: a budget is out of its range.
    """
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _list_blocks_by_head_op(
        scores, budgets, return_skipped, fused
    )
    return found


@custom_op("diffsieve::score_blocks")
def _score_blocks_op(
    query_mean: torch.Tensor,
    query_variance: torch.Tensor,
    key_mean: torch.Tensor,
    key_variance: torch.Tensor,
    key_size: torch.Tensor,
    centre: torch.Tensor,
    beta: float,
    log_count: bool,
    second_order: bool,
    residual: bool,
    scale: float,
) -> torch.Tensor:
    from .scores_triton import split_scores_triton

    inputs = (query_mean, query_variance, key_mean, key_variance, key_size, centre)
    return split_scores_triton(
        *inputs, beta=beta, log_count=log_count, second_order=second_order, residual=residual, scale=scale,
        tile=forms.FORMS.scores,
    )  # fmt: skip


@torch.library.register_fake("diffsieve::score_blocks")
def _(query_mean: torch.Tensor, query_variance: torch.Tensor, key_mean: torch.Tensor, *_: object) -> torch.Tensor:
    return query_mean.new_empty((*query_mean.shape[:3], key_mean.shape[2]))


@custom_op("diffsieve::list_blocks")
def _list_blocks_op(scores: torch.Tensor, kept: int, return_skipped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from .lists_triton import list_blocks_triton

    return list_blocks_triton(scores, kept, return_skipped=return_skipped, num_warps=forms.FORMS.select_warps)


@torch.library.register_fake("diffsieve::list_blocks")
def _(scores: torch.Tensor, kept: int, return_skipped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, num_key = scores.shape[:-1], scores.shape[-1]
    index = scores.new_empty((*rows, kept), dtype=torch.int32)
    return index, scores.new_empty((*rows, num_key - kept) if return_skipped else (0,), dtype=torch.int32)


# Opaque to the compiler for the reasons of `ordering._head_orders_op`.
@custom_op("diffsieve::list_blocks_by_head", tags=(torch.Tag.cudagraph_unsafe,))
def _list_blocks_by_head_op(
    scores: torch.Tensor, budgets: torch.Tensor, return_skipped: bool, fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_budgets(budgets.tolist(), scores.shape[-1])
    # Nobody waits for so few bytes: they are staged before the call returns.
    on_device = budgets.to(scores.device, torch.int32, non_blocking=True)
    if fused:
        from .lists_triton import list_blocks_by_head_triton

        return list_blocks_by_head_triton(
            scores, on_device, return_skipped=return_skipped, num_warps=forms.FORMS.select_warps
        )
    index, count = select_blocks_by_head(scores, on_device)
    nothing = count.new_empty(0)
    if not return_skipped:
        return index, count, nothing, nothing.clone()
    skipped, skipped_count = skipped_blocks(index, count, scores.shape[-1])
    assert skipped_count is not None
    past = torch.arange(scores.shape[-1], device=scores.device) >= skipped_count[..., None]
    return index, count, skipped.masked_fill(past, scores.shape[-1] - 1), skipped_count


@torch.library.register_fake("diffsieve::list_blocks_by_head")
def _(
    scores: torch.Tensor, budgets: torch.Tensor, return_skipped: bool, fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    index = scores.new_empty(scores.shape, dtype=torch.int32)
    count = scores.new_empty(scores.shape[:-1], dtype=torch.int32)
    if return_skipped:
        return index, count, torch.empty_like(index), torch.empty_like(count)
    return index, count, index.new_empty(0), index.new_empty(0)
