"""How many key blocks each head of a layer keeps: what is measured, the choice, and the blocks of a level.

A level i of a head means `kept + i * step` blocks for each of its query blocks, where `kept` is what `density` gives
every head and `step` a fifth of it. Levels that add up to 0 keep the total of the layer. Shapes: H heads, S levels.
"""

import torch

from ...errors import UserInputError

__all__ = ["LEVELS", "blocks_of_level", "budgets_of_levels", "choose_budgets", "measured_blocks"]

LEVELS = (-3, -2, -1, 0, 1, 2, 3)
"""Levels that are chosen from."""

_STEP = 1 / 5
_EQUAL = LEVELS.index(0)
_NEAREST = sorted(range(len(LEVELS)), key=lambda i: abs(LEVELS[i]))
# Measured on captured heads of mini-wan: the logarithm of an error falls evenly enough with the blocks for two numbers
# of them to tell all levels, and errors drift from step to step, so that a head with e times the error of another one
# has e^0.8 times as much on average over later steps. With the errors taken for later ones themselves, the exponent 1,
# some layers came out with three times the error of equal budgets; 3/4 was the best of six.
_LATER = 3 / 4
_MEASURED = (2, 1)
_LEAST_GAIN = 0.02
# Of the largest error of a layer: what is below is rounding.
_ROUNDING = 1e-9


def blocks_of_level(level: int, kept: int) -> int:
    """Return the blocks that a head keeps at a level; they may be out of range.

    Args:
        level: one of `LEVELS`.
        kept: blocks of every head at equal budgets.
    """
    return kept + level * _step(kept)


def measured_blocks(kept: int, num_blocks: int) -> tuple[int, int] | None:
    """Return the two numbers of blocks, as far below `kept` as above, at which `calibrate_budgets` measures.

    `None` where there is no such pair of at least 1 and less than `num_blocks`: budgets stay equal there.
    """
    level = _measured_level(kept, num_blocks)
    return None if level is None else (blocks_of_level(-level, kept), blocks_of_level(level, kept))


def choose_budgets(errors: torch.Tensor, kept: int, num_blocks: int) -> torch.Tensor:
    """Choose levels that add up to 0 and have the smallest expected error, summed over the heads of a layer.

    Args:
        errors: (..., H, 2), |sparse - dense|^2 of each head from `calibrate_budgets`.
        kept: blocks of every head at equal budgets, in [1, num_blocks].
        num_blocks: blocks of the sequence.

    Returns:
        int64 (..., H) on the CPU, each of `LEVELS`. Deterministic; all 0 where no other choice is expected to be 2 %
        better, where nothing was measured, or where the errors of a layer hold NaN.

    Raises:
        UserInputError: errors of another shape, or `kept` out of range.
    """
    if errors.ndim < 2 or errors.shape[-1] != 2 or errors.shape[-2] < 1:
        raise UserInputError(f"errors must have the shape (..., H, 2), got {tuple(errors.shape)}")
    _check_kept(kept, num_blocks)
    cost = expected_errors(errors, kept, num_blocks)
    heads = cost.shape[-2]
    equal = cost[..., _EQUAL].sum(-1)
    # By the sum of the levels so far, from -3 H up: the smallest error, and the level of each head that it takes.
    best = torch.full((*cost.shape[:-2], 2 * _EQUAL * heads + 1), torch.inf, dtype=torch.float64)
    best[..., _EQUAL * heads] = 0.0
    picks = []
    for head in range(heads):
        # The first of equals, which is the nearest to 0.
        ways = torch.stack([_moved(best, LEVELS[i]) + cost[..., head, i : i + 1] for i in _NEAREST])
        best, pick = ways.min(dim=0)
        picks.append(pick)
    place = torch.full((*cost.shape[:-2], 1), _EQUAL * heads)
    levels = torch.tensor([LEVELS[i] for i in _NEAREST])
    chosen = []
    for pick in reversed(picks):
        chosen.append(levels[pick.gather(-1, place)])
        place = place - chosen[-1]
    better = best[..., _EQUAL * heads] < (1 - _LEAST_GAIN) * equal  # false for NaN
    return torch.where(better[..., None], torch.cat(chosen[::-1], dim=-1), 0)


def expected_errors(errors: torch.Tensor, kept: int, num_blocks: int) -> torch.Tensor:
    """Return what errors (..., H, 2) let expect of later steps: fp64 (..., H, S), up to a factor of the layer.

    Infinite at levels of less than one block or more than all; 0 at all others where nothing was measured.
    """
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    counts = torch.tensor([blocks_of_level(level, kept) for level in LEVELS])
    outside = (counts < 1) | (counts > num_blocks)
    level = _measured_level(kept, num_blocks)
    if level is None:
        return torch.zeros(*errors.shape[:-1], len(LEVELS), dtype=torch.float64).masked_fill(outside, torch.inf)
    errors = errors.detach().to("cpu", torch.float64)
    largest = errors.amax((-1, -2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    logs = (errors / largest).clamp(min=_ROUNDING).log()
    middle = logs.mean(-1, keepdim=True)
    slope = ((logs[..., :1] - logs[..., 1:]) / (2 * level)).clamp(min=0.0)
    return (_LATER * middle - slope * levels).exp().masked_fill(outside, torch.inf)


def budgets_of_levels(levels: list[int], kept: int, num_blocks: int) -> list[int]:
    """Return the blocks that each head keeps: `kept` on average, also where the levels were chosen for another `kept`.

    A head whose level is out of range gets the nearest number in range; what that adds to the total is taken from the
    heads with the most blocks, what it leaves of it goes to those with the fewest, a block at a time.

    Args:
        levels: one for each head.
        kept: blocks of every head at equal budgets, in [1, num_blocks].
        num_blocks: blocks of the sequence.

    Raises:
        UserInputError: `kept` out of range.
    """
    _check_kept(kept, num_blocks)
    counts = [min(num_blocks, max(1, blocks_of_level(level, kept))) for level in levels]
    while (left := kept * len(counts) - sum(counts)) != 0:
        head = counts.index(min(counts) if left > 0 else max(counts))
        counts[head] += 1 if left > 0 else -1
    return counts


def check_budgets(values: list[int], num_key: int) -> None:
    """Raise a `UserInputError` unless each is in [1, num_key]."""
    wrong = [value for value in values if not 1 <= value <= num_key]
    if wrong:
        raise UserInputError(f"budgets must hold whole numbers in [1, {num_key}], got {wrong[0]}")


def _check_kept(kept: int, num_blocks: int) -> None:
    if not 1 <= kept <= num_blocks:
        raise UserInputError(f"kept must be in [1, {num_blocks}], the blocks of the sequence, got {kept}")


def _measured_level(kept: int, num_blocks: int) -> int | None:
    """The level above 0 that is measured, and below."""
    return next(
        (i for i in _MEASURED if blocks_of_level(-i, kept) >= 1 and blocks_of_level(i, kept) < num_blocks), None
    )


def _moved(sums: torch.Tensor, level: int) -> torch.Tensor:
    """Move entries along the last dimension by `level` places; infinity comes in."""
    moved = torch.full_like(sums, torch.inf)
    length = sums.shape[-1]
    if abs(level) < length:
        moved[..., max(0, level) : length + min(0, level)] = sums[..., max(0, -level) : length - max(0, level)]
    return moved


def _step(kept: int) -> int:
    return max(1, int(_STEP * kept + 0.5))
