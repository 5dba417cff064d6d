"""Tiles of the fused steps of BA-Att on a GPU: a line or two per step, from the measurements on an H200.

The figures are in `benchmarks/results/h200/ba_att_steps.json`; `benchmarks/ba_att_steps.py` takes them.
"""

from typing import NamedTuple

__all__ = ["FORMS", "CentroidTile", "Forms", "GatherTile", "ScoreTile", "WindowTile"]


class GatherTile(NamedTuple):
    """How blocks of tokens are gathered and their moments taken.

    Args:
        num_warps: of a program, for a block of 128 tokens.
        channels: of a program, a power of two; more are split among programs.
    """

    num_warps: int
    channels: int


class ScoreTile(NamedTuple):
    """Query blocks, key blocks and channels per step of the product of the scores."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


class CentroidTile(NamedTuple):
    """How skipped blocks are added.

    Args:
        block_m: queries of a program.
        block_n: skipped blocks per step.
        registers: at most so many per thread.
        ahead: means are fetched two steps before they are used (`skipped_ahead_kernel`).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int | None
    ahead: bool = False


class WindowTile(NamedTuple):
    """Tokens of a program, and tokens per step that they are compared with, of the order of windows."""

    block_m: int
    block_n: int
    num_warps: int


class Forms(NamedTuple):
    """The tile of each step.

    Args:
        gather: of queries and keys, with mean and variance.
        gather_means: of values, with the mean alone.
        scores: of the product of the scores. One of 128 query blocks is as fast, but takes more shared memory than many
            GPUs have.
        select_warps: of a row of 1,024 blocks in the choice of blocks.
        centroids: of the compensation on GPUs of compute capability 9.0; the fastest at 50, 75 and 90 % skipped.
        centroids_elsewhere: of the compensation on others, where fetching ahead takes more registers than there are.
        windows: of the rank in a window by counting.
    """

    gather: GatherTile = GatherTile(2, 64)
    gather_means: GatherTile = GatherTile(4, 128)
    scores: ScoreTile = ScoreTile(64, 64, 32, 4, 3)
    select_warps: int = 2
    centroids: CentroidTile = CentroidTile(64, 32, 4, 2, 128, ahead=True)
    centroids_elsewhere: CentroidTile = CentroidTile(64, 32, 4, 3, None)
    windows: WindowTile = WindowTile(32, 32, 4)


# Read when a step runs or is compiled: set it before.
FORMS = Forms()
