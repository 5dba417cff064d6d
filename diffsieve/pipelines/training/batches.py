"""The clips and the random numbers of one training step, fixed by the step's number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .clips import render_clips
from .config import ClipSize
from .specs import SpecBatch, sample_spec_batch
from .sprites import Sprites

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# clips that one process may draw in a step; keeps the numbers of different steps and processes apart
MAX_BATCH = 512


@dataclass(frozen=True)
class ClipSource:
    """Draws the training clips of a stage.

    Args:
        sprites: On the device where clips are drawn.
        seed: Of the run and the stage.
        rank: Number of this process.
        world: Number of processes.
        split: Which triples of subject, motion and colour.
    """

    sprites: Sprites
    seed: int
    rank: int = 0
    world: int = 1
    split: str = "train"

    def specs(self, step: int, size: ClipSize) -> SpecBatch:
        """The clips of a step, on the CPU so that their captions can be read without waiting for a GPU."""
        start = (step * self.world + self.rank) * MAX_BATCH
        return sample_spec_batch(size.batch_size, self.sprites, seed=self.seed, start=start, split=self.split)

    def render(self, specs: SpecBatch, size: ClipSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Video (B, 3, T, H, W) in [-1, 1] and coverage (B, 1, T, H, W) in [0, 1], float32."""
        lengths = {"frames": size.frames, "height": size.height, "width": size.width}
        if size.sprite_px is None:
            return render_clips(specs, self.sprites, **lengths)
        low, high = size.sprite_px
        return render_clips(specs, self.sprites, **lengths, sprite_px=(low, high))

    def generator(self, step: int) -> torch.Generator:
        """Generator for everything else that is random in a step."""
        generator = torch.Generator(self.sprites.rgba.device)
        generator.manual_seed((self.seed * 1_000_003 + step) * 64 + self.rank)
        return generator


def tokenize(
    tokenizer: PreTrainedTokenizerFast, captions: list[str], length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, each (B, length) int64."""
    encoded = tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return encoded.input_ids.to(device, non_blocking=True), encoded.attention_mask.to(device, non_blocking=True)
