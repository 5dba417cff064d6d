"""What the controls of the page show for a model and a method: values, choices, and which of them are there at all."""

from __future__ import annotations

import math
from typing import Any

from ..pipelines.defaults import EMBEDDED, NO_CLASS
from .limits import Limits
from .models import LoadedModel

SWEEPS = {"ba-att": "25, 50, 75, 90", "llsa": "2, 4, 8, 16"}
_BLOCK_SIZES = {"ba-att": 128, "llsa": 16}
_TOPK = 8


def model_controls(model: LoadedModel, limits: Limits) -> dict[str, dict[str, Any]]:
    """Return the properties of the controls, by their names in `Request`, that a model begins with."""
    defaults, clips = model.defaults, model.classes is None
    classes = list(model.classes or ())
    width, height = (min(side, limits.side) for side in (defaults.width, defaults.height))
    if not clips and width * height > limits.picture:
        width = height = math.isqrt(limits.picture)
    controls = subject_controls(clips=clips, classes=classes) | method_controls(model.method, model)
    values = {
        "prompt": defaults.prompts[0] if clips else "",
        "steps": min(defaults.steps, limits.steps),
        "frames": min(defaults.frames, limits.frames),
        "width": width,
        "height": height,
        "guidance": defaults.guidance_scale,
        "method": model.method,
        "min_tokens": shortest_sparse(model.name),
    }
    return with_values(controls, values)


def shortest_sparse(name: str) -> int | None:
    """Return the shortest sparse sequence that a model begins with; `None` leaves it to the method.

    The embedded models show what sparse attention does, though at their lengths it does not pay on a GPU.
    """
    return 0 if name in EMBEDDED else None


def with_values(controls: dict[str, dict[str, Any]], values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the properties of controls together with values of these and of others."""
    return controls | {name: controls.get(name, {}) | {"value": value} for name, value in values.items()}


def subject_controls(*, clips: bool, classes: list[str]) -> dict[str, dict[str, Any]]:
    """Return what says what is made: a prompt and frames for clips, a class and any size for pictures."""
    shown = not clips and classes != [NO_CLASS]
    step = 16 if clips else 1
    return {
        "width": {"step": step},
        "height": {"step": step},
        "prompt": {"visible": clips},
        "negative_prompt": {"visible": clips},
        "frames": {"visible": clips},
        "class_name": {"choices": classes, "value": classes[0] if classes else None, "visible": shown},
    }


def method_controls(method: Any, model: LoadedModel | None) -> dict[str, dict[str, Any]]:
    """Return the controls of a method, LLSA with the numbers of the model's training.

    Args:
        method: "ba-att" or "llsa".
        model: the model that is chosen, `None` where it is not loaded.
    """
    llsa = method == "llsa"
    trained = model.trained if model is not None and llsa else None
    topk: Any = _TOPK if trained is None else trained.topk
    block_size = _BLOCK_SIZES["llsa" if llsa else "ba-att"] if trained is None else trained.block_size
    return {
        **{name: {"visible": not llsa} for name in ("preset", "sparsity", "warmup", "min_tokens")},
        # A number for each level is left to the training.
        "topk": {"visible": llsa, "value": topk if isinstance(topk, int) else None},
        "block_size": {"value": block_size},
    }


def sweep_controls(method: Any, most: int) -> dict[str, Any]:
    """Return the field of a sweep: sparsities, with LLSA numbers of top k; `most`: values of one sweep."""
    llsa = method == "llsa"
    return {
        "value": SWEEPS["llsa" if llsa else "ba-att"],
        "label": "Top k, blocks kept per level" if llsa else "Sparsities, %",
        "info": f"1 to {most} numbers with commas; everything else as set on the left. The dense side is made once.",
    }
