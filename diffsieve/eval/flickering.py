"""Temporal flickering, a dimension of VBench (Huang et al., CVPR 2024) that needs no weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..errors import UserInputError
from .clips import ClipSource, open_clip
from .frames import to_float64
from .result import MetricResult

NAME = "temporal_flickering"


@dataclass
class FlickeringMeter:
    """Collects the mean absolute differences of neighbouring frames, chunk by chunk."""

    _last: torch.Tensor | None = None
    _differences: list[float] = field(default_factory=list)

    def update(self, frames: torch.Tensor) -> None:
        """Take the next frames (n, 3, H, W) in [0, 1]; they are rounded to 8 bits."""
        levels = (frames * 255.0).round()
        if self._last is not None:
            levels = torch.cat([self._last, levels])
        self._differences += (levels[1:] - levels[:-1]).abs().mean(dim=(1, 2, 3)).tolist()
        self._last = levels[-1:]

    def result(self, name: str = NAME) -> MetricResult:
        """Return the clip's value and, per pair of neighbouring frames, `(255 - difference) / 255`."""
        if not self._differences:
            return MetricResult.missing(name, "temporal flickering needs at least two frames, got one")
        values = tuple((255.0 - difference) / 255.0 for difference in self._differences)
        return MetricResult(name, values, math.fsum(values) / len(values), "", "higher")


def temporal_flickering(clip: ClipSource) -> MetricResult:
    """Return `(255 - mean |f[t] - f[t + 1]|) / 255` of one clip in 8-bit levels; 1 for a still clip.

    It rewards blur and stillness: a value says nothing without a paired metric beside it.

    Args:
        clip: see `open_clip`.

    Raises:
        UserInputError: values outside [0, 1], or a clip that cannot be read.
    """
    reader, meter, empty = open_clip(clip), FlickeringMeter(), True
    for frame in reader.frames():
        values = to_float64(frame[None])
        if not (float(values.min()) >= 0.0 and float(values.max()) <= 1.0):
            raise UserInputError(f"{reader.name} must be finite and inside [0, 1]")
        meter.update(values)
        empty = False
    if empty:
        raise UserInputError(f"{reader.name} must have at least one frame, got none")
    return meter.result()
