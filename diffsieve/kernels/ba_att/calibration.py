"""Which token order suits which head: the one whose output is closest to dense attention on a few query blocks.

Shapes: B batch, H query heads, Hkv key heads, L tokens, D channels, N blocks, R query blocks that are measured.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from diffsieve.errors import UserInputError

from ..autocast import without_autocast
from .checks import check_arguments
from .ordering import CANDIDATE_ORDERS, NEEDS_GRID, Grid
from .probing import Probes, probe_count
from .selection import kept_blocks

__all__ = ["calibrate_orders", "choose_orders"]


def calibrate_orders(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dense: torch.Tensor | None = None,
    grid_thw: Grid | None,
    density: float,
    block_size: int = 128,
    beta: float = 0.5,
    center_keys: bool = True,
    log_count: bool = True,
    descending: bool = True,
    window: int | None = None,
    second_order: bool = True,
    compensate: Literal["none", "centroid"] = "none",
    score: Literal["moments", "residual", "halfk"] = "moments",
    text_prefix: int = 0,
    text_suffix: int = 0,
    scale: float | None = None,
    probe_blocks: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Measure, per head and candidate order, how far the output of that order is from dense attention.

    `probe_blocks` whole query blocks, spread evenly over the sequence in that order, attend to the keys that the order
    makes them keep, with the compensation asked for, and to all keys. Costs about 5 * density * probe_blocks *
    block_size / L of one dense attention, and the sorts; without `dense` 4 + 5 * density in place of that 5 * density.
    Deterministic; autocast changes nothing.

    Args:
        query: (B, H, L, D), after RoPE.
        key: (B, Hkv, L, D), after RoPE.
        value: (B, Hkv, L, D).
        dense: (B, H, L, D), dense attention of these tensors, where the caller has it; without text tokens alone. Of
            any floating dtype: under autocast PyTorch's is not that of the tensors.
        probe_blocks: query blocks measured per candidate, at least 1; by default 32, but at most a quarter of them.
        text_prefix: text tokens before the video tokens; left out of the measurement, as are
        text_suffix: text tokens after the video tokens.
        grid_thw: as in `ba_attention`, like all other arguments.

    Returns:
        (H, 5) fp32, |sparse - dense|^2 / |dense|^2 summed over the rows measured, mean over the batch (the branches of
        guidance), in the order of `CANDIDATE_ORDERS`; infinity where a candidate needs a grid and there is none.

    Raises:
        UserInputError: `probe_blocks` out of range, `dense` not like `query` or given with text tokens, or as
            `ba_attention`; orders and windows that do not fit are found when compiled code runs.
    """
    check_arguments(
        query,
        key,
        value,
        grid_thw=grid_thw,
        density=density,
        block_size=block_size,
        beta=beta,
        center_keys=center_keys,
        log_count=log_count,
        descending=descending,
        window=window,
        second_order=second_order,
        compensate=compensate,
        score=score,
        text_prefix=text_prefix,
        text_suffix=text_suffix,
        scale=scale,
        backend=backend,
    )
    check_probes(probe_blocks, dense, query, text_prefix + text_suffix)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if probe_blocks is None:
        probe_blocks = probe_count(query.shape[2] - text_prefix - text_suffix, block_size)
    return _calibrate_op(
        query.detach(),
        key.detach(),
        value.detach(),
        None if dense is None else dense.detach(),
        grid_thw,
        density,
        block_size,
        beta,
        center_keys,
        log_count,
        descending,
        window,
        second_order,
        compensate,
        score,
        text_prefix,
        text_suffix,
        scale,
        probe_blocks,
        backend,
    )


def check_probes(probe_blocks: Any, dense: Any, query: torch.Tensor, num_text: int) -> None:
    """Raise a `UserInputError` unless these arguments of a calibration fit."""
    if probe_blocks is not None and not (type(probe_blocks) is int and probe_blocks >= 1):
        raise UserInputError(f"probe_blocks must be at least 1, a whole number, or None, got {probe_blocks!r}")
    if dense is None:
        return
    if not isinstance(dense, torch.Tensor):
        raise UserInputError(f"dense must be a tensor or None, got {type(dense).__name__}")
    if dense.shape != query.shape or num_text:
        raise UserInputError(
            f"dense must have the shape of query, {tuple(query.shape)}, and no text tokens beside the video, got "
            f"{tuple(dense.shape)} with {num_text} text tokens"
        )
    if dense.device != query.device:
        raise UserInputError(f"dense must be on {query.device} like query, got {dense.device}")


def choose_orders(errors: torch.Tensor, tie_margin: float = 0.02) -> torch.Tensor:
    """Choose the order of each head: the earliest candidate whose error is at most `tie_margin` above the smallest.

    Args:
        errors: (H, C), from `calibrate_orders`.
        tie_margin: as a share of the smallest error.

    Returns:
        (H,) int64 ids. A head whose errors hold NaN gets id 0.
    """
    smallest = errors.min(dim=-1, keepdim=True).values
    return (errors <= smallest * (1 + tie_margin)).int().argmax(dim=-1)


# An operation of its own: it runs once a generation, and traced it would be hundreds of nodes per layer to compile.
@torch.library.custom_op("diffsieve::calibrate_orders", mutates_args=())
@without_autocast
def _calibrate_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dense: torch.Tensor | None,
    grid: Sequence[int] | None,
    density: float,
    block_size: int,
    beta: float,
    center_keys: bool,
    log_count: bool,
    descending: bool,
    window: int | None,
    second_order: bool,
    compensate: str,
    score: str,
    text_prefix: int,
    text_suffix: int,
    scale: float,
    probe_blocks: int,
    backend: str,
) -> torch.Tensor:
    video = slice(text_prefix, query.shape[2] - text_suffix)
    query, key, value = (x[:, :, video] for x in (query, key, value))
    grid_thw = None if grid is None else (grid[0], grid[1], grid[2])
    scoring = {"beta": beta, "center_keys": center_keys, "log_count": log_count, "second_order": second_order}
    probes = Probes(
        query,
        key,
        value,
        grid_thw=grid_thw,
        block_size=block_size,
        window=window,
        descending=descending,
        compensate=compensate,
        score=score,
        scoring=scoring | {"scale": scale},
        scale=scale,
        probe_blocks=probe_blocks,
        backend=backend,
    )
    kept = kept_blocks(-(-query.shape[2] // block_size), density)
    dense_of: dict[str, torch.Tensor] = {}
    errors = []
    for name in CANDIDATE_ORDERS:
        if grid_thw is None and name in NEEDS_GRID:
            errors.append(torch.full(query.shape[1:2], torch.inf, device=query.device))
            continue
        ordered = probes.ordered(name)
        out = ordered.sparse(kept)
        walk = "hilbert" if name == "hilbert_window" else name  # the two share their query order
        if walk not in dense_of:
            dense_of[walk] = ordered.dense(dense)
        errors.append(_relative_error(out, dense_of[walk]).mean(0))
    return torch.stack(errors, dim=1)


@_calibrate_op.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((query.shape[1], len(CANDIDATE_ORDERS)), dtype=torch.float32)


def _relative_error(out: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    """|out - dense|^2 / |dense|^2 of each head, (B, H) fp32; 0 where both are 0."""
    out, dense = out.float(), dense.float()
    size = dense.square().sum((-1, -2)).clamp(min=torch.finfo(torch.float32).tiny)
    return (out - dense).square().sum((-1, -2)) / size
