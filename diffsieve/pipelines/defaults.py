"""What a model is run with when the user says nothing: size, steps, guidance, prompts."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import UserInputError

MINI_WAN = "mini-wan"
MINI_WAN_FOLDER = Path(__file__).parent / "mini_wan"
MINI_PIXEL_DIT = "mini-pixel-dit"
# The models that ship in the package, by name.
EMBEDDED = {MINI_WAN: MINI_WAN_FOLDER, MINI_PIXEL_DIT: Path(__file__).parent / "mini_pixel_dit"}
# A model folder may hold its own `GenerationDefaults`, as JSON; mini-wan and every model exported by its training do.
DEFAULTS_FILE = "generation_defaults.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """Arguments of one generation.

    Args:
        steps: denoising steps.
        frames: frames of the clip; 1 for a model of pictures.
        height: pixels.
        width: pixels.
        guidance_scale: classifier-free guidance; 1 or less turns it off.
        max_sequence_length: text tokens; `None` where the pipeline has no such argument.
        fps: frames per second of the files that are written; does not touch the frames. `None` for pictures.
        prompts: examples that suit the model; the first one is used when no prompt is given. Of a model of pictures the
            names of all its classes.
    """

    steps: int
    frames: int
    height: int
    width: int
    guidance_scale: float
    max_sequence_length: int | None
    fps: int | None
    prompts: tuple[str, ...]


MINI_WAN_DEFAULTS = GenerationDefaults(
    steps=14,
    frames=25,
    height=192,
    width=192,
    guidance_scale=4.0,
    max_sequence_length=512,
    fps=12,
    prompts=(
        "a fox moves to the right over a blue background",
        "a strawberry grows over a green background",
        "a rocket moves up over a purple background",
        "a penguin moves in a circle over a yellow background",
    ),
)

# What stands in the place of a class where a model of pictures has none.
NO_CLASS = "picture"
_PICTURE_STEPS = 20
_WAN_FPS = 16
_WAN_SIZE_STEP = 16  # Wan pipelines refuse other sizes, whatever the factors of the VAE and the patch
_GENERIC_PROMPTS = (
    "A red fox trots through fresh snow at the edge of a pine forest in low morning light",
    "Waves roll onto a black sand beach under a cloudy sky, seen from above",
)


def generation_defaults(pipe: Any) -> GenerationDefaults:
    """Return a pipeline's defaults: those in the folder that it was loaded from, else those of its call.

    Args:
        pipe: a loaded pipeline.

    Raises:
        UserInputError: the pipeline makes neither clips from text nor pictures of classes, or the file in its folder
            is damaged.
    """
    if makes_pictures(pipe):
        side = pipe.transformer.config.sample_size
        guidance = pipe.config.guidance_scale
        return GenerationDefaults(_PICTURE_STEPS, 1, side, side, guidance, None, None, class_titles(pipe))
    file = Path(pipe.name_or_path or "") / DEFAULTS_FILE
    if pipe.name_or_path and file.is_file():
        return _read_defaults(file)
    parameters = inspect.signature(type(pipe).__call__).parameters
    needed = ("prompt", "num_frames", "num_inference_steps", "height", "width", "guidance_scale")
    missing = [name for name in needed if name not in parameters]
    others = [
        name
        for name, parameter in parameters.items()
        if name not in ("self", "prompt")
        and parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    if missing or others:
        detail = f"takes no {', '.join(missing)}" if missing else f"also needs {', '.join(others)}"
        raise UserInputError(f"model must be a text-to-video pipeline, got {type(pipe).__name__}, which {detail}")
    default = {name: parameter.default for name, parameter in parameters.items()}
    return GenerationDefaults(
        steps=default["num_inference_steps"],
        frames=default["num_frames"],
        height=default["height"],
        width=default["width"],
        guidance_scale=default["guidance_scale"],
        max_sequence_length=default.get("max_sequence_length"),
        fps=_WAN_FPS,
        prompts=_GENERIC_PROMPTS,
    )


def makes_pictures(pipe: Any) -> bool:
    """Whether a pipeline makes pictures of classes instead of clips of prompts."""
    return type(pipe).__name__ == "PixelDiTPipeline"


def class_titles(pipe: Any) -> tuple[str, ...]:
    """Return what to call the classes of a model of pictures, in their order: `(NO_CLASS,)` where it has none."""
    names, count = pipe.config.class_names, pipe.transformer.config.num_classes
    if not count:
        return (NO_CLASS,)
    return tuple(names) if names else tuple(f"class {number}" for number in range(count))


def class_number(pipe: Any, title: str) -> int | None:
    """Return the class that a title, a number or a name in any case stands for; `None` for a model without classes.

    Raises:
        UserInputError: no such class, or one for a model without classes.
    """
    text, titles = title.strip(), class_titles(pipe)
    if titles == (NO_CLASS,) and not pipe.transformer.config.num_classes:
        if text != NO_CLASS:
            raise UserInputError(f"prompt must be left out for a model without classes, got {title!r}")
        return None
    if text in titles:
        return titles.index(text)
    found: list[int] = pipe.class_ids([int(text) if text.isdecimal() else text])
    return found[0]


def _read_defaults(file: Path) -> GenerationDefaults:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return GenerationDefaults(**{**values, "prompts": tuple(values["prompts"])})
    except (ValueError, TypeError, KeyError) as error:
        names = ", ".join(field.name for field in fields(GenerationDefaults))
        raise UserInputError(f"{file} must be a JSON object with {names}: {error}") from error


def check_clip_size(pipe: Any, *, frames: int, height: int, width: int) -> None:
    """Check that the pipeline makes a clip of exactly this size; Wan pipelines round other sizes and go on.

    Args:
        pipe: a loaded pipeline with a `transformer`.
        frames: 4 k + 1 for Wan's VAE.
        height: pixels, a multiple of the VAE's factor times the patch.
        width: the same.

    Raises:
        UserInputError: the pipeline would round the size, or its position table is too short for it.
    """
    transformer = getattr(pipe, "transformer", None) or getattr(pipe, "transformer_2", None)
    if transformer is None:
        raise UserInputError(f"model must be a pipeline with a transformer, got {type(pipe).__name__}")
    time_factor = getattr(pipe, "vae_scale_factor_temporal", 1)
    space_factor = getattr(pipe, "vae_scale_factor_spatial", 1)
    patch = getattr(transformer.config, "patch_size", (1, 1, 1))
    if frames < 1 or (frames - 1) % time_factor:
        near = (max(frames - 1, 0) // time_factor) * time_factor + 1
        raise UserInputError(
            f"frames must be a multiple of {time_factor} plus 1, such as {near} or {near + time_factor}, got {frames}"
        )
    for name, value, factor in (("height", height, patch[1]), ("width", width, patch[2])):
        step = math.lcm(_WAN_SIZE_STEP, space_factor * factor)
        if value < step or value % step:
            near = max(value // step, 1) * step
            raise UserInputError(f"{name} must be a multiple of {step}, such as {near} or {near + step}, got {value}")
    table = getattr(transformer.config, "rope_max_seq_len", None)
    if table is None:
        return
    positions = {
        "frames": ((frames - 1) // time_factor + 1) // patch[0],
        "height": height // space_factor // patch[1],
        "width": width // space_factor // patch[2],
    }
    for name, needed in positions.items():
        if needed > table:
            raise UserInputError(f"{name} must need at most {table} positions in this model, got {needed}")
