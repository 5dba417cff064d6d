"""The clips and the random numbers of one training step, fixed by the step's number."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .captions import MOTIONS
from .clips import render_clips
from .config import MAX_BATCH, ClipSize
from .specs import ClipSpec, SpecBatch, sample_spec_batch
from .sprites import Sprites

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FAST_MOTIONS = ("circle", "bounces")


@dataclass(frozen=True)
class ClipSource:
    """Draws the training clips of a stage.

    Args:
        sprites: On the device where clips are drawn.
        seed: Of the run and the stage.
        rank: Number of this process.
        world: Number of processes.
        split: Which triples of subject, motion and colour.
        fast_share: Share of the clips chosen for a fast motion, in [0, 1]; the rest is drawn evenly.
    """

    sprites: Sprites
    seed: int
    rank: int = 0
    world: int = 1
    split: str = "train"
    fast_share: float = 0.0

    def specs(self, step: int, size: ClipSize) -> SpecBatch:
        """The clips of a step, on the CPU so that their captions can be read without waiting for a GPU."""
        # steps and processes are MAX_BATCH numbers apart, so no clip is drawn twice
        start = (step * self.world + self.rank) * MAX_BATCH
        chosen = round(self.fast_share * size.batch_size)
        count = min(MAX_BATCH, 8 * size.batch_size) if chosen else size.batch_size
        specs = sample_spec_batch(count, self.sprites, seed=self.seed, start=start, split=self.split)
        if not chosen:
            return specs
        even = size.batch_size - chosen
        is_fast = torch.isin(specs.motion[even:], torch.tensor([MOTIONS.index(motion) for motion in FAST_MOTIONS]))
        # a quarter of the motions is fast: among the rest there are nearly always enough, and slow ones fill up
        order = torch.cat([torch.arange(even), even + torch.argsort(~is_fast, stable=True)])[: size.batch_size]
        parts = {name: getattr(specs, name)[order] for name in (item.name for item in dataclasses.fields(ClipSpec))}
        return dataclasses.replace(specs, **parts)

    def render(self, specs: SpecBatch, size: ClipSize) -> tuple[torch.Tensor, torch.Tensor]:
        """Video (B, 3, T, H, W) in [-1, 1] and coverage (B, 1, T, H, W) in [0, 1], float32."""
        edges = None if size.sprite_px is None else (size.sprite_px[0], size.sprite_px[1])
        return render_clips(
            specs, self.sprites, frames=size.frames, height=size.height, width=size.width, sprite_px=edges
        )

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
