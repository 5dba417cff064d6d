"""Block masks kept for pictures."""

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UserInputError
from ..kernels.ba_att import block_mask
from .install import controllers_of
from .summary import orders_of


@dataclass(frozen=True)
class RecordedMask:
    """The blocks that one layer computed in its last sparse call (of the last guidance branch).

    Attributes:
        layer: "transformer.blocks.3".
        orders: Order names of the heads: rows and columns of the mask follow the head's own token order.
        grid_thw: (frames, height, width) in tokens.
        block_size: Tokens per block.
        block_index: int32 (B, H, Nq, K), kept key blocks of each query block, ascending.
        block_count: int32 (B, H, Nq), valid entries of `block_index`, or None for all.
        num_blocks: N, blocks of the sequence.
        query_order: int64 (L,) or (B, H, L), token at each place of the ordered queries; None for raster order.
        key_order: The same for the keys, (L,) or (B, Hkv, L).
    """

    layer: str
    orders: tuple[str, ...]
    grid_thw: tuple[int, int, int]
    block_size: int
    block_index: torch.Tensor
    block_count: torch.Tensor | None
    num_blocks: int
    query_order: torch.Tensor | None
    key_order: torch.Tensor | None

    def matrix(self, head: int, batch: int = 0) -> torch.Tensor:
        """Return the mask of one head: bool (Nq, N) on the CPU, True where the pair of blocks was computed."""
        count = None if self.block_count is None else self.block_count[batch, head]
        return block_mask(self.block_index[batch, head], count, self.num_blocks).cpu()

    def token_blocks(self, head: int, batch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block of each token as a query and as a key: int64 (L,) each, in raster order, on the CPU."""
        return self._blocks(self.query_order, head, batch), self._blocks(self.key_order, head, batch)

    def _blocks(self, order: torch.Tensor | None, head: int, batch: int) -> torch.Tensor:
        frames, height, width = self.grid_thw
        blocks = torch.arange(frames * height * width) // self.block_size
        if order is None:
            return blocks
        if order.dim() > 1:  # grouped heads share their keys
            order = order[batch, head * order.shape[1] // len(self.orders)]
        return torch.empty_like(blocks).scatter_(0, order.cpu(), blocks)


def recorded_masks(pipeline_or_transformer: Any) -> list[RecordedMask]:
    """Return the masks of the layers in `BAAttConfig.record_masks`, in layer order.

    Raises:
        UserInputError: no mask is recorded: the setting is empty, or no sparse step has run.
    """
    masks = []
    for controller in controllers_of(pipeline_or_transformer):
        orders = orders_of(controller)
        for layer in controller.layers:
            kept = layer.processor._mask
            if kept is None or controller.shape is None:
                continue
            grid, size = layer.processor._grid, controller.config.block_size
            masks.append(
                RecordedMask(
                    layer=f"{controller.name}.{layer.name}",
                    orders=orders[layer.name],
                    grid_thw=grid,
                    block_size=size,
                    block_index=kept.block_index,
                    block_count=kept.block_count,
                    num_blocks=-(-grid[0] * grid[1] * grid[2] // size),
                    query_order=kept.query_order,
                    key_order=kept.key_order,
                )
            )
    if not masks:
        raise UserInputError(
            "no block mask is recorded: set record_masks=(layer, ...) in BAAttConfig to sparse layers and run past the "
            "warm-up"
        )
    return masks
