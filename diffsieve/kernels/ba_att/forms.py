"""Which kernels and tiles the fused steps of BA-Att take on a GPU: one line per step, set by measurement."""

from typing import NamedTuple

__all__ = ["FORMS", "CentroidTile", "Forms", "GatherTile", "ScoreTile", "WindowTile"]


class GatherTile(NamedTuple):
    """How blocks of tokens are gathered and their moments taken.

    Args:
        num_warps: of a program, for a block of 128 tokens of 128 channels.
        one_pass: the variance from the distances to the first token of the block, in the pass that takes the mean,
            instead of from those to the mean in another.
        channels: of a program, a power of two; more are split among programs.
    """

    num_warps: int = 8
    one_pass: bool = False
    channels: int = 128


class ScoreTile(NamedTuple):
    """Query blocks, key blocks and channels per step of the product of the scores."""

    block_m: int = 64
    block_n: int = 64
    block_d: int = 32
    num_warps: int = 4
    num_stages: int = 3


class CentroidTile(NamedTuple):
    """Queries of a program and skipped blocks per step of the compensation; at most so many registers per thread."""

    block_m: int = 128
    block_n: int = 32
    num_warps: int = 8
    num_stages: int = 3
    registers: int | None = 128


class WindowTile(NamedTuple):
    """Tokens of a program, and tokens per step that they are compared with, of the order of windows."""

    block_m: int = 64
    block_n: int = 32
    num_warps: int = 4


class Forms(NamedTuple):
    """The form of each step.

    Args:
        gather: of queries and keys, with mean and variance.
        gather_means: of values, with the mean alone.
        scores: product of factors split beforehand; `None` for the kernel that splits them as it goes.
        select_warps: of a row of 1,024 blocks in the kernel that writes lists of kept and skipped blocks; `None` for
            the one that writes a mask.
        centroids: over the list of the skipped blocks, written to where the tokens came from (needs `select_warps`);
            `None` for the kernel that passes over all blocks with a mask, and one that undoes the order.
        windows: rank by counting; `None` for PyTorch's sort.
        half_logits: the calibration multiplies in 16 bits, to fp32, instead of in fp32; the same but for rounding.
    """

    gather: GatherTile = GatherTile()
    gather_means: GatherTile = GatherTile()
    scores: ScoreTile | None = None
    select_warps: int | None = None
    centroids: CentroidTile | None = None
    windows: WindowTile | None = None
    half_logits: bool = False


# What no GPU has run is not in it. Read when a step runs or is compiled: set it before.
FORMS = Forms()
