"""The components of the page that its events read and set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import gradio as gr

from .limits import Request


@dataclass(frozen=True)
class Ask(Request):
    """The controls of a request: a component in the place of each value, so that both have the same names and order."""

    def list(self) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


@dataclass(frozen=True)
class Results:
    """What shows a run."""

    headline: Any
    player: Any
    curves: Any
    metrics: Any
    cost: Any
    facts: Any
    files: Any
    code: Any
    report: Any


@dataclass(frozen=True)
class Attention:
    """The view of block masks; `choice` and `query` hold the controls, hidden while there is nothing to choose."""

    choice: Any
    query: Any
    layer: Any
    head: Any
    step: Any
    mask: Any
    picture: Any
    told: Any
    frame: Any
    row: Any
    column: Any


@dataclass(frozen=True)
class Gallery:
    """The finished runs; `none` stands where there are none."""

    none: Any
    pictures: Any
    ids: Any
    keep: Any
    told: Any
    left: Any
    right: Any
    both: Any
    player: Any
    table: Any


class Followed(NamedTuple):
    """Whose values the controls have: a list tells of its value whenever it loses the focus, which is no choice.

    Args:
        model: that was loaded.
        method: that was chosen.
        refused: model that was chosen since and could not be loaded.
    """

    model: str
    method: str
    refused: str | None = None


@dataclass(frozen=True)
class Page:
    """All components that events touch."""

    blocks: gr.Blocks
    ask: Ask
    run: Any
    cancel: Any
    status: Any
    examples: Any
    tabs: Any
    current: Any
    followed: Any
    results: Results
    attention: Attention
    sweep_values: Any
    sweep_run: Any
    sweep: Any
    gallery: Gallery
