"""One clip from a pipeline: raw frames in [0, 1] and where the time went. A picture is a clip of one frame."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DiffsieveError
from ..pipelines.defaults import class_number, makes_pictures
from .config import RunConfig

StepCallback = Callable[[int], None]


@dataclass(frozen=True)
class Clip:
    """A generated clip, or a picture.

    Args:
        frames: (T, 3, H, W) float32 in [0, 1], as the VAE decoded them, on the CPU unless `generate_clip` was told to
            leave them on the device; T is 1 for a picture.
        seconds_total: the whole pipeline call.
        seconds_steps: each denoising step; the first one also holds the text encoder.
        seconds_decode: from the last step to the end, mostly the VAE.
    """

    frames: torch.Tensor
    seconds_total: float
    seconds_steps: tuple[float, ...]
    seconds_decode: float


def generate_clip(
    pipe: Any,
    config: RunConfig,
    *,
    prompt: str,
    seed: int,
    name: str = "clip",
    on_step: StepCallback | None = None,
    to_cpu: bool = True,
) -> Clip:
    """Run the pipeline once.

    The noise comes from a CPU generator, so that the same seed starts from the same latents on every device, with or
    without sparse attention.

    Args:
        pipe: a loaded text-to-video pipeline or `PixelDiTPipeline`.
        config: filled (`RunConfig.filled`).
        prompt: text; for pictures the title of a class.
        seed: start value of the noise.
        name: what an error calls this clip.
        on_step: called with the number of finished steps after each.
        to_cpu: bring the frames to the CPU; else they stay on the device, for metrics that are computed there.

    Raises:
        DiffsieveError: the clip holds values that are not finite, or has another size than asked for.
    """
    device = pipe._execution_device
    ends: list[float] = []

    def after_step(_pipe: Any, index: int, _timestep: Any, _tensors: dict[str, Any]) -> dict[str, Any]:
        ends.append(_now(device))
        if on_step is not None:
            on_step(index + 1)
        return {}

    pictures = makes_pictures(pipe)
    arguments = _subject(pipe, config, prompt) | {
        "height": config.height,
        "width": config.width,
        "num_inference_steps": config.steps,
        "guidance_scale": config.guidance_scale,
        "generator": torch.Generator("cpu").manual_seed(seed),
        "output_type": "pt",
        "callback_on_step_end": after_step,
    }
    bar = getattr(pipe, "_progress_bar_config", None)
    pipe.set_progress_bar_config(disable=True)
    start = _now(device)
    try:
        output = pipe(**arguments)
        frames = output.images if pictures else output.frames[0]
        end = _now(device)
    finally:
        pipe.set_progress_bar_config(**(bar or {}))
    frames = frames.float()
    if to_cpu:
        frames = frames.cpu()
    expected = (config.frames, 3, config.height, config.width)
    what = f"{name} {'picture' if pictures else 'clip'}"
    if tuple(frames.shape) != expected:
        raise DiffsieveError(f"the {what} must have shape {expected} (T, 3, H, W), got {tuple(frames.shape)}")
    broken = int((~torch.isfinite(frames).flatten(1).all(dim=1)).sum())
    if broken:
        raise DiffsieveError(
            f"the {what} must have finite frames, got NaN or infinity in {broken} of {len(frames)} "
            f"(prompt {prompt!r}, seed {seed}); the weights or the dtype may be at fault"
        )
    return Clip(
        frames=frames,
        seconds_total=end - start,
        seconds_steps=tuple(b - a for a, b in zip([start, *ends[:-1]], ends, strict=True)),
        seconds_decode=end - ends[-1],
    )


def _subject(pipe: Any, config: RunConfig, prompt: str) -> dict[str, Any]:
    """Return the arguments of the pipeline that say what is drawn."""
    if makes_pictures(pipe):
        number = class_number(pipe, prompt)
        return {"class_labels": None if number is None else [number]}
    found = {"prompt": prompt, "negative_prompt": config.negative_prompt, "num_frames": config.frames}
    if "max_sequence_length" in inspect.signature(type(pipe).__call__).parameters:
        found["max_sequence_length"] = config.max_sequence_length
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
