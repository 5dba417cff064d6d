"""Where a run stands, told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["denoise", "decode", "write", "done"]


@dataclass(frozen=True)
class Progress:
    """One report of a run at work.

    Args:
        item: prompt and seed at work, from 0.
        items: prompts times seeds.
        prompt: of this item.
        seed: of this item.
        run: what is being generated, `"dense"` or `"sparse"`.
        step: finished denoising steps of it.
        steps: denoising steps in all.
        stage: what is going on; `"done"` when the files of the item are there.
    """

    item: int
    items: int
    prompt: str
    seed: int
    run: str
    step: int
    steps: int
    stage: Stage


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class ItemProgress:
    """Tells about one item; `callback` may be `None`."""

    callback: ProgressCallback | None
    item: int
    items: int
    prompt: str
    seed: int
    steps: int

    def tell(self, run: str, stage: Stage, step: int) -> None:
        if self.callback is not None:
            self.callback(Progress(self.item, self.items, self.prompt, self.seed, run, step, self.steps, stage))

    def step_callback(self, run: str) -> Callable[[int], None]:
        """Return what `generate_clip` calls after each step; also announces the run."""
        self.tell(run, "denoise", 0)
        return lambda step: self.tell(run, "denoise" if step < self.steps else "decode", step)
