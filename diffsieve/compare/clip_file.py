"""Raw clips in files: checkpoints of a run, and a folder of dense clips that several comparisons share."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy
import torch

from .clip import Clip
from .files import write_frames

logger = logging.getLogger(__name__)

# Settings that change how the sparse run attends or what is written, but no bit of the dense clip.
_NOT_OF_DENSE = frozenset(
    {
        "attention",
        "backend",
        "block_size",
        "floor",
        "fps",
        "mask_layer",
        "method",
        "min_tokens",
        "preset",
        "save_frames",
    }
    | {"save_masks", "sparsity", "topk", "warmup"}
)


def write_clip(path: Path, clip: Clip) -> None:
    """Write raw frames and times as .npz, without loss."""
    write_frames(path, clip.frames, total=clip.seconds_total, steps=clip.seconds_steps, decode=clip.seconds_decode)


def read_clip(path: Path) -> Clip | None:
    """Read what `write_clip` wrote; `None` when it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        with numpy.load(path) as values:
            return Clip(
                frames=torch.from_numpy(values["frames"]),
                seconds_total=float(values["total"]),
                seconds_steps=tuple(values["steps"].tolist()),
                seconds_decode=float(values["decode"]),
            )
    except (BadZipFile, EOFError, KeyError, ValueError) as error:
        logger.warning("%s is damaged (%s): the clip is made again", path, error)
        return None


@dataclass(frozen=True)
class DenseClips:
    """A folder with finished dense clips, by everything that decides them.

    Args:
        folder: made when the first clip is kept.
    """

    folder: Path

    def path(self, settings: Mapping[str, Any], prompt: str, seed: int) -> Path:
        """Return where the clip of a prompt and seed lies.

        Args:
            settings: what settings.json of a comparison holds: model, weights, versions, device, size, steps.
            prompt: text.
            seed: start value of the noise.
        """
        kept = {name: value for name, value in settings.items() if name not in _NOT_OF_DENSE}
        text = json.dumps({"settings": kept, "prompt": prompt, "seed": seed}, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.npz"

    def get(self, settings: Mapping[str, Any], prompt: str, seed: int) -> Clip | None:
        """Return the clip, or `None` when it is not there; using it makes it the newest file."""
        path = self.path(settings, prompt, seed)
        clip = read_clip(path)
        if clip is not None:
            os.utime(path)
        return clip

    def put(self, settings: Mapping[str, Any], prompt: str, seed: int, clip: Clip) -> None:
        """Keep a clip."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_clip(self.path(settings, prompt, seed), clip)
