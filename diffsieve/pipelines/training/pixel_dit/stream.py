"""Batches of training pictures: which ones a step gets follows from its number alone."""

from __future__ import annotations

import torch

from .config import ImagePhase, PixelStageConfig
from .images import ImageSet, resized

# A larger set stays in main memory and travels batch by batch.
_MOST_ON_DEVICE = 16 * 2**30
_EPOCH_FACTOR = 1_000_003


class ImageStream:
    """Draws the batches of one process.

    Every picture comes once in an epoch, in an order of its own for each epoch, over all processes together; a phase
    with another batch size goes on at another place. A step takes the same pictures whenever it is drawn, so a resumed
    run neither loses nor repeats any.

    Args:
        images: the set, at the side of the largest phase.
        seed: of the orders.
        device: where batches go.
        rank: number of this process.
        world: number of processes.
    """

    def __init__(self, images: ImageSet, seed: int, device: torch.device, rank: int = 0, world: int = 1) -> None:
        self.images, self.seed, self.device, self.rank, self.world = images, seed, device, rank, world
        self._orders: dict[int, torch.Tensor] = {}
        self._sized: dict[int, torch.Tensor] = {}
        self._labels = images.labels.to(device)

    def positions(self, step: int, batch_size: int) -> torch.Tensor:
        """Numbers (B,) of the pictures of a step in the set, on the CPU."""
        count = len(self.images)
        first = (step * self.world + self.rank) * batch_size
        places = torch.arange(first, first + batch_size)
        epochs = places // count
        return torch.cat(
            [self._order(int(epoch))[places[epochs == epoch] % count] for epoch in epochs.unique_consecutive()]
        )

    def batch(self, step: int, phase: ImagePhase) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures (B, 3, S, S) in [-1, 1] and labels (B,) of a step."""
        chosen = self.positions(step, phase.batch_size)
        stored = self._at(phase.side)
        pixels = stored[chosen.to(stored.device)].to(self.device, non_blocking=True)
        return pixels.float() / 127.5 - 1, self._labels[chosen.to(self.device)]

    def generator(self, step: int) -> torch.Generator:
        """Source of every other random choice of a step, on the device."""
        number = (self.seed * _EPOCH_FACTOR + step) * self.world + self.rank
        return torch.Generator(self.device).manual_seed(number % 2**63)

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * _EPOCH_FACTOR + epoch)
            while len(self._orders) > 8:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = torch.randperm(len(self.images), generator=generator)
        return self._orders[epoch]

    def _at(self, side: int) -> torch.Tensor:
        """All pictures at a side, kept for the latest one."""
        if side not in self._sized:
            pixels = resized(self.images.pixels, side)
            self._sized = {side: pixels.to(self.device) if pixels.numel() <= _MOST_ON_DEVICE else pixels}
        return self._sized[side]


def augmented(pixels: torch.Tensor, config: PixelStageConfig, generator: torch.Generator) -> torch.Tensor:
    """Mirror and shift some of the pictures (B, 3, S, S)."""
    count, side, device = len(pixels), pixels.shape[-1], pixels.device
    if config.flip_share:
        mirrored = torch.rand(count, generator=generator, device=device) < config.flip_share
        pixels = torch.where(mirrored[:, None, None, None], pixels.flip(-1), pixels)
    reach = round(config.shift * side)
    if reach:
        offsets = torch.randint(-reach, reach + 1, (2, count, 1), generator=generator, device=device)
        rows, columns = (torch.arange(side, device=device) + offsets).clamp(0, side - 1)
        picture = torch.arange(count, device=device)[:, None, None]
        # indices on both sides of the sliced axis put that axis last
        pixels = pixels[picture, :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
    return pixels
