"""Scores and choice of blocks as two Triton kernels, behind a switch.

Shapes: B batch, H query heads, Hkv key heads, Nq and Nk blocks, D channels.
"""

import torch

from ..block_sparse import choose_backend
from .scores import mean_key
from .statistics import BlockStatistics

__all__ = ["score_blocks_fused", "select_blocks_fused"]

LEAN = False
"""Whether `ba_attention` takes the leaner kernels where `fused.fuses` holds: scores and selection of this file, norms
and sort of windows in one (`norm_sort_triton`), the compensated output written to its places by the kernel that
computes it, blocks of tokens gathered and scattered with the heads side by side; and whether the calibration multiplies
in 16 bits, to fp32. Results are the same to rounding. Off, because no GPU has run them yet: set it to `True`, before
anything is compiled, to measure them."""

# Scores of one row that a program holds in registers; keys of a window that it sorts.
_MAX_COLUMNS, _MAX_WINDOW = 16_384, 4_096


def selects(num_key: int) -> bool:
    """Whether the kernel of the selection serves so many key blocks."""
    return num_key <= _MAX_COLUMNS


def sorts(key: torch.Tensor, window: int) -> bool:
    """Whether the kernel of the windowed sort serves such keys (B, 1, L, D)."""
    on_gpu = choose_backend(key, key, block_size=16).name != "torch"
    return on_gpu and min(window, key.shape[2]) <= _MAX_WINDOW


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


def select_blocks_fused(scores: torch.Tensor, kept: int, *, return_mask: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`selection.select_blocks` of fp32 scores (..., Nk), with its rule for ties, and its `block_mask`.

    Returns:
        int32 (..., kept), ascending; bool (..., Nk), empty unless asked for.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _select_blocks_op(scores, kept, return_mask)
    return found


@torch.library.custom_op("diffsieve::score_blocks", mutates_args=())
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
    from .selection_triton import block_scores_triton

    return block_scores_triton(
        query_mean, query_variance, key_mean, key_variance, key_size, centre,
        beta=beta, log_count=log_count, second_order=second_order, residual=residual, scale=scale,
    )  # fmt: skip


@_score_blocks_op.register_fake
def _(query_mean: torch.Tensor, query_variance: torch.Tensor, key_mean: torch.Tensor, *_: object) -> torch.Tensor:
    return query_mean.new_empty((*query_mean.shape[:3], key_mean.shape[2]))


@torch.library.custom_op("diffsieve::select_blocks", mutates_args=())
def _select_blocks_op(scores: torch.Tensor, kept: int, return_mask: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from .selection_triton import select_blocks_triton

    return select_blocks_triton(scores, kept, return_mask=return_mask)


@_select_blocks_op.register_fake
def _(scores: torch.Tensor, kept: int, return_mask: bool) -> tuple[torch.Tensor, torch.Tensor]:
    index = scores.new_empty((*scores.shape[:-1], kept), dtype=torch.int32)
    return index, scores.new_empty(scores.shape if return_mask else (0,), dtype=torch.bool)
