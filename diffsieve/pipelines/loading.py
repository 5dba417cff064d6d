"""Load a pipeline by name: the embedded model, a local folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UserInputError
from .defaults import EMBEDDED, MINI_WAN

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_SAMPLES_PER_TENSOR = 16
# Where a configuration came from and who wrote it, not what it says.
_INCIDENTAL = frozenset({"_name_or_path", "_diffusers_version", "transformers_version"})


def load_pipeline(
    model: str = MINI_WAN, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> DiffusionPipeline:
    """Load a pipeline onto a device.

    Only safetensors weights are read, and no code that comes with a checkpoint is run. The VAE stays in float32, as
    diffusers recommends for Wan: in bfloat16 its decoder bands.

    Args:
        model: `"mini-wan"` or `"mini-pixel-dit"`, which ship in the package; a folder in diffusers format; or a hub id
            `owner/name`.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`, ...; default `"cuda"` where there is one, else `"cpu"`.
        dtype: of all parts but the VAE: `"float32"`, `"bfloat16"`, `"float16"` or a torch dtype; default bfloat16 on
            CUDA, float32 elsewhere.

    Raises:
        UserInputError: no such model, device or dtype, the weights cannot be read, or the hub cannot be reached.
    """
    place = resolve_device(device)
    number = resolve_dtype(dtype, place)
    source = model_source(model)
    try:
        pipe = _pipeline_class(source).from_pretrained(
            source, dtype={"default": number, "vae": torch.float32}, use_safetensors=True
        )
    except Exception as error:  # a broken checkpoint fails in as many ways as there are parts
        if isinstance(source, Path):
            raise UserInputError(f"model {model} cannot be loaded from {source}: {_one_line(error)}") from error
        raise UserInputError(
            f"model {model} is no local folder, and the Hugging Face hub does not give it; check the name, the "
            f"connection and, for a gated model, the token ({_one_line(_root(error))})"
        ) from error
    lacking = _first_without_values(pipe)
    if lacking is not None:
        raise UserInputError(f"model {model} must have weights for every part, got none for {lacking}")
    logger.info("loaded %s from %s on %s as %s", type(pipe).__name__, source, place, number)
    return pipe.to(place)


def _pipeline_class(source: Path | str) -> type[DiffusionPipeline]:
    """The class to load a pipeline with: diffusers finds its own by name, but not those of other packages."""
    from diffusers import DiffusionPipeline

    if DiffusionPipeline.load_config(source).get("_class_name") == "PixelDiTPipeline":
        from .pixel_dit import PixelDiTPipeline

        return PixelDiTPipeline
    return DiffusionPipeline


def model_source(model: str) -> Path | str:
    """Return where `load_pipeline` reads `model` from: a folder that holds a pipeline, or a hub id as it is.

    Raises:
        UserInputError: neither a folder with a model_index.json nor of the form `owner/name`, or the embedded weights
            are missing from this installation.
    """
    if model in EMBEDDED:
        if not (EMBEDDED[model] / "model_index.json").is_file():
            raise UserInputError(
                f"the weights of {model} are missing from this installation, expected in {EMBEDDED[model]}: "
                "install diffsieve again, or give a folder or a hub id as model"
            )
        return EMBEDDED[model]
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise UserInputError(f"model must be a folder with a model_index.json, got {model}, which has none")
        return folder
    if model and folder.exists():
        raise UserInputError(f"model must be a folder in diffusers format, got the file {model}")
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise UserInputError(
            f"model must be one of {', '.join(EMBEDDED)}, an existing folder or a hub id such as owner/name, "
            f"got {model!r}"
        )
    return model


def model_name(pipe: Any) -> str:
    """Return what to call the model of a loaded pipeline: its name here, a hub id, a folder's name, or the class."""
    source = str(pipe.name_or_path or "")
    for name, folder in EMBEDDED.items():
        if source == str(folder):
            return name
    if source and Path(source).is_dir():
        return Path(source).resolve().name
    return source or type(pipe).__name__


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device to use; `None` picks CUDA where there is one, else the CPU.

    Raises:
        UserInputError: torch knows no such device, or it is not there.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UserInputError(f'device must be such as "cpu", "cuda" or "cuda:1", got {device!r}') from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise UserInputError(
            f"device must be present, got {place} on a machine with {torch.cuda.device_count()} CUDA GPUs"
        )
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise UserInputError(f"device must be present, got {place} on a machine without an Apple GPU")
    if place.type not in ("cpu", "cuda", "mps"):
        raise UserInputError(f"device must be of type cpu, cuda or mps, got {place}")
    return place


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype to use; `None` picks bfloat16 on CUDA and float32 elsewhere.

    Raises:
        UserInputError: not one of float32, bfloat16, float16.
    """
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise UserInputError(f"dtype must be one of float32, bfloat16, float16, got {dtype!r}")
    assert isinstance(found, torch.dtype)
    return found


def weights_digest(pipe: Any) -> str:
    """Return 16 hexadecimal digits that tell two loaded models apart: configurations and a sample of every tensor.

    The samples (16 values of each tensor) change with any training step, and reading them takes well under a second.
    """
    digest = hashlib.sha256()
    for name, part in sorted(pipe.components.items()):
        digest.update(name.encode())
        config = getattr(part, "config", None)
        if config is not None:
            values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
            kept = {key: value for key, value in values.items() if key not in _INCIDENTAL}
            digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
        if isinstance(part, torch.nn.Module):
            for key, tensor in sorted(part.state_dict().items()):
                digest.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
                if tensor.device.type != "meta":
                    sample = tensor.detach().flatten()[:_SAMPLES_PER_TENSOR].to("cpu", torch.float64)
                    digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _first_without_values(pipe: Any) -> str | None:
    """Return the name of a tensor that the checkpoint lacks: diffusers leaves it on the meta device and warns."""
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            for key, tensor in part.state_dict().items():
                if tensor.device.type == "meta":
                    return f"{name}.{key}"
    return None


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
