"""The sparse attention methods that `compare` and `generate` know, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..processors import BAAttConfig
    from .config import RunConfig


@dataclass(frozen=True)
class Method:
    """A method: what pictures and tables call it, and its configuration made from the run's arguments."""

    label: str
    config: Callable[[RunConfig], Any]


def _ba_att_config(run: RunConfig) -> BAAttConfig:
    from ..processors import BAAttConfig

    given: dict[str, Any] = {
        "preset": run.preset,
        "warmup_steps": run.warmup,
        "block_size": run.block_size,
        "min_tokens": run.min_tokens,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return BAAttConfig(sparsity=run.sparsity, backend=run.backend, **chosen)


METHODS = {"ba-att": Method("BA-Att", _ba_att_config)}
