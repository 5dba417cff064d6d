"""Generate pictures with a pixel-space DiT into PNG files and a report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..errors import DiffsieveError, UserInputError
from .config import GenerateConfig
from .files import remove_parts, write_json, write_png
from .folder import REPORT, item_name
from .progress import ItemProgress, ProgressCallback
from .report import GENERATE_SCHEMA, environment, now

RUN = "picture"
_OF_VIDEO = ("preset", "topk", "warmup", "block_size", "min_tokens", "frames", "max_sequence_length", "fps")


def is_image_pipeline(pipe: Any) -> bool:
    """Whether a pipeline makes pictures of classes instead of clips of prompts."""
    return type(pipe).__name__ == "PixelDiTPipeline"


def generate_images(
    config: GenerateConfig,
    pipe: Any,
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Generate one picture for every class and seed, `NNN-<class>-seed<seed>.png`, and report.json at the end.

    Args:
        config: with device and dtype; its prompts are names or numbers of classes. Without any, the first class is
            drawn, or no class in particular by a model without classes.
        pipe: a `PixelDiTPipeline`, which attends as it was trained to.
        overwrite: replace files of the same name.
        progress: told after every step.
        command: the words of the command line, for the report.

    Returns:
        What report.json holds; a picture is a "clip" without a density.

    Raises:
        UserInputError: an argument that a model of pictures does not have, an unknown class, a size it cannot take, or
            files of the same name.
        DiffsieveError: a picture holds NaN.
    """
    _check(config)
    labels, prompts = _classes(config, pipe)
    side = pipe.transformer.config.sample_size
    config = dataclasses.replace(
        config,
        steps=config.steps or 20,
        height=config.height or side,
        width=config.width or side,
        guidance_scale=pipe.config.guidance_scale if config.guidance_scale is None else config.guidance_scale,
        prompt=prompts,
    )
    assert config.steps is not None
    items = [(index, seed) for index in range(len(labels)) for seed in config.seed]
    names = [f"{item_name(index, prompts[index] if prompts else RUN, seed)}.png" for index, seed in items]
    taken = [name for name in [*names, REPORT] if (config.out / name).exists()]
    if taken and not overwrite:
        raise UserInputError(f"out must not hold {taken[0]} already, got {config.out}; overwrite replaces it")
    config.out.mkdir(parents=True, exist_ok=True)
    remove_parts(config.out)
    pipe.set_progress_bar_config(disable=True)
    records = []
    for number, ((index, seed), name) in enumerate(zip(items, names, strict=True)):
        prompt = prompts[index] if prompts else RUN
        teller = ItemProgress(progress, number, len(items), prompt, seed, config.steps)
        pixels, seconds = _draw(pipe, config, labels[index], seed, teller.step_callback(RUN))
        if not (pixels == pixels).all():
            raise DiffsieveError(f"the picture of {prompt!r}, seed {seed}, holds values that are not finite")
        teller.tell(RUN, "write", config.steps)
        write_png(config.out / name, pipe.numpy_to_pil(pixels)[0])
        records.append({"prompt": prompt, "seed": seed, "file": name, "seconds": seconds, "sparsity": None})
        teller.tell(RUN, "done", config.steps)
    report = {
        "schema": GENERATE_SCHEMA,
        "created": now(),
        "command": None if command is None else list(command),
        "settings": config.settings() | {"attention": None, "own_attention": pipe.transformer.config.attention_method},
        "prompt": list(prompts),
        "seed": list(config.seed),
        "environment": environment(pipe),
        "clips": records,
    }
    write_json(config.out / REPORT, report)
    return report


def _draw(
    pipe: Any, config: GenerateConfig, label: int | None, seed: int, on_step: Callable[[int], None]
) -> tuple[Any, dict[str, Any]]:
    """One picture (1, H, W, 3) in [0, 1], and the seconds that it took."""
    ends = [time.perf_counter()]

    def after_step(_pipe: Any, step: int, _timestep: Any, _tensors: dict[str, Any]) -> dict[str, Any]:
        ends.append(time.perf_counter())
        on_step(step + 1)
        return {}

    output = pipe(
        None if label is None else [label],
        height=config.height,
        width=config.width,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance_scale,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        callback_on_step_end=after_step,
    )
    total = round(time.perf_counter() - ends[0], 4)
    steps = [round(end - begin, 4) for begin, end in pairwise(ends)]
    return output.images, {"total": total, "steps": steps, "decode": 0.0}


def _check(config: GenerateConfig) -> None:
    given = [name for name in _OF_VIDEO if getattr(config, name) is not None]
    given += [name for name in ("negative_prompt",) if config.negative_prompt]
    standard = GenerateConfig()
    given += [name for name in ("method", "sparsity", "backend") if getattr(config, name) != getattr(standard, name)]
    if given:
        raise UserInputError(
            f"{given[0]} must be left out for a model of pictures, which attends as it was trained to, got "
            f"{getattr(config, given[0])!r}"
        )


def _classes(config: GenerateConfig, pipe: Any) -> tuple[list[int | None], tuple[str, ...]]:
    """Numbers of the classes to draw, and what to call them."""
    names = pipe.config.class_names
    if not pipe.transformer.config.num_classes:
        if config.prompt:
            raise UserInputError(f"prompt must be left out for a model without classes, got {config.prompt[0]!r}")
        return [None], ()
    wanted: list[int | str] = [int(text) if text.strip().isdecimal() else text.strip() for text in config.prompt]
    found = pipe.class_ids(wanted or [0])
    return list(found), tuple(names[number] if names else f"class {number}" for number in found)
