"""Tile sizes of the Triton forward kernel, one explicit row per kind of GPU, head dimension and element size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """How one program of the kernel is cut and scheduled.

    Args:
        block_m: queries per program, a power of two, at most the block size.
        block_n: keys per step, a power of two, at most the block size.
        num_warps: warps per program.
        num_stages: depth of the software pipeline. Keys and values wait for the block index, which takes stages of
            its own: 2 to 4 stages hold two steps in shared memory, 5 stages three.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Architecture and padded head dimension -> tile for elements of 16 bits.
# "sm90": Hopper and data-centre Blackwell (228 KiB of shared memory). "sm80": A100 (164 KiB).
# "small": GPUs with at most 99 KiB of shared memory per program (sm_86, sm_89, sm_120).
_TILES_16_BIT = {
    ("sm90", 32): TileConfig(128, 64, 4, 3),
    ("sm90", 64): TileConfig(128, 128, 4, 3),
    ("sm90", 128): TileConfig(128, 64, 4, 2),
    ("sm90", 256): TileConfig(128, 64, 8, 2),
    ("sm80", 32): TileConfig(128, 64, 4, 3),
    ("sm80", 64): TileConfig(128, 64, 4, 3),
    ("sm80", 128): TileConfig(128, 64, 8, 3),
    ("sm80", 256): TileConfig(64, 64, 8, 2),
    ("small", 32): TileConfig(128, 64, 4, 3),
    ("small", 64): TileConfig(128, 64, 4, 2),
    ("small", 128): TileConfig(128, 32, 8, 2),
    ("small", 256): TileConfig(64, 32, 8, 1),
}

# fp32 products run without tensor cores: one modest tile per head dimension for every architecture.
_TILES_32_BIT = {
    32: TileConfig(64, 32, 4, 2),
    64: TileConfig(64, 32, 4, 2),
    128: TileConfig(64, 32, 8, 2),
    256: TileConfig(32, 32, 8, 1),
}


def select_tile(capability: tuple[int, int], padded_dim: int, block_size: int, element_size: int) -> TileConfig:
    """The tile for a GPU of this compute capability, capped by the block size.

    Args:
        capability: compute capability, (8, 0) or later.
        padded_dim: head dimension rounded up to a power of two, 16 to 256.
        block_size: tokens per block, a power of two, at least 16.
        element_size: bytes per element, 2 or 4.
    """
    dim = max(32, padded_dim)
    if element_size == 4:
        tile = _TILES_32_BIT[dim]
    elif capability[0] in (9, 10, 11):
        tile = _TILES_16_BIT["sm90", dim]
    elif capability in ((8, 0), (8, 7)):
        tile = _TILES_16_BIT["sm80", dim]
    else:
        tile = _TILES_16_BIT["small", dim]
    return TileConfig(min(tile.block_m, block_size), min(tile.block_n, block_size), tile.num_warps, tile.num_stages)


@dataclass(frozen=True)
class BackwardTile:
    """How one program of a backward kernel is cut and scheduled.

    Args:
        block_m: queries per program (gradient of the queries) or per step (keys and values), a power of two, at most
            the block size.
        block_n: keys per step or per program, likewise.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Kernel and padded head dimension -> tile for elements of 16 bits; they fit the shared memory of every GPU from sm_80.
_BACKWARD_TILES_16_BIT = {
    ("query", 32): BackwardTile(128, 64, 8, 2),
    ("query", 64): BackwardTile(64, 64, 4, 2),
    ("query", 128): BackwardTile(64, 64, 4, 2),
    ("query", 256): BackwardTile(32, 32, 4, 1),
    ("key", 32): BackwardTile(64, 128, 8, 2),
    ("key", 64): BackwardTile(64, 64, 4, 1),
    ("key", 128): BackwardTile(64, 64, 4, 1),
    ("key", 256): BackwardTile(32, 32, 4, 1),
}


def select_backward_tile(kernel: str, padded_dim: int, block_size: int, element_size: int) -> BackwardTile:
    """The tile of a backward kernel, capped by the block size.

    Args:
        kernel: "query" for the gradient of the queries, "key" for those of keys and values.
        padded_dim, block_size, element_size: as in `select_tile`.
    """
    tile = _BACKWARD_TILES_16_BIT[kernel, max(32, padded_dim)]
    if element_size == 4:
        tile = BackwardTile(32, 32, 4, 1)
    return BackwardTile(min(tile.block_m, block_size), min(tile.block_n, block_size), tile.num_warps, tile.num_stages)
