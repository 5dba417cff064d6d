"""The files of `diffsieve capture`: one attention call each, safetensors with metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..compare.files import atomic_path
from ..errors import UserInputError

FORMAT = "diffsieve.capture/1"


@dataclass(frozen=True)
class Captured:
    """One attention call of a dense run, exactly as the attention saw it: after norm and position encoding.

    Attributes:
        query: (B, H, L, D), in the dtype of the model.
        key: (B, Hkv, L, D).
        value: (B, Hkv, L, D).
        model: name that it was loaded by.
        prompt: of the clip.
        seed: of its noise.
        layer: "transformer.blocks.3".
        number: of the layer in its list of blocks, from 0.
        num_layers: in that list.
        step: from 0.
        num_steps: of the generation, `None` if unknown.
        call: of the transformer within the step, from 0; with guidance 0 is the branch of the prompt.
        sigma: noise level of the step, `None` if unknown.
        timestep: the same as the scheduler's timestep.
        scale: factor of the logits.
        grid_thw: (frames, height, width) in tokens.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    model: str
    prompt: str
    seed: int
    layer: str
    number: int
    num_layers: int
    step: int
    num_steps: int | None
    call: int
    sigma: float | None
    timestep: float | None
    scale: float
    grid_thw: tuple[int, int, int]

    @property
    def facts(self) -> dict[str, Any]:
        """All but the tensors, as plain JSON values."""
        values = {name: value for name, value in vars(self).items() if not isinstance(value, torch.Tensor)}
        return values | {"grid_thw": list(self.grid_thw)}


def write_captured(target: Path, captured: Captured) -> None:
    """Write a file, whole or not at all. The metadata `facts` is JSON, with B, H, L, D and the format beside it."""
    from safetensors.torch import save_file

    tensors = {name: getattr(captured, name).detach().contiguous().cpu() for name in ("query", "key", "value")}
    metadata = {"format": FORMAT, "layout": "BHLD", "facts": json.dumps(captured.facts, ensure_ascii=False)}
    with atomic_path(target) as part:
        save_file(tensors, part, metadata)


def read_captured(path: Path, device: torch.device | str = "cpu") -> Captured:
    """Read a file of `write_captured`.

    Raises:
        UserInputError: it cannot be read, or is no such file.
    """
    facts = read_facts(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise UserInputError(f"{path} cannot be read as a captured attention call: {error}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    tokens = math.prod(facts["grid_thw"])
    if set(shapes) != {"query", "key", "value"} or any(len(s) != 4 or s[2] != tokens for s in shapes.values()):
        raise UserInputError(f"{path} must hold query, key and value (B, H, {tokens}, D), got {shapes}")
    values: dict[str, Any] = {**tensors, **facts, "grid_thw": tuple(facts["grid_thw"])}
    return Captured(**values)


def read_facts(path: Path) -> dict[str, Any]:
    """Return `Captured.facts` of a file without reading its tensors.

    Raises:
        UserInputError: it cannot be read, or is no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserInputError(f"{path} cannot be read as a captured attention call: {error}") from error
    if metadata.get("format") != FORMAT:
        raise UserInputError(f"{path} must be a file of diffsieve capture ({FORMAT}), got {metadata.get('format')!r}")
    return json.loads(metadata["facts"])


def captured_files(folder: Path) -> list[Path]:
    """Return the files of a folder of `diffsieve capture`, finished clips only.

    Raises:
        UserInputError: there is none.
    """
    found = [path for done in sorted(folder.glob(f"*/{DONE}")) for path in sorted(done.parent.glob("*.safetensors"))]
    if not found:
        raise UserInputError(f"{folder} must be a folder of diffsieve capture with a finished clip, got none in it")
    return found


DONE = "capture.json"
"""Stands beside the files of a clip when all of them are there."""
