"""What a client may ask for. All is checked here, whatever the page allowed: any program can call the server."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compare import METHODS, CompareConfig
from ..errors import UserInputError

PRESETS = ("default", "paper")

# What a run keeps of the choices of LLSA, for the attention view, grows with it.
_MOST_TOPK = 128
_LEAST_SIDE = 8  # pixels, of a picture


@dataclass(frozen=True)
class Limits:
    """Bounds of one request.

    Args:
        prompt: characters of the prompt and of the negative prompt.
        steps: denoising steps.
        frames: of a clip.
        side: pixels of height and width.
        pixels: frames times height times width: what one request may cost in memory and time.
        picture: pixels of a picture. Each is a token, and dense attention grows with the square of them.
        sweep: values of one sweep.
    """

    prompt: int = 1000
    steps: int = 100
    frames: int = 129
    side: int = 1280
    pixels: int = 81 * 720 * 1280
    picture: int = 512 * 512
    sweep: int = 6

    @classmethod
    def for_device(cls, device_type: str) -> Limits:
        """Return the limits for "cpu", "cuda" or "mps".

        On a CPU a clip may have 24 megapixels over all frames; without CUDA a picture may have 128 x 128 pixels.
        """
        limits = cls() if device_type == "cuda" else cls(picture=128 * 128)
        return dataclasses.replace(limits, pixels=24_000_000) if device_type == "cpu" else limits


@dataclass(frozen=True)
class Request:
    """What one comparison is asked to be; the values are as a client sent them and may be of any type.

    Args:
        model: a name that the server offers.
        prompt: text.
        negative_prompt: text, may be empty.
        method: of `METHODS`.
        preset: of BA-Att.
        sparsity: share of block pairs skipped.
        warmup: share of the steps that run dense first.
        steps: denoising steps.
        frames: of the clip.
        width: pixels.
        height: pixels.
        seed: start value of the noise.
        guidance: classifier-free guidance.
        block_size: tokens of a block; `None` leaves it to the method, and to the training of the model.
        min_tokens: shorter sequences run dense; `None` leaves it to the method.
        topk: blocks that a query keeps per level, with LLSA; which takes no preset, sparsity, warm-up and min_tokens,
            so that these are not looked at. `None` leaves it to the training of the model.
        class_name: for a model of pictures, which class; `None` takes the first. Such a model takes no prompt, no
            negative prompt and no frames, so that these are not looked at.
    """

    model: Any
    prompt: Any
    negative_prompt: Any
    method: Any
    preset: Any
    sparsity: Any
    warmup: Any
    steps: Any
    frames: Any
    width: Any
    height: Any
    seed: Any
    guidance: Any
    block_size: Any = 128
    min_tokens: Any = None
    topk: Any = 8
    class_name: Any = None


def check_model(name: Any, models: Sequence[str]) -> str:
    """Return the name of a model if it is one of those that may be asked for.

    Raises:
        UserInputError: it is not.
    """
    return _choice("model", name, models)


def check_request(request: Request, limits: Limits, classes: Sequence[str] | None = None) -> CompareConfig:
    """Turn a request into the configuration of a comparison.

    Args:
        request: as it came; its model is checked already (`check_model`).
        limits: of this server.
        classes: of a model of pictures; `None` for a model of clips.

    Returns:
        A configuration whose `out` is still to be set.

    Raises:
        UserInputError: names the first field that is out of its range, the range, and what came.
    """
    subject = _clip(request, limits) if classes is None else _picture(request, limits, classes)
    return CompareConfig(model=request.model, save_masks=True, out=Path("-"), **subject, **_settings(request, limits))


def check_unloaded(request: Request, limits: Limits) -> None:
    """Check what can be checked while nothing is known of the model, not even whether it makes clips.

    Raises:
        UserInputError: see `check_request`.
    """
    _settings(request, limits)
    for name in ("width", "height"):
        whole(name, getattr(request, name), _LEAST_SIDE, limits.side)


def _settings(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the fields that every model has."""
    method = _choice("method", request.method, list(METHODS))
    return {
        "method": method,
        "steps": whole("steps", request.steps, 1, limits.steps),
        "seed": (whole("seed", request.seed, 0, 2**31 - 1),),
        "guidance_scale": number("guidance", request.guidance, 0.0, 30.0),
        "block_size": _optional("block size", request.block_size, 4, 1024),
        **(_llsa(request) if method == "llsa" else _ba_att(request)),
    }


def _clip(request: Request, limits: Limits) -> dict[str, Any]:
    prompt = _text("prompt", request.prompt, limits.prompt)
    if not prompt:
        raise UserInputError("prompt must not be empty")
    negative = _text("negative prompt", request.negative_prompt, limits.prompt)
    frames = whole("frames", request.frames, 1, limits.frames)
    width, height = (_side(name, getattr(request, name), limits.side) for name in ("width", "height"))
    if frames * width * height > limits.pixels:
        raise UserInputError(
            f"frames x width x height must be at most {limits.pixels:,} pixels on this server, "
            f"got {frames} x {width} x {height} = {frames * width * height:,}"
        )
    sizes = {"frames": frames, "width": width, "height": height}
    return {"prompt": (prompt,), "negative_prompt": negative or None, **sizes}


def _picture(request: Request, limits: Limits, classes: Sequence[str]) -> dict[str, Any]:
    name = classes[0] if request.class_name in (None, "") else _choice("class", request.class_name, classes)
    width, height = (whole(name, getattr(request, name), _LEAST_SIDE, limits.side) for name in ("width", "height"))
    if width * height > limits.picture:
        raise UserInputError(
            f"width x height must be at most {limits.picture:,} pixels on this server, "
            f"got {width} x {height} = {width * height:,}"
        )
    return {"prompt": (name,), "width": width, "height": height}


def _ba_att(request: Request) -> dict[str, Any]:
    return {
        "preset": _choice("preset", request.preset, PRESETS),
        "sparsity": number("sparsity", request.sparsity, 0.0, 0.99),
        "warmup": number("warm-up", request.warmup, 0.0, 1.0),
        "min_tokens": _optional("min tokens", request.min_tokens, 0, 10**7),
    }


def _llsa(request: Request) -> dict[str, Any]:
    return {"topk": _optional("top k", request.topk, 1, _MOST_TOPK)}


def check_sweep(request: Request, values: Any, limits: Limits) -> list[Request]:
    """Return the requests of a sweep: one for each sparsity, with LLSA for each top k, ascending, each once.

    Raises:
        UserInputError: none, too many, or one that is out of range.
    """
    llsa = _choice("method", request.method, list(METHODS)) == "llsa"
    names = "numbers of top k" if llsa else "sparsities"
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UserInputError(f"{names} must be a list of numbers, got {shown(values)}")
    if not 1 <= len(values) <= limits.sweep:
        raise UserInputError(f"{names} must hold 1 to {limits.sweep} numbers, got {len(values)}")
    if llsa:
        numbers = sorted({whole("top k", value, 1, _MOST_TOPK) for value in values})
        return [dataclasses.replace(request, topk=value) for value in numbers]
    shares = sorted({number("sparsity", value, 0.0, 0.99) for value in values})
    return [dataclasses.replace(request, sparsity=value) for value in shares]


def parse_sweep(text: Any, method: Any) -> list[float]:
    """Read "25, 50" as [0.25, 0.5], shares from per cent; with LLSA as it stands.

    Raises:
        UserInputError: not numbers with commas.
    """
    llsa = method == "llsa"
    wrong = UserInputError(
        f"{'numbers of top k' if llsa else 'sparsities'} must be numbers with commas such as "
        f"{'2, 4' if llsa else '25, 50'}, got {shown(text)}"
    )
    if not isinstance(text, str) or len(text) > 200:
        raise wrong
    try:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [float(part) if llsa else float(part.removesuffix("%")) / 100 for part in parts]
    except ValueError:
        raise wrong from None


def whole(name: str, value: Any, low: int, high: int) -> int:
    """Return a whole number in [low, high]; JSON has one kind of number, so 14.0 counts as 14."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not low <= value <= high or int(value) != value:
        raise UserInputError(f"{name} must be a whole number from {low:,} to {high:,}, got {shown(value)}")
    return int(value)


def number(name: str, value: Any, low: float, high: float) -> float:
    """Return a number in [low, high], rounded to six decimals."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserInputError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}")
    return round(float(value), 6)


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _optional(name: str, value: Any, low: int, high: int) -> int | None:
    """Return a whole number, or `None` for a field that was left empty."""
    return None if value in (None, "") else whole(name, value, low, high)


def _side(name: str, value: Any, most: int) -> int:
    pixels = whole(name, value, 16, most)
    if pixels % 16:
        raise UserInputError(f"{name} must be a multiple of 16 pixels, got {pixels}")
    return pixels


def _choice(name: str, value: Any, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise UserInputError(f"{name} must be one of {', '.join(known)}, got {shown(value)}")
    return value


def _text(name: str, value: Any, most: int) -> str:
    """Return a text without control characters and outer spaces."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserInputError(f"{name} must be a text, got {shown(value)}")
    if len(value) > most:
        raise UserInputError(f"{name} must have at most {most:,} characters, got {len(value):,}")
    kept = (" " if character.isspace() else character for character in value)
    return "".join(character for character in kept if unicodedata.category(character)[0] != "C").strip()
