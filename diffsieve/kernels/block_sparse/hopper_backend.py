"""The `hopper` backend: whether the installed Triton can build its kernel, its tiles, and the launch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...errors import UserInputError
from ..sizes import cdiv
from .backends import dtype_name
from .descriptors import allows_descriptor, descriptor_strides

# The kernel was compiled with these and those between; Gluon changes its interface from one version to the next.
_FIRST_TRITON, _LAST_TRITON = (3, 6), (3, 8)
_LOG2_E = 1.4426950408889634


def _gluon_obstacle(version: str) -> str | None:
    """Why the kernel cannot be built with this version of Triton, or None. Imports the kernel where it can."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not _FIRST_TRITON <= (int(found[1]), int(found[2])) <= _LAST_TRITON:
        first, last = (".".join(map(str, bound)) for bound in (_FIRST_TRITON, _LAST_TRITON))
        return f"needs Triton {first} to {last}, whose Gluon it is written for, got {version}"
    try:
        from . import hopper_kernel  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"needs Gluon, whose import from Triton {version} failed ({error})"
    return None


# Asked once, at import.
GLUON_OBSTACLE = _gluon_obstacle(triton.__version__)
if GLUON_OBSTACLE is None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .hopper_kernel import TILE_ROWS, block_sparse_fwd_hopper_kernel


@dataclass(frozen=True)
class HopperTile:
    """How one program of the kernel is cut.

    Args:
        consumers: warpgroups of 64 queries each, 1 or 2; `64 * consumers` divides the block size.
        block_n: keys per step, a power of two that divides the block size, 64 or 128 (256 spills registers).
        num_stages: slots of the rings of keys and values in shared memory, 1 or more.
        query_in_registers: hold the queries in registers instead of reading them from shared memory at each step.
    """

    consumers: int
    block_n: int
    num_stages: int
    query_in_registers: bool = True


# Form, head dimension and block size -> the fastest tile of a first run on an H200. None was 2 % faster in a second one
# (benchmarks/results/h200/block_sparse_hopper.json), and those that were faster at all had been slower in the first.
_TILES = {
    ("exact", 128, 128): HopperTile(consumers=2, block_n=128, num_stages=2),
    ("exact", 64, 128): HopperTile(consumers=2, block_n=128, num_stages=2),
    ("exact", 128, 64): HopperTile(consumers=1, block_n=64, num_stages=3),
    ("exact", 64, 64): HopperTile(consumers=1, block_n=64, num_stages=2),
    ("fixed", 128, 128): HopperTile(consumers=2, block_n=64, num_stages=4),
    ("fixed", 64, 128): HopperTile(consumers=2, block_n=64, num_stages=4),
    ("fixed", 128, 64): HopperTile(consumers=1, block_n=64, num_stages=3),
    ("fixed", 64, 64): HopperTile(consumers=1, block_n=64, num_stages=3),
}


def select_hopper_tile(dim: int, block_size: int, *, fixed_stabiliser: bool = False) -> HopperTile:
    """The tile for a head dimension (64 or 128) and a block size (a power of two, at least 64).

    Measured in bf16 with blocks of 64 and 128; fp16 takes that of the exact form, larger blocks those of 128.
    """
    return _TILES["fixed" if fixed_stabiliser else "exact", dim, min(block_size, 128)]


def block_sparse_attention_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    *,
    block_size: int,
    scale: float,
    return_lse: bool,
    tile: HopperTile | None = None,
    fixed_stabiliser: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Same meaning as `reference.block_sparse_attention_reference`; the log-sum-exp is None unless asked for.

    Inputs that the copy engine cannot read where they lie (a last axis with a stride, a start or strides that are no
    multiple of 16 bytes, an expanded axis) are copied first, and so is an output of such strides at the end. One list
    that was expanded to all query blocks is read where it is.

    Args:
        tile: in place of that of `select_hopper_tile`.
        fixed_stabiliser: subtract the row maxima of the first keys instead of those of all, which saves a third of the
            instructions, and compute afterwards as usual what that did not suffice for; bf16 only.
    """
    if fixed_stabiliser and query.dtype != torch.bfloat16:
        raise UserInputError(f"query must be bfloat16 with fixed_stabiliser, got {dtype_name(query.dtype)}")
    batch, heads, len_q, dim = query.shape
    kv_heads, len_k = key.shape[1:3]
    tile = select_hopper_tile(dim, block_size, fixed_stabiliser=fixed_stabiliser) if tile is None else tile
    out = torch.empty_like(query)
    target = out if allows_descriptor(out) else torch.empty_like(query, memory_format=torch.contiguous_format)
    query, key, value = (
        x if allows_descriptor(x) else x.clone(memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    lse = query.new_empty((batch, heads, len_q), dtype=torch.float32) if return_lse else None
    shares_list = not any(block_index.stride()[:3]) and block_index.stride(3) == 1
    block_index = block_index if shares_list else block_index.contiguous()
    block_count = None if block_count is None else block_count.contiguous()
    # With one consumer 128 registers per thread are the limit, so that two programs share a multiprocessor.
    options = {"maxnreg": 128} if tile.consumers == 1 else {}
    grid = (cdiv(len_q, tile.consumers * TILE_ROWS), heads, batch)
    flags = query.new_empty((batch, heads, grid[0], tile.consumers), dtype=torch.int32)
    arguments = (
        _descriptor(query, TILE_ROWS), _descriptor(key, tile.block_n), _descriptor(value, tile.block_n),
        _descriptor(target, TILE_ROWS), lse, flags, block_index, block_count, scale * _LOG2_E,
        heads // kv_heads, len_q, len_k, block_index.shape[-1], 0 if shares_list else block_index.shape[-1],
    )  # fmt: skip
    with torch.cuda.device_of(query):
        # The second launch ends at once in programs without a flag: the host waits for nothing.
        for only_flagged in (False, True):
            block_sparse_fwd_hopper_kernel[grid](
                *arguments, BLOCK_SIZE=block_size, BLOCK_N=tile.block_n, HEAD_DIM=dim, STAGES=tile.num_stages,
                CONSUMERS=tile.consumers, QUERY_IN_REGISTERS=tile.query_in_registers,
                HAS_COUNT=block_count is not None, STORE_LSE=return_lse,
                FIXED_STABILISER=fixed_stabiliser and not only_flagged, ONLY_FLAGGED=only_flagged,
                num_warps=4, **options,
            )  # fmt: skip
    return (out if target is out else out.copy_(target)), lse


def _descriptor(x: Tensor, rows: int) -> Any:
    shape = list(x.shape)
    layout = _layout(rows, shape[3], x.dtype)
    return TensorDescriptor(x, shape, descriptor_strides(x), [1, 1, rows, shape[3]], layout)


@lru_cache(maxsize=64)
def _layout(rows: int, dim: int, dtype: torch.dtype) -> Any:
    """Shared memory of [1, 1, rows, D]; Gluon takes as long for it as for a launch."""
    return gl.NVMMASharedLayout.get_default_for(
        [1, 1, rows, dim], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    )
