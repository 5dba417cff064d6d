"""The keys that LLSA chose, kept for pictures."""

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UserInputError
from .families import Grid
from .install import llsa_controllers_of
from .token_order import token_order


@dataclass(frozen=True)
class RecordedSelection:
    """The keys that one layer chose in its last call (of the last guidance branch).

    Attributes:
        layer: "transformer.blocks.3".
        order: Name of the token order in which the blocks are counted.
        grid_thw: (frames, height, width) in tokens.
        block_size: Tokens pooled into one of the next level.
        indices: One tensor for each level from fine to coarse, int32 (B, H, n_l, K_l); see `hierarchical_topk`.
        raster_index: int64 (L,), raster index of each token of the sequence; None for raster order.
    """

    layer: str
    order: str
    grid_thw: Grid
    block_size: int
    indices: tuple[torch.Tensor, ...]
    raster_index: torch.Tensor | None


def recorded_selections(pipeline_or_transformer: Any) -> list[RecordedSelection]:
    """Return the selections of the layers in `LLSAConfig.record_masks`, in layer order.

    Raises:
        UserInputError: none is recorded: the setting is empty or names dense layers alone, nothing has run, the
            sequence is shorter than a block, or the code is compiled.
    """
    found = []
    for controller in llsa_controllers_of(pipeline_or_transformer):
        config, grid = controller.config, controller.grid
        for layer in controller.layers:
            if layer.processor._selection is None or grid is None:
                continue
            found.append(
                RecordedSelection(
                    layer=f"{controller.name}.{layer.name}",
                    order=config.order,
                    grid_thw=grid,
                    block_size=config.block_size,
                    indices=tuple(layer.processor._selection),
                    raster_index=None if config.order == "raster" else token_order(config.order, grid),
                )
            )
    if not found:
        raise UserInputError(
            "no selection is recorded: set record_masks=(layer, ...) in LLSAConfig to layers that are not dense, and "
            "run a sequence of at least one block without torch.compile"
        )
    return found
