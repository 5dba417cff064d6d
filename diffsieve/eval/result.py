"""What a metric returns for one clip, and the statistics over several clips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class MetricResult:
    """One metric on one pair of clips.

    Args:
        name: metric and variant, for instance ``"psnr"``.
        per_frame: one value per frame; may hold ``inf`` (PSNR of identical frames). Empty when the metric did not run.
        mean: the clip value, or `None` when the metric did not run.
        unit: ``"dB"``, or ``""`` for a number without unit.
        direction: which values are better, ``"higher"`` or ``"lower"``.
        identical_frames: frames that are equal in every value, where the metric treats them apart; else `None`.
        reason: why the metric did not run; `None` when it did.
    """

    name: str
    per_frame: tuple[float, ...]
    mean: float | None
    unit: str
    direction: Direction
    identical_frames: int | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.reason is not None):
            raise ValueError(
                f"{self.name}: mean and reason must be exclusive, got mean={self.mean!r}, reason={self.reason!r}"
            )

    @classmethod
    def missing(cls, name: str, reason: str, *, unit: str = "", direction: Direction = "higher") -> MetricResult:
        """Return the result of a metric that did not run."""
        return cls(name, (), None, unit, direction, reason=reason)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite per-frame value becomes `None`, because JSON has no infinity."""
        values = asdict(self)
        values["per_frame"] = [value if math.isfinite(value) else None for value in self.per_frame]
        return values


@dataclass(frozen=True)
class Statistics:
    """Mean and sample standard deviation (n - 1) over clips; `std` is `None` for fewer than two, `mean` for none."""

    mean: float | None
    std: float | None
    n: int

    def to_dict(self) -> dict[str, float | int | None]:
        return {"mean": self.mean, "std": self.std, "n": self.n}


def summarize(values: Sequence[float | None]) -> Statistics:
    """Return the statistics of the clip values; `None` (the metric did not run) is left out and not counted in `n`."""
    present = [float(value) for value in values if value is not None]
    if not present:
        return Statistics(mean=None, std=None, n=0)
    mean = math.fsum(present) / len(present)
    if len(present) == 1:
        return Statistics(mean=mean, std=None, n=1)
    variance = math.fsum((value - mean) ** 2 for value in present) / (len(present) - 1)
    return Statistics(mean=mean, std=math.sqrt(variance), n=len(present))
