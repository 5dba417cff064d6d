"""The sparse attention methods that `compare` and `generate` know, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserInputError

if TYPE_CHECKING:
    from ..processors import BAAttConfig, LLSAConfig
    from .config import RunConfig

UNTRAINED = (
    "LLSA changes the output of a model that was not trained with it: this shows how far, not how well LLSA works"
)
TRAINED = (
    "the model was trained with LLSA, not with dense attention: the distance says how far the two are apart, not which "
    "picture is better"
)


@dataclass(frozen=True)
class Method:
    """A method.

    Args:
        label: what pictures and tables call it.
        config: (run's arguments, what the model was trained with or `None`) -> its configuration; refuses arguments
            that have no meaning for it.
        amount: says in a word or two how much a configuration keeps or skips.
        measured: (pipeline, steps of the run) -> what it did in the latest run, with the keys of `SparsitySummary`
            that tables read: densities, steps, backend, notes.
    """

    label: str
    config: Callable[[RunConfig, LLSAConfig | None], Any]
    amount: Callable[[Any], str]
    measured: Callable[[Any, int], dict[str, Any]]


def method_label(method: str, attention: Any) -> str:
    """Return what pictures call a sparse run, such as `BA-Att 50 %`: what was asked for, as measured shares vary."""
    return f"{METHODS[method].label} {METHODS[method].amount(attention)}"


def _ba_att_config(run: RunConfig, trained: LLSAConfig | None) -> BAAttConfig:
    from ..processors import BAAttConfig

    _refuse(run, "ba-att", ("topk",))
    given: dict[str, Any] = {
        "preset": run.preset,
        "warmup_steps": run.warmup,
        "block_size": run.block_size,
        "min_tokens": run.min_tokens,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return BAAttConfig(sparsity=run.sparsity, backend=run.backend, **chosen)


def _llsa_config(run: RunConfig, trained: LLSAConfig | None) -> LLSAConfig:
    from ..processors import LLSAConfig

    _refuse(run, "llsa", ("preset", "sparsity", "warmup", "min_tokens"))
    given = {"block_size": run.block_size, "topk": run.topk}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(trained or LLSAConfig(), backend=run.backend, **chosen)


def _refuse(run: RunConfig, method: str, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(run, name) is not None:
            raise UserInputError(f"{name} has no meaning for {method}, got {getattr(run, name)!r}")


def _ba_att_measured(pipe: Any, steps: int) -> dict[str, Any]:
    from ..processors import sparsity_summary, trained_llsa

    found = sparsity_summary(pipe).to_dict()
    own = trained_llsa(pipe)
    if own is not None:
        note = f"the model was trained with {_llsa_text(own)}: dense attention and BA-Att both change its output"
        found["notes"] = [*found["notes"], note]
    return found


def _llsa_measured(pipe: Any, steps: int) -> dict[str, Any]:
    from ..processors import sparsity_summary
    from ..processors.install import llsa_controllers_of

    summary = sparsity_summary(pipe).to_dict()
    sparse, dense = len(summary["layers"]), len(summary["dense_layers"])
    density = (summary["density"] * sparse + dense) / (sparse + dense)
    return summary | {
        "density_overall": density,
        "density_sparse_steps": density,
        "steps_total": steps,
        "steps_dense": 0,
        "dense_reasons": {},
        "notes": [_llsa_note(pipe, llsa_controllers_of(pipe)[0].config)],
    }


def _llsa_note(pipe: Any, config: LLSAConfig) -> str:
    """Say what a distance from dense means for this model."""
    from ..processors import trained_llsa

    own = trained_llsa(pipe)
    if own is None:
        return UNTRAINED
    if config.attends_like(own):
        return TRAINED
    return f"the model was trained with {_llsa_text(own)}: other settings change its output, as dense attention does"


def _llsa_text(config: LLSAConfig) -> str:
    topk = config.topk if isinstance(config.topk, int) else "/".join(map(str, config.topk))
    return f"LLSA top {topk} in blocks of {config.block_size}"


METHODS = {
    "ba-att": Method(
        "BA-Att", _ba_att_config, lambda attention: f"{100 * (1 - attention.kept):.4g} %", _ba_att_measured
    ),
    "llsa": Method("LLSA", _llsa_config, lambda attention: f"top {attention.topk}", _llsa_measured),
}
