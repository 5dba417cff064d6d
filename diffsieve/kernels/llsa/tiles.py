"""Tile sizes of the Triton kernels, explicit rows per head dimension, capped by block size and element size.

`benchmarks/llsa_tiles.py` times the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class QueryTile:
    """A query-major kernel: forward, or the gradient of the queries.

    Args:
        rows: queries per program, a power of two; between max(16, block) and block**2, as those share coarse tokens.
        coarse_n: coarse keys per step, a power of two, at least 16.
        fine_n: raw keys per step and group of queries, a power of two, at least 16.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        max_registers: registers per thread at most, so that more programs fit on a multiprocessor; None for as many as
            the compiler likes.
    """

    rows: int
    coarse_n: int
    fine_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True)
class KeyTile:
    """The key-major kernel: gradients of keys and values of one level.

    Args:
        rows: queries per step, a power of two, at least 16.
        keys: keys per program at the coarsest level, a power of two, at least 16; elsewhere one block.
        swap: queries, not keys, in the rows of the products; the better shape for tensor cores with small blocks.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        max_registers: as for a `QueryTile`.
    """

    rows: int
    keys: int
    swap: bool
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True)
class PoolTile:
    """The kernel of the pyramid.

    Args:
        parents: means at a time, a power of two, at most the block size.
        num_warps: warps per program.
    """

    parents: int
    num_warps: int


@dataclass(frozen=True)
class SelectionTile:
    """The top-k kernel.

    Args:
        block_n: candidates per step, a power of two, at least 16.
        num_warps: warps per program.
    """

    block_n: int
    num_warps: int


# Padded head dimension -> tile, for elements of 16 bits. The rows of 64 were swept on an H200 and the others are
# starting points. The forward of 64 spills (up to 200 bytes on sm_90, 500 on sm_80), but is slower with more registers.
FORWARD = {
    32: QueryTile(64, 64, 32, 4, 3),
    64: QueryTile(64, 64, 32, 4, 2, 128),
    128: QueryTile(64, 64, 16, 4, 2),
    256: QueryTile(64, 32, 16, 8, 1),
}
BACKWARD_QUERY = {
    32: QueryTile(64, 64, 64, 4, 2),
    64: QueryTile(64, 64, 32, 4, 2),
    128: QueryTile(64, 32, 16, 4, 2),
    256: QueryTile(32, 32, 16, 8, 1),
}
BACKWARD_LISTS = {
    32: KeyTile(64, 16, False, 4, 2),
    64: KeyTile(64, 16, False, 2, 2, 128),
    128: KeyTile(64, 16, True, 4, 2),
    256: KeyTile(32, 16, False, 8, 1),
}
BACKWARD_COARSEST = {
    32: KeyTile(64, 64, False, 4, 2),
    64: KeyTile(64, 64, True, 4, 2),
    128: KeyTile(32, 64, False, 8, 2),
    256: KeyTile(32, 32, False, 8, 1),
}
SELECTION = {
    32: SelectionTile(128, 4),
    64: SelectionTile(128, 1),
    128: SelectionTile(128, 4),
    256: SelectionTile(64, 4),
}
SELECTION_COARSEST = SELECTION | {64: SelectionTile(256, 4)}
POOLING = PoolTile(16, 4)


def pool_tile(padded_dim: int, block_size: int) -> PoolTile:
    """The tile of the kernel of the pyramid; arguments as for `forward_tile`. A thread takes eight channels or more."""
    parents = min(POOLING.parents, block_size)
    warps = max(1, min(POOLING.num_warps, parents * padded_dim // 256))
    return PoolTile(parents, warps)


def selection_tile(padded_dim: int, padded_topk: int, *, coarsest: bool) -> SelectionTile:
    """The tile of the top-k kernel.

    Args:
        padded_dim: head dimension rounded up to a power of two, 16 to 256.
        padded_topk: list width rounded up to a power of two.
        coarsest: whether all tokens of the level are candidates, of few rows; elsewhere one list for many rows.
    """
    tile = (SELECTION_COARSEST if coarsest else SELECTION)[max(32, padded_dim)]
    # Long lists are held by more warps.
    return tile if padded_topk <= 16 else SelectionTile(64, 4 if padded_topk <= 256 else 8)


def forward_tile(padded_dim: int, block_size: int, element_size: int) -> QueryTile:
    """The tile of the forward kernel.

    Args:
        padded_dim: head dimension rounded up to a power of two, 16 to 256.
        block_size: tokens per block, a power of two, 8 to 128.
        element_size: bytes per element, 2 or 4.
    """
    return fit_query_tile(FORWARD[max(32, padded_dim)], block_size, element_size)


def backward_query_tile(padded_dim: int, block_size: int, element_size: int) -> QueryTile:
    """The tile of the kernel for the gradient of the queries; arguments as for `forward_tile`."""
    return fit_query_tile(BACKWARD_QUERY[max(32, padded_dim)], block_size, element_size)


def backward_key_tile(
    padded_dim: int, block_size: int, element_size: int, *, coarsest: bool, disjoint: bool = False
) -> KeyTile:
    """The tile of the key-major kernel at the coarsest level or elsewhere; other arguments as for `forward_tile`.

    Args:
        disjoint: whether keys are left out that a query attends through their children. That kernel is not pipelined,
            and with `swap` the assembler of CUDA 12.8 reads an address register that nothing has written (sm_90).
    """
    # A large block is a tile of keys as at the coarsest level, but its size is given: more warps hold it.
    large = block_size >= 64 and not coarsest
    tile = (BACKWARD_COARSEST if coarsest or large else BACKWARD_LISTS)[max(32, padded_dim)]
    if large:
        tile = replace(tile, num_warps=8)
    if disjoint:
        tile = replace(tile, swap=False)
    if element_size == 4:
        tile = replace(tile, rows=min(tile.rows, 32), keys=min(tile.keys, 32), swap=False, num_stages=1)
    return tile


def fit_query_tile(tile: QueryTile, block_size: int, element_size: int) -> QueryTile:
    """Bring `rows` into the range that the block size allows; fp32 has no tensor cores and twice the bytes."""
    if element_size == 4:
        tile = replace(tile, coarse_n=min(tile.coarse_n, 32), fine_n=16, rows=min(tile.rows, 32), num_stages=1)
    rows = min(max(tile.rows, block_size, 16), block_size**2)
    return tile if rows == tile.rows else replace(tile, rows=rows)
