"""Sizes of the pyramid: tokens per level, raw tokens under a token, and how many levels a length gets.

Notation of the folder: B, H, L, D batch, heads, tokens, channels of a head; S block size; M levels; level 0 holds the
raw tokens, and n_l = ceil(n_(l-1) / S) tokens stand at level l.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UserInputError

MAX_LEVELS = 4

# From these lengths on, `levels="auto"` takes two and three levels. Two are the faster at 16,384 tokens already, but a
# pixel DiT trained there with one drew closer to its data (benchmarks/results/h200/pixel_dit_study.json).
_AUTO_TWO, _AUTO_THREE = 16_385, 262_144


def level_lengths(length: int, block_size: int, levels: int) -> list[int]:
    """Return n_0 .. n_M for `length` raw tokens."""
    lengths = [length]
    for _ in range(levels):
        lengths.append(-(-lengths[-1] // block_size))
    return lengths


def token_counts(length: int, block_size: int, level: int, device: torch.device | str = "cpu") -> Tensor:
    """Return how many raw tokens stand under each token of a level: `(n_l,)` int64, S^l but for the last one."""
    span = block_size**level
    first = torch.arange(0, length, span, device=device)
    return (length - first).clamp(max=span)


def most_levels(length: int, block_size: int) -> int:
    """Return the number of levels after which one token is left, at least 1 and at most `MAX_LEVELS`."""
    levels = 1
    while levels < MAX_LEVELS and block_size**levels < length:
        levels += 1
    return levels


def resolve_levels(levels: int | str, length: int, block_size: int) -> int:
    """Return M for a length.

    Args:
        levels: an int in [1, 4], "auto" (1 up to 16,384 tokens, 2 below 262,144, else 3) or "paper"
            (floor(log_S L) - 1, at least 1: arXiv 2512.16615). The two names never ask for more than fits.
        length: L.
        block_size: S.

    Raises:
        UserInputError: an int that is out of range, or that pools one token again; a length or block size that is none.
    """
    if length < 1:
        raise UserInputError(f"length must be at least 1, got {length}")
    if block_size < 2:  # its powers never reach the length
        raise UserInputError(f"block_size must be at least 2, got {block_size}")
    most = most_levels(length, block_size)
    if levels == "auto":
        return min(most, 1 if length < _AUTO_TWO else 2 if length < _AUTO_THREE else 3)
    if levels == "paper":
        whole = 0
        while block_size ** (whole + 1) <= length:
            whole += 1
        return min(most, max(1, whole - 1))
    if type(levels) is not int or not 1 <= levels <= MAX_LEVELS:
        raise UserInputError(f'levels must be an int in [1, {MAX_LEVELS}], "auto" or "paper", got {levels!r}')
    # A sequence of less than one block is attended densely, whatever is asked for.
    if levels > most and length >= block_size:
        raise UserInputError(
            f"levels must be at most {most} for {length} tokens in blocks of {block_size} (one token is left then), "
            f"got {levels}"
        )
    return min(levels, most)


def kept_per_level(topk: int | Sequence[int], lengths: Sequence[int], block_size: int) -> list[int]:
    """Return K_1 .. K_M: `topk`, but no more than there can be candidates.

    Args:
        topk: one int for all levels, or one per level 1..M.
        lengths: n_0 .. n_M.
        block_size: S; the candidates of a level are the children of what the level above keeps.
    """
    levels = len(lengths) - 1
    wanted = [topk] * levels if isinstance(topk, int) else list(topk)
    kept = [min(wanted[-1], lengths[-1])]
    for level in range(levels - 1, 0, -1):
        kept.insert(0, min(wanted[level - 1], block_size * kept[0], lengths[level]))
    return kept
