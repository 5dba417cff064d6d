"""Complete training states and averaged weights on disk, each file written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import UserInputError

FORMAT = 2
STATE_FILE = "state.pt"
WEIGHTS_FILE = "weights.json"
_NEW_FILE_MODE = 0o644


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
    """Call `save(temporary_path)` and move the result to `path`, so that a reader sees the old file or the new one.

    Raises:
        OSError: the file cannot be written, as on a full disk; it names the file. The old one stays, nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        save(temporary)
        # safetensors makes files that only their owner may read
        temporary.chmod(_NEW_FILE_MODE)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)  # half of a file would keep a full disk full
        if isinstance(error, OSError):
            raise_with_name(error, path)
        raise


def raise_with_name(error: OSError, path: Path) -> NoReturn:
    """Raise an error of a file again, with its name where the system told none: a write knows no names."""
    if error.errno is not None and error.filename is None:
        raise OSError(error.errno, error.strerror, str(path)) from error
    raise error


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the complete state of a stage; replaces the one before."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            try:
                torch.save({"format": FORMAT, **state}, file)
            except RuntimeError as error:
                # on a full disk PyTorch's writer tells of its own position, and not what the file said
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    write_atomically(folder / STATE_FILE, write)


def load_state(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The state written last, or None when there is none.

    Raises:
        UserInputError: For a state of another format.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    if state.get("format") != FORMAT:
        raise UserInputError(f"{path} must have format {FORMAT}, got {state.get('format')}; start the run anew")
    return state


def save_weights(folder: Path, tensors: Mapping[str, torch.Tensor], step: int, max_bytes: int = 15_000_000) -> None:
    """Write weights as safetensors shards of at most about `max_bytes` each, and `weights.json`, which names them.

    A checkpoint can then pass through a channel that limits the size of a file. The names carry the step and
    `weights.json` is replaced last, so the folder holds one complete set at any moment.
    """
    from safetensors.torch import save

    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in sorted(tensors.items()):
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + tensor_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor.detach().cpu().contiguous()
        size += tensor_bytes
    names = [f"weights-{step:07d}-{index:02d}.safetensors" for index in range(len(shards))]
    with _old_set_on_failure(folder):
        for name, shard in zip(names, shards, strict=True):
            write_atomically(folder / name, lambda temporary, shard=shard: temporary.write_bytes(save(shard)))
        write_json(folder / WEIGHTS_FILE, {"step": step, "files": names})
    _remove_other_shards(folder, names)


def copy_weights(source: Path, target: Path) -> None:
    """Copy the set of `save_weights` from one folder to another, which holds one complete set at any moment."""
    names = _shard_names(source)
    with _old_set_on_failure(target):
        for name in [*names, WEIGHTS_FILE]:
            copy_file(source / name, target / name)
    _remove_other_shards(target, names)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; a reader of the target sees the old one or the new one."""
    write_atomically(target, lambda temporary: shutil.copyfile(source, temporary))


def has_weights(folder: Path) -> bool:
    """Whether `save_weights` has written a set there."""
    return (folder / WEIGHTS_FILE).is_file()


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read what `save_weights` wrote.

    Raises:
        UserInputError: When the folder holds no complete set.
    """
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for name in _shard_names(folder):
        if not (folder / name).is_file():
            raise UserInputError(f"{folder} must hold the files of its {WEIGHTS_FILE}, but {name} is missing")
        tensors.update(load_file(folder / name))
    return tensors


def _shard_names(folder: Path) -> list[str]:
    if not has_weights(folder):
        raise UserInputError(
            f"{folder} must hold trained weights, but it has no {WEIGHTS_FILE}; train that stage first"
        )
    names: list[str] = json.loads((folder / WEIGHTS_FILE).read_text(encoding="utf-8"))["files"]
    return names


@contextmanager
def _old_set_on_failure(folder: Path) -> Iterator[None]:
    """Remove the files of a set that is not finished: a part of it would keep a full disk full."""
    try:
        yield
    except BaseException:
        _remove_other_shards(folder, _shard_names(folder) if has_weights(folder) else [])
        raise


def _remove_other_shards(folder: Path, names: list[str]) -> None:
    for old in folder.glob("weights-*.safetensors"):
        if old.name not in names:
            old.unlink()


def take_module(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """State dict of one module out of a mapping with keys `name.key`, in float32."""
    prefix = f"{name}."
    return {key[len(prefix) :]: value.float() for key, value in tensors.items() if key.startswith(prefix)}


def module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """The inverse of `take_module` for live modules."""
    return {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}


def load_module(module: nn.Module, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Load the tensors of `name` into a module.

    Raises:
        UserInputError: When they are missing or belong to a module of another size.
    """
    taken = take_module(tensors, name)
    if not taken:
        raise UserInputError(f"weights must hold a {name}, got {sorted({key.split('.')[0] for key in tensors})}")
    try:
        module.load_state_dict(taken)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if len(str(error).splitlines()) > 1 else str(error)
        raise UserInputError(f"weights of the {name} must fit the model settings: {first}") from error
