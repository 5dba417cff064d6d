"""Tiles that `diffsieve tune` found to be faster than those of the table: a small file in the user's cache folder.

It is read once, at the first use, and no tile changes after that: a process computes the same from beginning to end.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .tiles import TileConfig, shared_bytes, shared_limit

logger = logging.getLogger(__name__)

_FORMAT = 1
DIMS = (16, 32, 64, 128, 256)
_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class TileKey:
    """What a tile was measured for.

    Args:
        gpu: name of the GPU, as PyTorch gives it.
        triton: version of Triton, whose code generation decides as much as the GPU.
        dim: head dimension, rounded up to one of `DIMS`.
        block_size: tokens per block.
        dtype: "bfloat16" or "float16".
    """

    gpu: str
    triton: str
    dim: int
    block_size: int
    dtype: str


def tuned_tiles_file() -> Path:
    """Where the tiles are: `diffsieve/tiles.json` in the user's cache folder."""
    # Not `Path.home`: it raises for a user without an entry and without HOME, such as a number given to a container.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "diffsieve", "tiles.json")


def read_tiles(path: Path) -> dict[TileKey, TileConfig]:
    """The tiles of a file; none where there is no file.

    Raises:
        ValueError: it is not such a file, or holds a tile that no GPU can run.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {_FORMAT}")
        return {TileKey(**entry["for"]): _tile(entry["for"], entry["tile"]) for entry in content["tiles"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def write_tiles(path: Path, tiles: dict[TileKey, TileConfig]) -> None:
    """Write a file of tiles whole, in place of one that may be there."""
    entries = [{"for": asdict(key), "tile": asdict(tile)} for key, tile in tiles.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"format": _FORMAT, "tiles": entries}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def tuned_tile(device: torch.device, triton: str, dim: int, block_size: int, dtype: torch.dtype) -> TileConfig | None:
    """The tile that was measured to be the fastest on this GPU, or None where the table's stays.

    Args:
        device: a CUDA GPU.
        triton, dim, block_size: as in `TileKey`.
        dtype: of the tensors.
    """
    tiles = _tiles_of(device)
    return tiles.get((triton, dim, block_size, dtype)) if tiles else None


@cache
def _tiles_of(device: torch.device) -> dict[tuple[str, int, int, torch.dtype], TileConfig]:
    """The tiles that a GPU has the room for, by version of Triton, head dimension, block size and dtype."""
    tiles = _tiles()
    if not tiles:
        return {}
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    limit, found = shared_limit(capability), {}
    for key, tile in tiles.items():
        if key.gpu != gpu:
            continue
        needed = shared_bytes(tile, capability, key.dim, element_size=2)
        if needed <= limit:
            found[key.triton, key.dim, key.block_size, getattr(torch, key.dtype)] = tile
        else:
            logger.warning(
                "%s: the row for D %s, blocks of %s, %s, Triton %s, %s may need %s bytes of shared memory, of %s that "
                "there are: the built-in tile is taken; delete the row, or run diffsieve tune again",
                *(tuned_tiles_file(), key.dim, key.block_size, key.dtype, key.triton, gpu, f"{needed:,}", f"{limit:,}"),
            )
    return found


@cache
def _tiles() -> dict[TileKey, TileConfig]:
    path = tuned_tiles_file()
    try:
        return read_tiles(path)
    except (OSError, ValueError) as error:
        logger.warning("%s is not a file of tiles (%s): delete it, or run diffsieve tune again", path, error)
        return {}


def _tile(key: dict[str, Any], values: dict[str, Any]) -> TileConfig:
    if key["dim"] not in DIMS or key["dtype"] not in _DTYPES:
        raise ValueError(f"a tile must be for D {', '.join(map(str, DIMS))} and {' or '.join(_DTYPES)}, got {key}")
    tile = TileConfig(**values)
    numbers = tile.block_m, tile.block_n, tile.num_warps, tile.num_stages
    if any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError(f"a tile must have whole numbers of at least 1, got {values}")
    powers = all(_power_of_2(number) == number for number in numbers[:3])
    within = 16 <= tile.block_m <= key["block_size"] and 16 <= tile.block_n <= key["block_size"]
    if not (powers and within and tile.num_warps <= 8 and tile.num_stages <= 8):
        raise ValueError(f"a tile must have powers of two within the block of {key['block_size']}, got {values}")
    return tile


def _power_of_2(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()
