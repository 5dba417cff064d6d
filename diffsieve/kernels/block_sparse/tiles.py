"""Tile sizes of the Triton kernels: one explicit row per kind of GPU, head dimension and element size.

Legend: BM queries per program, BN keys per step, D head dimension padded to a power of two, e bytes per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class TileConfig:
    """How one program of the kernel is cut and scheduled.

    Args:
        block_m: queries per program, a power of two, at most the block size.
        block_n: keys per step, a power of two, at most the block size.
        num_warps: warps per program.
        num_stages: depth of the software pipeline. Keys and values wait for the block index, which takes stages of
            its own: see `shared_bytes`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def capped(self, block_size: int) -> TileConfig:
        """The same for blocks of that many tokens, which a program and a step may not exceed."""
        return TileConfig(min(self.block_m, block_size), min(self.block_n, block_size), self.num_warps, self.num_stages)


# Shared memory that one program may use, in bytes: CUDA programming guide, technical specifications per capability.
_SHARED_BYTES = {"sm80": 163 * 1024, "sm86": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024, "sm120": 99 * 1024}

# Architecture and padded head dimension -> tile for elements of 16 bits. D 64 and 128 of sm90 were measured on an H200.
# The others are not: they spill few registers or none, and up to D 128 leave room for two programs per multiprocessor.
_TILES_16_BIT = {
    ("sm80", 32): TileConfig(128, 64, 4, 3),
    ("sm80", 64): TileConfig(128, 64, 4, 3),
    ("sm80", 128): TileConfig(128, 64, 8, 3),
    ("sm80", 256): TileConfig(64, 64, 8, 2),
    ("sm86", 32): TileConfig(128, 64, 4, 3),
    ("sm86", 64): TileConfig(128, 64, 4, 2),
    ("sm86", 128): TileConfig(128, 32, 8, 2),
    ("sm86", 256): TileConfig(64, 32, 8, 2),
    ("sm90", 32): TileConfig(128, 64, 4, 3),
    ("sm90", 64): TileConfig(128, 128, 4, 3),
    ("sm90", 128): TileConfig(128, 64, 4, 2),
    ("sm90", 256): TileConfig(128, 64, 8, 2),
    ("sm100", 32): TileConfig(128, 64, 4, 3),
    ("sm100", 64): TileConfig(128, 128, 8, 3),
    ("sm100", 128): TileConfig(128, 64, 8, 3),
    ("sm100", 256): TileConfig(128, 64, 8, 2),
    ("sm120", 32): TileConfig(128, 64, 4, 3),
    ("sm120", 64): TileConfig(128, 64, 4, 2),
    ("sm120", 128): TileConfig(128, 32, 8, 2),
    ("sm120", 256): TileConfig(64, 32, 8, 2),
}

# fp32 products run without tensor cores: one modest tile per head dimension for every architecture.
_TILES_32_BIT = {
    32: TileConfig(64, 32, 4, 2),
    64: TileConfig(64, 32, 4, 2),
    128: TileConfig(64, 32, 8, 2),
    256: TileConfig(32, 32, 8, 1),
}

# What `candidates` draws from: queries, keys and warps; stages.
_SHAPES = ((128, 128, 8), (128, 128, 4), (128, 64, 8), (128, 64, 4), (128, 32, 8), (64, 64, 4), (64, 32, 4))
_STAGES = (2, 3, 5)
# Registers per thread that output and logits may take of 255.
_ACCUMULATORS = 192


def architecture(capability: tuple[int, int]) -> str:
    """The rows that a GPU takes: "sm80", "sm86", "sm90", "sm100" or "sm120".

    A capability that is not known takes the rows of the least shared memory.
    """
    major = capability[0]
    if capability in ((8, 0), (8, 7)):
        return "sm80"
    if major == 8:
        return "sm86"
    return {9: "sm90", 10: "sm100", 11: "sm100"}.get(major, "sm120")


def reads_shared(capability: tuple[int, int]) -> bool:
    """Whether tensor cores take their operands from shared memory and work on by themselves (wgmma, tcgen05)."""
    return architecture(capability) in ("sm90", "sm100")


def select_tile(capability: tuple[int, int], padded_dim: int, block_size: int, element_size: int) -> TileConfig:
    """The tile of the table for a GPU of this compute capability, capped by the block size.

    Args:
        capability: compute capability, (8, 0) or later.
        padded_dim: head dimension rounded up to a power of two, 16 to 256.
        block_size: tokens per block, a power of two, at least 16.
        element_size: bytes per element, 2 or 4.
    """
    dim = max(32, padded_dim)
    tile = _TILES_32_BIT[dim] if element_size == 4 else _TILES_16_BIT[architecture(capability), dim]
    return tile.capped(block_size)


def candidates(capability: tuple[int, int], padded_dim: int, block_size: int) -> tuple[TileConfig, ...]:
    """Tiles worth measuring for elements of 16 bits: that of the table first, then others that the GPU has room for.

    Args:
        capability, padded_dim, block_size: as in `select_tile`.
    """
    limit = shared_limit(capability)
    found = [select_tile(capability, padded_dim, block_size, 2)]
    for (rows, keys, warps), stages in product(_SHAPES, _STAGES):
        tile = TileConfig(rows, keys, warps, stages).capped(block_size)
        registers = tile.block_m * (padded_dim + tile.block_n) // (32 * warps)
        fits = registers <= _ACCUMULATORS and shared_bytes(tile, capability, padded_dim, 2) <= limit
        # Tensor cores take 16 rows a warp, those of Hopper and of data-centre Blackwell 64 rows four warps.
        if fits and tile.block_m >= 16 * warps and tile not in found:
            found.append(tile)
    return tuple(found)


def shared_bytes(tile: TileConfig, capability: tuple[int, int], padded_dim: int, element_size: int) -> int:
    """Shared memory that one program takes at most, in bytes.

    `e * D * (BM + 2 * BN * steps)` for the queries and the steps of keys and values that are under way, and 1 KiB for
    barriers and block indices. Three stages of the pipeline make a step, since each step waits for its block index; one
    more is held while tensor cores that work on by themselves (see `reads_shared`) read it.
    The others have the probabilities, `e * BM * BN`, pass through shared memory for some layouts.
    """
    steps = 1 + max(0, tile.num_stages - 2) // 3
    probabilities = 0
    if reads_shared(capability):
        steps += tile.num_stages > 1
    else:
        probabilities = tile.block_m * tile.block_n
    return element_size * (padded_dim * (tile.block_m + 2 * tile.block_n * steps) + probabilities) + 1024


def shared_limit(capability: tuple[int, int]) -> int:
    """Shared memory that one program may use on a GPU of this compute capability, in bytes."""
    return _SHARED_BYTES[architecture(capability)]


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
