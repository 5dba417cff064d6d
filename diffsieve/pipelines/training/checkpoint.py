"""Complete training states and averaged weights on disk, each file written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

FORMAT = 1
STATE_FILE = "state.pt"


class AveragedWeights:
    """Exponential moving average (EMA) of the parameters of some modules.

    Args:
        modules: By name; the names are part of the keys of `state_dict`.
        decay: Largest decay per step. Early steps use `(1 + n) / (10 + n)`, so that the start is forgotten quickly.
    """

    def __init__(self, modules: Mapping[str, nn.Module], decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._live = {
            f"{name}.{key}": value for name, module in modules.items() for key, value in module.named_parameters()
        }
        self._average = {key: value.detach().clone() for key, value in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self._average.values()), list(self._live.values()), 1 - decay)

    def copy_to(self, name: str, module: nn.Module) -> None:
        """Load the averaged weights of the module called `name` into a module of the same shape."""
        with torch.no_grad():
            for key, value in module.named_parameters():
                value.copy_(self._average[f"{name}.{key}"])

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]
        with torch.no_grad():
            for key, value in self._average.items():
                value.copy_(state["average"][key])


def write_atomically(path: Path, save: Any) -> None:
    """Call `save(temporary_path)` and move the result to `path`: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    save(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the complete state of a stage; replaces the one before."""
    write_atomically(folder / STATE_FILE, lambda temporary: torch.save({"format": FORMAT, **state}, temporary))


def load_state(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The state written last, or None when there is none.

    Raises:
        ValueError: For a state of another format.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} must have format {FORMAT}, got {state.get('format')}")
    return state


def save_weights(folder: Path, tensors: Mapping[str, torch.Tensor], max_bytes: int = 15_000_000) -> list[Path]:
    """Write weights as numbered safetensors shards of at most about `max_bytes` each.

    A checkpoint can then pass through a channel that limits the size of a file.

    Returns:
        The files, in order.
    """
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in sorted(tensors.items()):
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + tensor_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor.detach().cpu().contiguous()
        size += tensor_bytes
    for old in folder.glob("weights-*.safetensors"):
        old.unlink()
    files = []
    for index, shard in enumerate(shards):
        path = folder / f"weights-{index:02d}.safetensors"
        write_atomically(path, lambda temporary, shard=shard: save_file(shard, temporary))
        files.append(path)
    return files


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read what `save_weights` wrote.

    Raises:
        FileNotFoundError: When the folder holds no weights.
    """
    from safetensors.torch import load_file

    files = sorted(folder.glob("weights-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights-*.safetensors; train the stage first")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        tensors.update(load_file(path))
    return tensors


def take_module(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """State dict of one module out of a mapping with keys `name.key`, in float32."""
    prefix = f"{name}."
    return {key[len(prefix) :]: value.float() for key, value in tensors.items() if key.startswith(prefix)}


def module_tensors(modules: Mapping[str, nn.Module], names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """The inverse of `take_module` for live modules."""
    chosen = modules if names is None else {name: modules[name] for name in names}
    return {f"{name}.{key}": value for name, module in chosen.items() for key, value in module.state_dict().items()}
