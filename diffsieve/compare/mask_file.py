"""The block masks of a sparse run: collected step by step, kept in one file, looked up by layer, head and step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .files import atomic_path
from .recorded import Collector, Recorded

if TYPE_CHECKING:
    from ..processors import RecordedMask


@dataclass(frozen=True)
class BlockMasks(Recorded):
    """Block masks by layer and step, of one guidance branch.

    Args:
        layers, steps, block_size, grid_thw: see `Recorded`.
        orders: N tuples of the heads' token orders.
        masks: (N, H, Nq, ceil(Nk / 8)) uint8, packed bits, set where a block pair was computed.
        query_blocks: (N, H, L) block that each token is a query of, tokens in raster order.
        key_blocks: (N, H, L) block that each token is a key of.
        num_blocks: Nk.
    """

    orders: tuple[tuple[str, ...], ...]
    masks: np.ndarray
    query_blocks: np.ndarray
    key_blocks: np.ndarray
    num_blocks: int

    @property
    def heads(self) -> int:
        return int(self.masks.shape[1])

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
        entry, place = self._entry(layer, step), self._place(token)
        bits = self._bits(entry, head)
        row = bits[int(self.query_blocks[entry, head, place])]
        return row[self.key_blocks[entry, head]].reshape(self.grid_thw)

    def orders_of(self, layer: str, step: int) -> tuple[str, ...]:
        """Return the token order of each head."""
        return self.orders[self._entry(layer, step)]

    def _bits(self, entry: int, head: int) -> np.ndarray:
        self._check_head(head)
        return np.unpackbits(self.masks[entry, head], axis=-1, count=self.num_blocks).astype(bool)

    def _entries(self, places: list[int]) -> dict[str, Any]:
        arrays = ("masks", "query_blocks", "key_blocks")
        cut = {name: getattr(self, name)[places] for name in arrays}
        return {"orders": tuple(self.orders[i] for i in places)} | cut


class MaskCollector(Collector["RecordedMask"]):
    """Takes the block masks of a running generation after each step."""

    def _found(self) -> list[tuple[str, Any, RecordedMask]]:
        from ..processors import recorded_masks

        return [(mask.layer, mask.block_index, mask) for mask in recorded_masks(self._pipe)]

    def _pack(self, item: RecordedMask) -> tuple[np.ndarray, ...]:
        return *_pack(item), np.array(item.orders)

    def result(self) -> BlockMasks | None:
        """Return what was collected; `None` where no step was sparse."""
        first = self.first
        if first is None or not self.entries:
            return None
        masks, query_blocks, key_blocks = (np.stack([packed[i] for *_, packed in self.entries]) for i in range(3))
        return BlockMasks(
            layers=tuple(layer for _, layer, _ in self.entries),
            steps=tuple(step for step, *_ in self.entries),
            orders=tuple(tuple(packed[3].tolist()) for *_, packed in self.entries),
            masks=masks,
            query_blocks=query_blocks,
            key_blocks=key_blocks,
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
