"""What each head of a layer loses with fewer and with more blocks: its squared error on a few query blocks.

Shapes: B batch, H query heads, Hkv key heads, L tokens, D channels.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from ..autocast import without_autocast
from .budgets import measured_blocks
from .calibration import check_probes
from .checks import check_arguments
from .ordering import Grid, Orders, normalise_orders
from .probing import Probes, probe_count
from .selection import kept_video_blocks

__all__ = ["calibrate_budgets"]


def calibrate_budgets(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    orders: Orders,
    dense: torch.Tensor | None = None,
    grid_thw: Grid | None = None,
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
    """Measure, per head, how far the output is from dense attention with fewer and with more blocks, in absolute terms.

    `probe_blocks` whole query blocks, spread evenly over the sequence in the order of the head, attend to each
    number of `measured_blocks`, with the compensation asked for, and to all keys. Costs about 2 * density *
    probe_blocks * block_size / L of one dense attention, and one sort; without `dense` 1 + 2 * density in place of that
    2 * density.
    Deterministic; autocast changes nothing.

    Args:
        query: (B, H, L, D), after RoPE.
        key: (B, Hkv, L, D), after RoPE.
        value: (B, Hkv, L, D).
        orders: as in `ba_attention`. Ids may be on the device of the tokens, as they come out of `choose_orders`: then
            nobody waits for them, and all heads are sorted.
        dense: as in `calibrate_orders`.
        probe_blocks: query blocks measured, at least 1; by default 32, but at most a quarter of them.
        text_prefix: text tokens before the video tokens; left out of the measurement, as are
        text_suffix: text tokens after the video tokens. Their blocks count in `density` as in `ba_attention`.
        grid_thw: as in `ba_attention`, like all other arguments.

    Returns:
        (H, 2) fp32, |sparse - dense|^2 summed over the rows measured, mean over the batch (the branches of guidance),
        with fewer blocks, then with more; zeros where there is nothing to measure.

    Raises:
        UserInputError: as `calibrate_orders`; orders and windows that do not fit are found when compiled code runs.
    """
    check_arguments(
        query,
        key,
        value,
        grid_thw=grid_thw,
        orders=orders,
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
    known = normalise_orders(orders)
    name, ids = (known, None) if isinstance(known, str) else ("", known)
    return _calibrate_budgets_op(
        query.detach(),
        key.detach(),
        value.detach(),
        None if dense is None else dense.detach(),
        ids,
        name,
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


# Opaque to the compiler, as that of the orders is; and it reads ids on the CPU, as `ordering._head_orders_op` does.
@torch.library.custom_op("diffsieve::calibrate_budgets", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
@without_autocast
def _calibrate_budgets_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dense: torch.Tensor | None,
    ids: torch.Tensor | None,
    name: str,
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
    num_blocks, text_blocks = -(-query.shape[2] // block_size), -(-(text_prefix + text_suffix) // block_size)
    counts = measured_blocks(kept_video_blocks(num_blocks, text_blocks, density), num_blocks)
    if counts is None:
        return torch.zeros(query.shape[1], 2, device=query.device)
    scoring = {"beta": beta, "center_keys": center_keys, "log_count": log_count, "second_order": second_order}
    ordered = Probes(
        query,
        key,
        value,
        grid_thw=None if grid is None else (grid[0], grid[1], grid[2]),
        block_size=block_size,
        window=window,
        descending=descending,
        compensate=compensate,
        score=score,
        scoring=scoring | {"scale": scale},
        scale=scale,
        probe_blocks=probe_blocks,
        backend=backend,
    ).ordered(name if ids is None else ids)
    expected = ordered.dense(dense).float()
    outputs = (ordered.sparse(count).float() for count in counts)
    return torch.stack([(out - expected).square().sum((-1, -2)).mean(0) for out in outputs], dim=1)


@_calibrate_budgets_op.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((query.shape[1], 2), dtype=torch.float32)
