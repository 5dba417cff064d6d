"""From the user's arguments to a loaded pipeline, complete settings and a method that is known to run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..errors import UserInputError
from ..pipelines.defaults import check_clip_size, class_number, class_titles, generation_defaults, makes_pictures
from ..pipelines.loading import load_pipeline, model_name, resolve_device, resolve_dtype
from .config import AUTO, DEFAULT_METHOD, DENSE, RunConfig
from .methods import METHODS
from .report import dtype_name

Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True)
class Prepared(Generic[Config]):
    """A pipeline, the arguments without gaps, and the configuration of the sparse attention (`None` for dense)."""

    pipe: Any
    config: Config
    attention: Any


def resolve_place(config: Config, pipe: Any | None) -> Config:
    """Return `config` with the device and dtype that will be used, by name.

    Raises:
        UserInputError: device or dtype cannot be used, or a given pipeline is on another.
    """
    if pipe is None:
        device = resolve_device(config.device)
        return dataclasses.replace(config, device=str(device), dtype=_name(resolve_dtype(config.dtype, device)))
    device, dtype = pipe._execution_device, dtype_name(pipe, "transformer") or dtype_name(pipe, "transformer_2")
    if config.device is not None and resolve_device(config.device).type != device.type:
        raise UserInputError(f"device must be {device.type}, where the given pipeline is, got {config.device}")
    if config.dtype is not None and _name(resolve_dtype(config.dtype, device)) != dtype:
        raise UserInputError(f"dtype must be {dtype}, that of the given pipeline, got {config.dtype}")
    return dataclasses.replace(config, device=str(device), dtype=dtype, model=model_name(pipe))


def prepare(config: Config, *, pipe: Any | None, attention: Any | None, pictures: bool = False) -> Prepared[Config]:
    """Load the pipeline unless it is given, fill in its defaults, and check everything that can be checked beforehand.

    Args:
        config: with device and dtype (`resolve_place`).
        pipe: a loaded pipeline, or `None`.
        attention: configuration of the sparse attention in place of the one that `config` describes, or `None`.
        pictures: whether the model may be one of pictures.

    Raises:
        UserInputError: no such model, no pipeline of clips from text (or of pictures) with a transformer, a size that
            it would round, a class that it does not know, a family without an adapter.
        BackendUnavailableError: the named backend cannot run here.
    """
    if pipe is None:
        pipe = load_pipeline(config.model, device=config.device, dtype=config.dtype)
    if getattr(pipe, "transformer", None) is None and getattr(pipe, "transformer_2", None) is None:
        raise UserInputError(f"model must be a pipeline with a transformer, got {type(pipe).__name__}")
    from ..kernels.llsa import resolve_levels
    from ..processors import LLSAConfig, trained_llsa

    if makes_pictures(pipe):
        if not pictures:
            raise UserInputError(
                f"model must be a text-to-video pipeline, got {type(pipe).__name__}, which makes pictures"
            )
        config = fit_pictures(config, pipe)
    config = config.filled(generation_defaults(pipe))
    assert config.frames is not None
    assert config.height is not None
    assert config.width is not None
    if not makes_pictures(pipe):
        check_clip_size(pipe, frames=config.frames, height=config.height, width=config.width)
    trained = trained_llsa(pipe)
    if config.method == AUTO:
        llsa = isinstance(attention, LLSAConfig) or (attention is None and trained is not None)
        config = dataclasses.replace(config, method="llsa" if llsa else DEFAULT_METHOD)
    if config.method == DENSE:
        return Prepared(pipe, config, None)
    if attention is None:
        attention = METHODS[config.method].config(config, trained)
    _check_attention(pipe, attention)
    if makes_pictures(pipe) and isinstance(attention, LLSAConfig):  # one token a pixel
        assert config.height is not None
        assert config.width is not None
        resolve_levels(attention.levels, config.height * config.width, attention.block_size)
    return Prepared(pipe, config, attention)


def fit_pictures(config: Config, pipe: Any) -> Config:
    """Refuse what pictures do not have, and call the classes by their titles.

    Raises:
        UserInputError: an argument of clips is given, a side is too large, or there is no such class.
    """
    from ..pipelines.pixel_dit.pipeline import MAX_SIDE

    for name in ("negative_prompt", "max_sequence_length", "fps"):
        if getattr(config, name) is not None:
            raise UserInputError(f"{name} must be left out for a model of pictures, got {getattr(config, name)!r}")
    if config.frames not in (None, 1):
        raise UserInputError(f"frames must be left out for a model of pictures, got {config.frames}")
    for name in ("height", "width"):
        value = getattr(config, name)
        if value is not None and value > MAX_SIDE:
            raise UserInputError(f"{name} must be a whole number of pixels in [1, {MAX_SIDE}], got {value}")
    titles = class_titles(pipe)
    numbers = [class_number(pipe, prompt) for prompt in config.prompt]
    return dataclasses.replace(config, prompt=tuple(titles[number or 0] for number in numbers))


def transformer_of(pipe: Any) -> Any:
    """Return the pipeline's first transformer."""
    first = getattr(pipe, "transformer", None)
    return first if first is not None else pipe.transformer_2


def _check_attention(pipe: Any, attention: Any) -> None:
    """Install once and look for the backend, so that a refusal comes before minutes of dense steps."""
    from ..kernels import block_sparse, llsa
    from ..processors import (
        BAAttProcessor,
        LLSAConfig,
        LLSAProcessor,
        apply_sparse_attention,
        remove_sparse_attention,
    )

    installed = getattr(transformer_of(pipe), "attn_processors", {}).values()
    if any(isinstance(processor, BAAttProcessor | LLSAProcessor) for processor in installed):
        raise UserInputError("pipe must be dense, got one with sparse attention; call remove_sparse_attention(pipe)")
    apply_sparse_attention(pipe, attention)
    remove_sparse_attention(pipe)
    transformer = transformer_of(pipe)
    head_dim = getattr(transformer.config, "attention_head_dim", None)
    if head_dim is not None:
        probe = torch.empty(1, device=pipe._execution_device, dtype=transformer.dtype)
        probe = probe.expand(1, 1, 4 * attention.block_size, head_dim)
        if isinstance(attention, LLSAConfig):
            llsa.choose_backend(probe, block_size=attention.block_size, backend=attention.backend)
        else:
            block_sparse.choose_backend(probe, probe, block_size=attention.block_size, backend=attention.backend)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
