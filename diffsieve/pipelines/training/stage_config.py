"""Settings that every training stage has: schedule, optimisers, averages, saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...errors import UserInputError


class _Phase(Protocol):
    @property
    def until(self) -> float: ...


_P = TypeVar("_P", bound=_Phase)


def check_phases(phases: Sequence[_Phase]) -> None:
    """Raise `UserInputError` unless the phases of a stage end at rising shares of it, the last one at 1."""
    ends = [phase.until for phase in phases]
    if not ends or ends != sorted(set(ends)) or ends[-1] != 1:
        raise UserInputError(f"phases must end at rising shares up to 1, got {ends}")


def phase_at(phases: Sequence[_P], progress: float) -> _P:
    """The phase that holds at `progress` in [0, 1]."""
    return next((phase for phase in phases if progress < phase.until), phases[-1])


@dataclass(frozen=True)
class StageConfig:
    """What all stages share.

    Args:
        seconds: Length of the whole stage in seconds, without the set-up before its second step; learning rate and
            phases follow the share that is over. In a leg that the schedule is fitted to, only the ratio of the stages
            counts.
        steps: Length of the whole stage in optimiser steps; takes the place of `seconds` when given.
        muon_lr: Peak learning rate of Muon (spectral size of one step on a matrix).
        adam_lr: Peak learning rate of AdamW (all other parameters).
        adam_beta2: Decay of AdamW's second moment, in [0, 1).
        weight_decay: Decoupled, on the Muon matrices.
        adam_weight_decay: Decoupled, on all other parameters.
        warmup: Share of the stage with a rising learning rate.
        hold: Share of the stage after which the learning rate falls linearly to 0.
        clip_norm: Largest gradient norm.
        ema_decay: Decay per step of the averaged weights, in [0, 1).
        log_every: Steps between lines of the stage log; also how often processes agree on the time.
        save_every: Seconds between saves of the state and of the averaged weights.
        sample_every: Seconds between contact sheets; 0 = none; None = 120 on a GPU and none on a CPU.
    """

    seconds: float = 300.0
    steps: int | None = None
    muon_lr: float = 0.02
    adam_lr: float = 1e-3
    adam_beta2: float = 0.98
    weight_decay: float = 0.0
    adam_weight_decay: float = 0.0
    warmup: float = 0.02
    hold: float = 0.5
    clip_norm: float = 1.0
    ema_decay: float = 0.998
    log_every: int = 10
    save_every: float = 60.0
    sample_every: float | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "steps", "clip_norm", "log_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserInputError(f"{name} must be positive, got {value}")
        for name in ("muon_lr", "adam_lr", "weight_decay", "adam_weight_decay", "sample_every"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserInputError(f"{name} must be at least 0, got {value}")
        for name in ("ema_decay", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserInputError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not 0 <= self.warmup <= self.hold <= 1:
            raise UserInputError(
                f"warmup and hold must satisfy 0 <= warmup <= hold <= 1, got {self.warmup}, {self.hold}"
            )

    def learning_rate_factor(self, progress: float) -> float:
        """Factor in [0, 1] on the peak learning rates at `progress` in [0, 1]."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.05)
        if progress <= self.hold or self.hold == 1:
            return 1.0
        return max(0.0, (1 - progress) / (1 - self.hold))
