"""The keys that LLSA chose in a run: collected step by step, kept in one file, looked up by layer, head and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .files import atomic_path
from .recorded import Collector, Recorded

if TYPE_CHECKING:
    from ..processors import RecordedSelection

_MOST_BLOCKS = 2048  # sides of a matrix that is drawn


@dataclass(frozen=True)
class Selections(Recorded):
    """Chosen keys by layer and step, of one guidance branch.

    Args:
        layers, steps, block_size, grid_thw: see `Recorded`.
        indices: one array for each level from fine to coarse, int32 (N, H, n_l, K_l): tokens of level l that each
            pooled query of level l keeps, -1 after the last one; see `hierarchical_topk`.
        order: name of the token order in which the blocks are counted.
        raster_index: (L,) int32, raster index of each token of the sequence; empty for raster order.
    """

    indices: tuple[np.ndarray, ...]
    order: str
    raster_index: np.ndarray

    @property
    def heads(self) -> int:
        return int(self.indices[0].shape[1])

    @property
    def drawn_level(self) -> int:
        """The level whose blocks `mask` tells of, from 1: the finest one that makes a picture."""
        sizes = [array.shape[2] for array in self.indices]
        return next((place for place, size in enumerate(sizes, 1) if size <= _MOST_BLOCKS), len(sizes))

    def mask(self, layer: str, step: int, head: int) -> np.ndarray:
        """Return the pairs of blocks of `drawn_level` in which keys were looked at more finely: (n, n) bool.

        Raises:
            UserInputError: no such layer, step or head; the message says which there are.
        """
        entry = self._entry(layer, step)
        self._check_head(head)
        kept = self.indices[self.drawn_level - 1][entry, head]
        size = len(kept)
        matrix = np.zeros((size, size + 1), dtype=bool)  # the last column takes what is no key
        matrix[np.arange(size)[:, None], np.where(kept < 0, size, kept)] = True
        return matrix[:, :size]

    def finest(self, layer: str, step: int, head: int, token: tuple[int, int, int]) -> np.ndarray:
        """Return the finest level at which the query of one token attends to each token: int8 (frames, height, width).

        0 is the token itself, l a mean of block_size^l tokens; `len(indices)` everything is part of.

        Args:
            layer: one of `layer_names`.
            step: one of `steps_of(layer)`.
            head: in [0, heads).
            token: (frame, row, column) in the token grid.

        Raises:
            UserInputError: no such layer, step, head or token.
        """
        from ..kernels.llsa import llsa_selection_map

        entry, place = self._entry(layer, step), self._place(token)
        self._check_head(head)
        levels = llsa_selection_map(
            [torch.from_numpy(array[entry : entry + 1, head : head + 1]) for array in self.indices],
            [place],
            length=int(np.prod(self.grid_thw)),
            block_size=self.block_size,
            order=torch.from_numpy(self.raster_index).long() if self.raster_index.size else None,
        )
        return levels.numpy().reshape(self.grid_thw)

    def orders_of(self, layer: str, step: int) -> tuple[str, ...]:
        """Return the token order of each head, which is the same for all."""
        self._entry(layer, step)
        return (self.order,) * self.heads

    def _entries(self, places: list[int]) -> dict[str, Any]:
        return {"indices": tuple(array[places] for array in self.indices)}


class SelectionCollector(Collector["RecordedSelection"]):
    """Takes the choices of a running generation after each step."""

    def _found(self) -> list[tuple[str, Any, RecordedSelection]]:
        from ..processors import recorded_selections

        return [(found.layer, found.indices[0], found) for found in recorded_selections(self._pipe)]

    def _pack(self, item: RecordedSelection) -> tuple[np.ndarray, ...]:
        return _pack(item)

    def result(self) -> Selections | None:
        """Return what was collected; `None` where nothing was chosen."""
        return None if self.first is None or not self.entries else _selections(self.first, self.entries)


def selections_of(item: RecordedSelection) -> Selections:
    """Return what one layer chose last, as that of step 0."""
    return _selections(item, [(0, item.layer, _pack(item))])


def _pack(item: RecordedSelection) -> tuple[np.ndarray, ...]:
    return tuple(level[0].cpu().numpy() for level in item.indices)


def _selections(first: RecordedSelection, entries: Sequence[tuple[int, str, tuple[np.ndarray, ...]]]) -> Selections:
    raster = first.raster_index
    return Selections(
        layers=tuple(layer for _, layer, _ in entries),
        steps=tuple(step for step, *_ in entries),
        block_size=first.block_size,
        grid_thw=first.grid_thw,
        indices=tuple(np.stack([packed[level] for *_, packed in entries]) for level in range(len(first.indices))),
        order=first.order,
        raster_index=np.zeros(0, np.int32) if raster is None else raster.numpy().astype(np.int32),
    )


def write_selections(target: Path, selections: Selections) -> None:
    """Write the selections as a compressed .npz."""
    levels: dict[str, Any] = {f"level{number}": array for number, array in enumerate(selections.indices, start=1)}
    with atomic_path(target) as part, part.open("wb") as file:
        np.savez_compressed(
            file,
            layers=np.array(selections.layers),
            steps=np.array(selections.steps),
            order=np.array(selections.order),
            raster_index=selections.raster_index,
            sizes=np.array([selections.block_size, *selections.grid_thw]),
            **levels,
        )


def read_selections(path: Path) -> Selections:
    """Read what `write_selections` wrote; nothing is unpickled."""
    with np.load(path, allow_pickle=False) as values:
        block_size, *grid = values["sizes"].tolist()
        levels = sum(name.startswith("level") for name in values.files)
        return Selections(
            layers=tuple(values["layers"].tolist()),
            steps=tuple(values["steps"].tolist()),
            block_size=block_size,
            grid_thw=(grid[0], grid[1], grid[2]),
            indices=tuple(values[f"level{number}"] for number in range(1, levels + 1)),
            order=str(values["order"]),
            raster_index=values["raster_index"],
        )
