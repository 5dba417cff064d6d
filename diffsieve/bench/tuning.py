"""Which tile of the Triton kernel is the fastest on a GPU: a few candidates by shape, checked and timed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserInputError
from ..kernels import testing
from ..kernels.block_sparse import choose_backend
from ..kernels.block_sparse.tiles import TileConfig, candidates
from ..kernels.block_sparse.tuned_tiles import DIMS, TileKey, read_tiles, tuned_tiles_file, write_tiles
from ..kernels.testing import AttentionInputs
from .config import BenchConfig
from .operations.block_sparse import check_output
from .problem import passes
from .timer import Timer, first_line

_TOKENS, _HEADS = 16_384, 8
_MOST_BLOCK = _TOKENS // 2
# A tile takes the place of the table's only where it gains more than times differ from run to run.
_GAIN = 1.02


@dataclass(frozen=True)
class Tuned:
    """What tuning found for one shape.

    Args:
        key: the shape and the GPU.
        tile: the one to use from now on.
        ms: its median time: 16,384 tokens, 8 heads, half of the blocks kept.
        table_ms: that of the tile of the table; None where that one cannot run.
        tried: tiles that were timed.
        failed: tiles that were not, with the reason.
    """

    key: TileKey
    tile: TileConfig
    ms: float
    table_ms: float | None
    tried: int
    failed: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tune(
    config: BenchConfig,
    *,
    dims: tuple[int, ...] = (64, 128),
    block_sizes: tuple[int, ...] = (64, 128),
    file: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Tuned]:
    """Time the candidates of each shape and write the fastest into the file that the `triton` backend reads.

    Takes effect in processes that start afterwards. What the file held for other shapes stays.

    Args:
        config: `device`, `dtype` and `budget_ms` are used.
        dims: head dimensions out of `DIMS`: others take the tile of the next larger one.
        block_sizes: tokens per block, powers of two, 16 to 8,192.
        file: of the tiles; that of the user's cache folder by default.
        progress: takes lines for people.

    Raises:
        UserInputError: no CUDA GPU, fp32, a shape out of its range, or called while a graph is recorded.
        BackendUnavailableError: the `triton` backend cannot run a shape here.
    """
    if not config.on_gpu:
        raise UserInputError(f"device must be a CUDA GPU, got {config.device}")
    if config.torch_dtype == torch.float32:
        raise UserInputError("dtype must be bfloat16 or float16, got float32: it has one tile")
    for dim in dims:
        if dim not in DIMS:
            choices = ", ".join(map(str, DIMS))
            raise UserInputError(f"dim must be one of {choices} (others take the tile of the next larger), got {dim}")
    for block_size in block_sizes:
        if not 16 <= block_size <= _MOST_BLOCK or block_size & (block_size - 1):
            raise UserInputError(f"block_size must be a power of two in [16, {_MOST_BLOCK}], got {block_size}")
    if torch.cuda.is_current_stream_capturing():
        raise UserInputError("tune must be called outside of the capture of a CUDA graph")
    file = file or tuned_tiles_file()
    try:
        known = read_tiles(file)
    except ValueError as error:
        raise UserInputError(f"{file} must be a file of tiles, got another ({error}): delete it") from None
    timer, found = Timer(config), []
    for dim in dims:
        for block_size in block_sizes:
            tuned = _tune_shape(config, timer, dim, block_size)
            found.append(tuned)
            progress(describe(tuned))
            known[tuned.key] = tuned.tile
            write_tiles(file, known)
    return found


def describe(tuned: Tuned) -> str:
    """One line for people."""
    key, tile = tuned.key, tuned.tile
    text = f"D {key.dim}, blocks of {key.block_size}, {key.dtype}: {_name(tile)}, {tuned.ms:.3f} ms"
    if tuned.table_ms is not None:
        text += f" (the table's {tuned.table_ms:.3f} ms)"
    return f"{text}; {tuned.tried} tiles timed, {len(tuned.failed)} that cannot run"


def _tune_shape(config: BenchConfig, timer: Timer, dim: int, block_size: int) -> Tuned:
    import triton

    case = testing.AttentionCase(
        heads=_HEADS, kv_heads=_HEADS, len_q=_TOKENS, len_k=_TOKENS, dim=dim, block_size=block_size
    )
    inputs = testing.make_inputs(case, dtype=config.torch_dtype, device=str(config.device))
    choose_backend(inputs.query, inputs.key, block_size=block_size, backend="triton")
    tail = testing.make_inputs(
        replace(case, heads=2, kv_heads=2, len_q=300, len_k=450), dtype=config.torch_dtype,
        device=str(config.device),
    )  # fmt: skip
    capability = torch.cuda.get_device_capability(timer.device)
    table, *others = candidates(capability, dim, block_size)
    calls: dict[TileConfig, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    for tile in (table, *others):
        try:
            for some in (tail, inputs):
                _check(some, block_size, tile)
        except Exception as error:  # a compiler that gives up, a GPU that lacks the room, a wrong result
            failed[_name(tile)] = first_line(error)
        else:
            calls[tile] = partial(_attend, inputs, block_size, tile)
    if not calls:
        raise UserInputError(f"no tile can run D {dim} with blocks of {block_size}: {next(iter(failed.values()))}")
    (first, call), *rest = calls.items()
    sample, medians = timer.eager(call, {_name(tile): rival for tile, rival in rest})
    times = {first: float(sample["ms"])} | {tile: medians[_name(tile)] for tile, _ in rest}
    best = min(times, key=times.__getitem__)
    if table in times and times[table] <= _GAIN * times[best]:
        best = table
    key = TileKey(
        torch.cuda.get_device_name(timer.device), triton.__version__, dim, block_size, str(config.dtype)
    )  # fmt: skip
    return Tuned(key, best, times[best], times.get(table), len(times), failed)


def _check(inputs: AttentionInputs, block_size: int, tile: TileConfig) -> None:
    check = check_output(inputs, block_size, partial(_attend, inputs, block_size, tile), poisoned=True)
    if not passes(check):
        raise ArithmeticError(f"error {check['error']:.3g}, beyond {check['bound']:.3g}")


def _attend(inputs: AttentionInputs, block_size: int, tile: TileConfig) -> Tensor:
    from ..kernels.block_sparse.triton_backend import block_sparse_attention_triton

    scale = inputs.query.shape[3] ** -0.5
    return block_sparse_attention_triton(
        *inputs.tensors(), block_size=block_size, scale=scale, return_lse=False, tile=tile
    )[0]


def _name(tile: TileConfig) -> str:
    return f"{tile.block_m}x{tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"
