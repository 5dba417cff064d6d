"""The block masks of a sparse run: collected step by step, kept in one file, looked up by layer, head and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserInputError
from .files import atomic_path

if TYPE_CHECKING:
    from ..processors import RecordedMask

MAX_BYTES = 256 << 20
MAX_LAYERS = 12


def spread(values: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the values, evenly spaced, the first and the last among them."""
    count = min(count, len(values))
    if count < 2:
        return list(values[-count:]) if count else []
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


@dataclass(frozen=True)
class BlockMasks:
    """Block masks by layer and step, of one guidance branch.

    Args:
        layers: N names, such as "transformer.blocks.3", one for each entry.
        steps: N denoising steps, from 0.
        orders: N tuples of the heads' token orders.
        masks: (N, H, Nq, ceil(Nk / 8)) uint8, packed bits, set where a block pair was computed.
        query_blocks: (N, H, L) block that each token is a query of, tokens in raster order.
        key_blocks: (N, H, L) block that each token is a key of.
        num_blocks: Nk.
        block_size: tokens of a block.
        grid_thw: (frames, height, width) in tokens.
    """

    layers: tuple[str, ...]
    steps: tuple[int, ...]
    orders: tuple[tuple[str, ...], ...]
    masks: np.ndarray
    query_blocks: np.ndarray
    key_blocks: np.ndarray
    num_blocks: int
    block_size: int
    grid_thw: tuple[int, int, int]

    @property
    def heads(self) -> int:
        return int(self.masks.shape[1])

    def layer_names(self) -> list[str]:
        """Return the layers, in the order of the model."""
        return list(dict.fromkeys(self.layers))

    def steps_of(self, layer: str) -> list[int]:
        """Return the steps that have a mask of a layer."""
        return sorted(step for name, step in zip(self.layers, self.steps, strict=True) if name == layer)

    def mask(self, layer: str, step: int, head: int) -> np.ndarray:
        """Return the mask of one head: (Nq, Nk) bool.

        Raises:
            UserInputError: no such layer, step or head; the message says which there are.
        """
        return self._bits(self._entry(layer, step), head)

    def attended(self, layer: str, step: int, head: int, token: tuple[int, int, int]) -> np.ndarray:
        """Return which tokens the query of one token attends to: bool (frames, height, width).

        Args:
            layer: one of `layer_names`.
            step: one of `steps_of(layer)`.
            head: in [0, heads).
            token: (frame, row, column) in the token grid.

        Raises:
            UserInputError: no such layer, step, head or token.
        """
        entry = self._entry(layer, step)
        for name, value, size in zip(("frame", "row", "column"), token, self.grid_thw, strict=True):
            if not 0 <= value < size:
                raise UserInputError(f"{name} must be in [0, {size - 1}], got {value}")
        bits = self._bits(entry, head)
        place = int(np.ravel_multi_index(token, self.grid_thw))
        row = bits[int(self.query_blocks[entry, head, place])]
        return row[self.key_blocks[entry, head]].reshape(self.grid_thw)

    def orders_of(self, layer: str, step: int) -> tuple[str, ...]:
        """Return the token order of each head."""
        return self.orders[self._entry(layer, step)]

    def _bits(self, entry: int, head: int) -> np.ndarray:
        if not 0 <= head < self.heads:
            raise UserInputError(f"head must be in [0, {self.heads - 1}], got {head}")
        return np.unpackbits(self.masks[entry, head], axis=-1, count=self.num_blocks).astype(bool)

    def _entry(self, layer: str, step: int) -> int:
        if layer not in self.layers:
            raise UserInputError(f"layer must be one of {', '.join(self.layer_names())}, got {layer!r}")
        for entry, (name, number) in enumerate(zip(self.layers, self.steps, strict=True)):
            if name == layer and number == step:
                return entry
        raise UserInputError(f"step must be one of {', '.join(map(str, self.steps_of(layer)))}, got {step}")

    def thinned(self, steps: int) -> BlockMasks:
        """Return at most so many evenly spaced steps of each layer."""
        kept = {(layer, step) for layer in self.layer_names() for step in spread(self.steps_of(layer), steps)}
        places = [i for i, pair in enumerate(zip(self.layers, self.steps, strict=True)) if pair in kept]
        return BlockMasks(
            layers=tuple(self.layers[i] for i in places),
            steps=tuple(self.steps[i] for i in places),
            orders=tuple(self.orders[i] for i in places),
            masks=self.masks[places],
            query_blocks=self.query_blocks[places],
            key_blocks=self.key_blocks[places],
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            grid_thw=self.grid_thw,
        )


class MaskCollector:
    """Takes the masks of a running generation after each step.

    Args:
        pipe: with BA-Att applied and `record_masks` set.
        steps: of the generation.
    """

    def __init__(self, pipe: Any, steps: int) -> None:
        self._pipe, self._steps = pipe, steps
        self._wanted: set[int] | None = None
        self._latest: dict[str, Any] = {}
        self._entries: list[tuple[int, RecordedMask, np.ndarray, np.ndarray, np.ndarray]] = []

    def after_step(self, finished: int) -> None:
        """Look for new masks; `finished` counts the steps done."""
        from ..processors import recorded_masks

        try:
            found = recorded_masks(self._pipe)
        except UserInputError:  # no sparse step yet
            return
        # A dense step leaves the masks of an earlier one in place.
        fresh = [mask for mask in found if self._latest.get(mask.layer) is not mask.block_index]
        step = finished - 1
        for mask in fresh:
            self._latest[mask.layer] = mask.block_index
            packed, query_blocks, key_blocks = _pack(mask)
            if self._wanted is None:
                size = packed.nbytes + query_blocks.nbytes + key_blocks.nbytes
                rest = range(step, self._steps)
                self._wanted = set(spread(rest, max(1, MAX_BYTES // (size * len(found)))))
            if step in self._wanted:
                self._entries.append((step, mask, packed, query_blocks, key_blocks))

    def result(self) -> BlockMasks | None:
        """Return what was collected; `None` where no step was sparse."""
        if not self._entries:
            return None
        first = self._entries[0][1]
        return BlockMasks(
            layers=tuple(mask.layer for _, mask, *_ in self._entries),
            steps=tuple(step for step, *_ in self._entries),
            orders=tuple(mask.orders for _, mask, *_ in self._entries),
            masks=np.stack([packed for *_, packed, _, _ in self._entries]),
            query_blocks=np.stack([query for *_, query, _ in self._entries]),
            key_blocks=np.stack([key for *_, key in self._entries]),
            num_blocks=first.num_blocks,
            block_size=first.block_size,
            grid_thw=first.grid_thw,
        )


def _pack(mask: RecordedMask) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the packed bits (H, Nq, bytes) and the blocks of the tokens as queries and keys (H, L)."""
    heads = range(len(mask.orders))
    packed = np.stack([np.packbits(mask.matrix(head).numpy(), axis=-1) for head in heads])
    kind = np.uint8 if mask.num_blocks <= 256 else np.uint16 if mask.num_blocks <= 65536 else np.uint32
    pairs = [mask.token_blocks(head) for head in heads]
    query_blocks, key_blocks = (np.stack([pair[i].numpy() for pair in pairs]).astype(kind) for i in (0, 1))
    return packed, query_blocks, key_blocks


def write_masks(target: Path, masks: BlockMasks) -> None:
    """Write the masks as a compressed .npz."""
    with atomic_path(target) as part, part.open("wb") as file:
        np.savez_compressed(
            file,
            layers=np.array(masks.layers),
            steps=np.array(masks.steps),
            orders=np.array(masks.orders),
            masks=masks.masks,
            query_blocks=masks.query_blocks,
            key_blocks=masks.key_blocks,
            sizes=np.array([masks.num_blocks, masks.block_size, *masks.grid_thw]),
        )


def read_masks(path: Path) -> BlockMasks:
    """Read what `write_masks` wrote; nothing is unpickled."""
    with np.load(path, allow_pickle=False) as values:
        num_blocks, block_size, *grid = values["sizes"].tolist()
        return BlockMasks(
            layers=tuple(values["layers"].tolist()),
            steps=tuple(values["steps"].tolist()),
            orders=tuple(tuple(row) for row in values["orders"].tolist()),
            masks=values["masks"],
            query_blocks=values["query_blocks"],
            key_blocks=values["key_blocks"],
            num_blocks=num_blocks,
            block_size=block_size,
            grid_thw=(grid[0], grid[1], grid[2]),
        )
