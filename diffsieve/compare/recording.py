"""Which layers of a comparison keep their block masks or choices of keys, and the picture of the last one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from ..errors import UserInputError
from .config import CompareConfig
from .mask_file import MaskCollector
from .mask_picture import mask_picture
from .prepare import Prepared, transformer_of
from .recorded import MAX_LAYERS, Recorded, spread
from .selection_file import SelectionCollector, Selections, selections_of

if TYPE_CHECKING:
    from ..processors import RecordedMask, RecordedSelection


def mask_layer(ready: Prepared[CompareConfig]) -> int | None:
    """Return the layer whose mask is drawn: the one asked for, else the sparse one nearest to the middle, if any.

    Raises:
        UserInputError: the one asked for is not sparse.
    """
    sparse, layer = _sparse_layers(ready), ready.config.mask_layer
    if layer is None:
        middle = int(transformer_of(ready.pipe).config.num_layers) // 2
        return min(sparse, key=lambda number: abs(number - middle), default=None)
    if layer not in sparse:
        raise UserInputError(f"mask_layer must be a sparse layer of the model, one of {sparse}, got {layer}")
    return layer


def record_layers(ready: Prepared[CompareConfig], layer: int) -> Prepared[CompareConfig]:
    """Return the run with the layers that record: that of the picture, and with `save_masks` others beside it."""
    others = spread(_sparse_layers(ready), MAX_LAYERS - 1) if ready.config.save_masks else []
    layers = tuple(sorted({layer, *others}))
    return dataclasses.replace(ready, attention=dataclasses.replace(ready.attention, record_masks=layers))


def collector_of(ready: Prepared[CompareConfig]) -> MaskCollector | SelectionCollector:
    """Return what takes the masks, or with LLSA the choices of keys, after each step."""
    from ..processors import LLSAConfig

    kind = SelectionCollector if isinstance(ready.attention, LLSAConfig) else MaskCollector
    return kind(ready.pipe, ready.config.steps or 0)


def last_mask_picture(ready: Prepared[CompareConfig], layer: int, title: str, label: str) -> Image.Image | None:
    """Draw the mask of a layer in its last sparse call; `None` where nothing was recorded.

    Args:
        ready: whose pipeline has run, with sparse attention still applied.
        layer: see `mask_layer`.
        title: of the clip.
        label: of the sparse attention.
    """
    from ..processors import LLSAConfig, recorded_masks, recorded_selections

    if isinstance(ready.attention, LLSAConfig):
        try:
            chosen = _of_layer(recorded_selections(ready.pipe), layer)
        except UserInputError:  # all tokens fit into one block
            return None
        return None if chosen is None else _draw_selection(chosen, title, label, enrich=ready.attention.enrich)
    mask = _of_layer(recorded_masks(ready.pipe), layer)
    return None if mask is None else _draw_mask(mask, title, label)


def blocks_text(recorded: Recorded, shape: tuple[int, ...]) -> str:
    """Return what the rows and columns of a mask stand for."""
    size = recorded.block_size ** (recorded.drawn_level if isinstance(recorded, Selections) else 1)
    return f"{shape[0]:,} x {shape[1]:,} blocks of {size} tokens"


def selection_legend(enrich: bool) -> tuple[str, str]:
    """Return what the colours of a mask stand for with LLSA; `enrich`: whether queries see means of what they skip."""
    return "seen in detail", "seen as means" if enrich else "not seen"


def _sparse_layers(ready: Prepared[CompareConfig]) -> list[int]:
    layers = int(transformer_of(ready.pipe).config.num_layers)
    dense = {layer % layers for layer in ready.attention.dense_layers}
    return [layer for layer in range(layers) if layer not in dense]


def _of_layer(found: Sequence[Any], number: int) -> Any | None:
    return next((item for item in found if int(item.layer.rpartition(".")[2]) == number), None)


def _draw_mask(mask: RecordedMask, title: str, label: str) -> Image.Image:
    matrices = torch.stack([mask.matrix(head) for head in range(len(mask.orders))])
    _, rows, columns = matrices.shape
    blocks = f"{rows} x {columns} blocks of {mask.block_size} tokens, numbered in the token order of each head"
    return mask_picture(
        matrices,
        title=f"Block mask of {mask.layer} · {label}",
        notes=(f"{title} · last step", blocks),
        names=mask.orders,
    )


def _draw_selection(chosen: RecordedSelection, title: str, label: str, *, enrich: bool) -> Image.Image:
    selections = selections_of(chosen)
    heads = range(selections.heads)
    matrices = torch.stack([torch.from_numpy(selections.mask(chosen.layer, 0, head)) for head in heads])
    return mask_picture(
        matrices,
        title=f"Keys chosen by {chosen.layer} · {label}",
        notes=(
            f"{title} · last step",
            f"{blocks_text(selections, matrices.shape[1:])}, in {selections.order} order",
        ),
        legend=selection_legend(enrich),
    )
