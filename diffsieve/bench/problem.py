"""What the runner knows of an operation: problems, the variants that solve them, and how each is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import BenchConfig


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be timed.

    Args:
        call: what is timed; all its inputs are there.
        check: compares the result with fp64 and returns `error`, `bound` and what else belongs to it; `passes` judges.
        flops: floating-point operations of a call, for the rate; `None` where a rate says nothing.
        graph: whether the call may be captured as a CUDA graph.
        extra: further measurements for the row, made after the time.
    """

    call: Callable[[], object]
    check: Callable[[], dict[str, Any]]
    flops: float | None = None
    graph: bool = True
    extra: Callable[[], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Variant:
    """One row of a result.

    Args:
        name: unique in its problem.
        prepare: given what `Problem.build` returned, makes the call ready.
        details: fields of the row, such as `method` and `sparsity`.
        baseline: what speed-ups are over. Measured anew in every leg, since ratios are of one process.
        peer: a kernel of others: where it fails, the run does not.
    """

    name: str
    prepare: Callable[[Any], Prepared]
    details: Mapping[str, Any] = field(default_factory=dict)
    baseline: bool = False
    peer: bool = False


@dataclass(frozen=True)
class Problem:
    """Inputs of one size, and all that is measured on them.

    Args:
        name: unique in its operation.
        build: makes the inputs, which the runner drops when the problem is done.
        variants: baselines first.
        details: fields of all its rows, such as `tokens`.
        absent: what cannot be measured at this size, with the reason.
    """

    name: str
    build: Callable[[], Any]
    variants: tuple[Variant, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """Something that can be measured.

    Args:
        name: on the command line and of the file.
        summary: one line for people.
        settings: what all legs of a run must have in common beside device, dtype and versions.
        problems: sizes and variants for a configuration.
        absent: what cannot be measured here at all, with the reason.
        gate: a check against the fp64 reference on small inputs, before anything else; `None` where each row's own
            check is against the definition.
    """

    name: str
    summary: str
    settings: Callable[[BenchConfig], dict[str, Any]]
    problems: Callable[[BenchConfig], list[Problem]]
    absent: Callable[[BenchConfig], dict[str, str]] = lambda config: {}
    gate: Callable[[BenchConfig], dict[str, Any]] | None = None


def passes(check: Mapping[str, Any]) -> bool:
    """Whether each error of a check is within its bound. NaN never is; no error, no pass.

    Args:
        check: `error` and `bound`, a number each or dictionaries by the same names; `ok`, where present, must hold.
    """
    errors, bounds = check.get("error"), check.get("bound")
    if not isinstance(errors, Mapping):
        errors, bounds = {"": errors}, {"": bounds}
    if not isinstance(bounds, Mapping) or not errors or errors.keys() != bounds.keys():
        return False
    numbers = all(isinstance(value, float | int) for group in (errors, bounds) for value in group.values())
    return numbers and all(errors[name] <= bounds[name] for name in bounds) and bool(check.get("ok", True))
