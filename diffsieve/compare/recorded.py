"""What a sparse run recorded layer by layer and step by step: how it is looked up, and how it is collected."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from ..errors import UserInputError

MAX_BYTES = 256 << 20
MAX_LAYERS = 12

Item = TypeVar("Item")


def spread(values: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the values, evenly spaced, the first and the last among them."""
    count = min(count, len(values))
    if count < 2:
        return list(values[-count:]) if count else []
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


@dataclass(frozen=True)
class Recorded(ABC):
    """Entries by layer and step, of one guidance branch.

    Args:
        layers: N names, such as "transformer.blocks.3", one for each entry.
        steps: N denoising steps, from 0.
        block_size: tokens of a block.
        grid_thw: (frames, height, width) in tokens.
    """

    layers: tuple[str, ...]
    steps: tuple[int, ...]
    block_size: int
    grid_thw: tuple[int, int, int]

    @property
    @abstractmethod
    def heads(self) -> int:
        """Heads of every layer."""

    @abstractmethod
    def _entries(self, places: list[int]) -> dict[str, Any]:
        """Return the fields of the subclass that have an item for each entry, with those at `places` alone."""

    def thinned(self, steps: int) -> Self:
        """Return at most so many evenly spaced steps of each layer."""
        kept = {(layer, step) for layer in self.layer_names() for step in spread(self.steps_of(layer), steps)}
        places = [i for i, pair in enumerate(zip(self.layers, self.steps, strict=True)) if pair in kept]
        layers, numbers = tuple(self.layers[i] for i in places), tuple(self.steps[i] for i in places)
        return dataclasses.replace(self, layers=layers, steps=numbers, **self._entries(places))

    def layer_names(self) -> list[str]:
        """Return the layers, in the order of the model."""
        return list(dict.fromkeys(self.layers))

    def steps_of(self, layer: str) -> list[int]:
        """Return the steps that were recorded of a layer."""
        return sorted(step for name, step in zip(self.layers, self.steps, strict=True) if name == layer)

    def _check_head(self, head: int) -> None:
        if not 0 <= head < self.heads:
            raise UserInputError(f"head must be in [0, {self.heads - 1}], got {head}")

    def _place(self, token: tuple[int, int, int]) -> int:
        """Return the raster index of a token."""
        for name, value, size in zip(("frame", "row", "column"), token, self.grid_thw, strict=True):
            if not 0 <= value < size:
                raise UserInputError(f"{name} must be in [0, {size - 1}], got {value}")
        return int(np.ravel_multi_index(token, self.grid_thw))

    def _entry(self, layer: str, step: int) -> int:
        if layer not in self.layers:
            raise UserInputError(f"layer must be one of {', '.join(self.layer_names())}, got {layer!r}")
        for entry, (name, number) in enumerate(zip(self.layers, self.steps, strict=True)):
            if name == layer and number == step:
                return entry
        raise UserInputError(f"step must be one of {', '.join(map(str, self.steps_of(layer)))}, got {step}")


class Collector(ABC, Generic[Item]):
    """Takes what a running generation recorded after each step.

    Args:
        pipe: with sparse attention applied and `record_masks` set.
        steps: of the generation.
    """

    def __init__(self, pipe: Any, steps: int) -> None:
        self._pipe, self._steps = pipe, steps
        self._latest: dict[str, Any] = {}
        self._wanted_steps: set[int] = set()
        self._wanted_layers: set[str] = set()
        self.first: Item | None = None
        # Step, layer, and the arrays of `_pack`: nothing that would keep memory of the device.
        self.entries: list[tuple[int, str, tuple[np.ndarray, ...]]] = []

    @abstractmethod
    def _found(self) -> list[tuple[str, Any, Item]]:
        """Return (layer, an object that is another one after every new call, what was recorded) of each layer."""

    @abstractmethod
    def _pack(self, item: Item) -> tuple[np.ndarray, ...]:
        """Return what is kept of one layer and step."""

    def after_step(self, finished: int) -> None:
        """Look for what is new; `finished` counts the steps done."""
        try:
            found = self._found()
        except UserInputError:  # no sparse step yet
            return
        step = finished - 1
        for layer, mark, item in found:
            # A dense step leaves what an earlier one recorded in place.
            if self._latest.get(layer) is mark:
                continue
            self._latest[layer] = mark
            if self.first is not None and (step not in self._wanted_steps or layer not in self._wanted_layers):
                continue
            packed = self._pack(item)
            if self.first is None:
                self.first = item
                fit = max(1, MAX_BYTES // sum(array.nbytes for array in packed))
                layers = [name for name, *_ in found]
                self._wanted_layers = {layers[place] for place in spread(range(len(layers)), fit)}
                steps = spread(range(step, self._steps), max(1, fit // len(self._wanted_layers)))
                self._wanted_steps = set(steps)
            if step in self._wanted_steps and layer in self._wanted_layers:
                self.entries.append((step, layer, packed))
