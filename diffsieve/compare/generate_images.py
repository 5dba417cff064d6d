"""Generate pictures with a pixel-space DiT into PNG files and a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UserInputError
from ..pipelines.defaults import generation_defaults
from .canvas import to_image
from .clip import generate_clip
from .config import GenerateConfig
from .files import remove_parts, write_json, write_png
from .folder import REPORT, item_name, make_output
from .prepare import fit_pictures
from .progress import ItemProgress, ProgressCallback
from .report import GENERATE_SCHEMA, clip_seconds, environment, now
from .video import to_uint8

RUN = "picture"
_OF_SPARSE = ("method", "preset", "sparsity", "topk", "warmup", "block_size", "min_tokens", "backend")


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
    config = fit_pictures(config, pipe).filled(generation_defaults(pipe))
    assert config.steps is not None
    items = [(index, prompt, seed) for index, prompt in enumerate(config.prompt) for seed in config.seed]
    names = [f"{item_name(*item)}.png" for item in items]
    taken = [name for name in [*names, REPORT] if (config.out / name).exists()]
    if taken and not overwrite:
        raise UserInputError(f"out must not hold {taken[0]} already, got {config.out}; overwrite replaces it")
    make_output(config.out)
    remove_parts(config.out)
    records = []
    for number, ((_, prompt, seed), name) in enumerate(zip(items, names, strict=True)):
        teller = ItemProgress(progress, number, len(items), prompt, seed, config.steps)
        on_step = teller.step_callback(RUN)
        clip = generate_clip(pipe, config, prompt=prompt, seed=seed, name="generated", on_step=on_step)
        teller.tell(RUN, "write", config.steps)
        write_png(config.out / name, to_image(to_uint8(clip.frames)[0]))
        records.append({"prompt": prompt, "seed": seed, "file": name, "seconds": clip_seconds(clip), "sparsity": None})
        teller.tell(RUN, "done", config.steps)
    report = {
        "schema": GENERATE_SCHEMA,
        "created": now(),
        "command": None if command is None else list(command),
        "settings": config.settings() | {"attention": None, "own_attention": pipe.transformer.config.attention_method},
        "prompt": list(config.prompt),
        "seed": list(config.seed),
        "environment": environment(pipe),
        "clips": records,
    }
    write_json(config.out / REPORT, report)
    return report


def _check(config: GenerateConfig) -> None:
    standard = GenerateConfig()
    given = [name for name in _OF_SPARSE if getattr(config, name) != getattr(standard, name)]
    if given:
        raise UserInputError(
            f"{given[0]} must be left out for a model of pictures, which attends as it was trained to, got "
            f"{getattr(config, given[0])!r}"
        )
