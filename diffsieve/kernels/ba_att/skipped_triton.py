"""Launches the kernel that adds skipped blocks: in the form of the tile, and again for what got too large."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..sizes import cdiv, next_power_of_2
from .forms import CentroidTile
from .skipped_ahead_kernel import add_skipped_ahead_kernel
from .skipped_kernel import add_skipped_kernel

_LOG2_E = 1.4426950408889634
# Tiles of a program of `add_skipped_ahead_kernel` in the second launch, which as a rule finds nothing to do: one each
# would cost it tens of waves.
_TILES_AGAIN = 16


def add_skipped_triton(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key_mean: torch.Tensor,
    value_mean: torch.Tensor,
    skipped: torch.Tensor,
    skipped_count: torch.Tensor | None,
    perm: torch.Tensor | None,
    *,
    block_size: int,
    scale: float,
    tile: CentroidTile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same meaning as `centroids.add_centroids` of as many keys as queries, with the order undone in the output.

    Args:
        skipped: int32 (B, H, Nq, S), blocks to add, ascending; `skipped_count` int32 (B, H, Nq) of them, or all.
        block_size: a power of two, at least 16.
    """
    batch, heads, length, dim = query.shape
    num_query, num_key = skipped.shape[2], key_mean.shape[2]
    block_m = min(block_size, tile.block_m)
    key_mean, value_mean = (x.to(query.dtype).contiguous() for x in (key_mean, value_mean))
    new_out, new_lse = torch.empty_like(out), torch.empty_like(lse)
    if perm is not None:
        perm, new_out = perm.contiguous(), out.new_empty((batch, length, heads, dim)).transpose(1, 2)
    tiles = cdiv(length, block_m)
    too_large = torch.empty((batch, heads, tiles), dtype=torch.int32, device=query.device)
    args = (
        query, key_mean, value_mean, skipped.contiguous(),
        None if skipped_count is None else skipped_count.contiguous(), out, lse.contiguous(), perm, new_out, new_lse,
        too_large, scale * _LOG2_E, math.log2(block_size), math.log2(length - (num_key - 1) * block_size),
        # No weight is larger than the sum of all. fp16 ends at 65,504; in fp32 this leaves 2^63 to the values.
        2.0**15 if query.dtype == torch.float16 else 2.0**64,
        *query.stride(), *out.stride(), *new_out.stride(),
        length if perm is not None and perm.dim() == 3 else 0,
        heads // key_mean.shape[1], length, num_query, num_key, skipped.shape[3],
    )  # fmt: skip
    options: dict[str, Any] = {
        "BLOCK_SIZE": block_size, "BLOCK_M": block_m, "BLOCK_N": tile.block_n,
        "HEAD_DIM": dim, "BLOCK_D": max(16, next_power_of_2(dim)), "PRECISION": "ieee",
        "HAS_COUNT": skipped_count is not None, "HAS_PERM": perm is not None,
        "num_warps": max(1, min(tile.num_warps, block_m // 16)),
    }  # fmt: skip
    with torch.cuda.device_of(query):
        for online in (False, True):
            options |= {"ONLINE": online, "maxnreg": None if online else tile.registers}
            if tile.ahead:
                tiles_each, stages = (_TILES_AGAIN, 1) if online else (1, tile.num_stages)
                add_skipped_ahead_kernel[cdiv(tiles, tiles_each), heads, batch](
                    tiles, *args, **options, TILES=tiles_each, num_stages=stages
                )
            else:
                add_skipped_kernel[tiles, heads, batch](*args, **options, num_stages=tile.num_stages)
    return new_out, new_lse
