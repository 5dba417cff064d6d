"""What a run of `diffsieve bench` measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import UserInputError
from ..kernels.block_sparse import BACKENDS, MAX_BLOCK_SIZE

Grid = tuple[int, int, int]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class BenchConfig:
    """What to measure, on what, and where the results go. `None` leaves the choice to each operation.

    Args:
        out: folder of the results, one JSON file for each operation, and of their plots.
        operations: names out of `OPERATIONS`; empty for all.
        device: "cuda", "cuda:1" or "cpu"; CUDA if present.
        dtype: a name of `DTYPES`; bfloat16 on CUDA, else float32.
        tokens: sequence lengths of the operations on plain sequences.
        grids: (frames, height, width) in tokens of the operations on clips.
        sparsities: shares of block pairs to skip, in [0, 1).
        heads: attention heads.
        dim: channels of a head.
        block_size: tokens per block of block-sparse attention.
        models: transformers of the operation `wan`, names out of `operations.wan.MODELS`.
        backend: attention backend inside BA-Att and the transformers, one of `kernels.block_sparse.BACKENDS`.
        compiled: compile the transformers; on CUDA.
        peers: also measure other kernels that are installed.
        budget_ms: time spent on the repeats of one figure; at least 3, at most 200 repeats.
        threads: of PyTorch on a CPU; as it is set.

    Raises:
        UserInputError: a value is out of its range.
    """

    out: Path
    operations: tuple[str, ...] = ()
    device: str | None = None
    dtype: str | None = None
    tokens: tuple[int, ...] | None = None
    grids: tuple[Grid, ...] | None = None
    sparsities: tuple[float, ...] = (0.5, 0.75, 0.9, 0.95)
    heads: int | None = None
    dim: int | None = None
    block_size: int = 128
    models: tuple[str, ...] | None = None
    backend: str = "auto"
    compiled: bool | None = None
    peers: bool = True
    budget_ms: float = 250.0
    threads: int | None = None

    def __post_init__(self) -> None:
        try:
            device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError:
            raise UserInputError(f"device must be cuda, cuda:1 or cpu, got {self.device!r}") from None
        if device.type not in ("cuda", "cpu"):
            raise UserInputError(f"device must be cuda or cpu, got {self.device!r}")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UserInputError(f"device must be present, got {self.device!r} with {torch.cuda.device_count()} GPUs")
        object.__setattr__(self, "device", str(device))
        object.__setattr__(self, "dtype", self.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        if self.compiled is None:
            object.__setattr__(self, "compiled", device.type == "cuda")
        if self.dtype not in DTYPES:
            raise UserInputError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.backend not in BACKENDS:
            raise UserInputError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        for name, values in (("tokens", self.tokens), ("grid", [x for grid in self.grids or () for x in grid])):
            if values is not None and any(value < 1 for value in values):
                raise UserInputError(f"{name} must be at least 1, got {min(values)}")
        for name in ("heads", "dim", "block_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserInputError(f"{name} must be at least 1, got {value}")
        if self.block_size > MAX_BLOCK_SIZE:
            raise UserInputError(f"block_size must be at most {MAX_BLOCK_SIZE}, got {self.block_size}")
        for sparsity in self.sparsities:
            if not 0 <= sparsity < 1:
                raise UserInputError(f"sparsity must be in [0, 1), got {sparsity}")
        if not 0 < self.budget_ms < math.inf:
            raise UserInputError(f"budget_ms must be finite and above 0, got {self.budget_ms}")

    @property
    def on_gpu(self) -> bool:
        return torch.device(str(self.device)).type == "cuda"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[str(self.dtype)]


def parse_grid(text: str) -> Grid:
    """Read "FRAMESxHEIGHTxWIDTH" in tokens, such as 21x45x80.

    Raises:
        UserInputError: not of that form.
    """
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise UserInputError(f"grid must be FRAMESxHEIGHTxWIDTH in tokens, such as 21x45x80, got {text!r}")
    frames, height, width = map(int, parts)
    return frames, height, width


def percent(share: float) -> str:
    """Write a share for people, such as 50 %."""
    return f"{round(100 * share, 4):g} %"


def unique(values: Sequence[float]) -> list[float]:
    """Return the values in their order, each once."""
    return list(dict.fromkeys(values))
