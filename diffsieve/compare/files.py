"""Files that are whole or absent: written under another name beside the target, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from PIL import Image

# Names of our own only: folders may hold half-written files of other programs.
PART_SUFFIX = ".diffsieve-part"


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Give a path to write to; when the block ends well it becomes `target` in one step, else it is removed.

    A process that is killed leaves at most `.<name>.diffsieve-part` behind, never a partial file under the final name.
    """
    part = target.with_name(f".{target.name}{PART_SUFFIX}")
    try:
        yield part
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(target: Path, values: Mapping[str, Any]) -> None:
    """Write JSON with two spaces of indent; NaN and infinity are refused, because they are not JSON."""
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_path(target) as part:
        part.write_text(text + "\n", encoding="utf-8")


def write_png(target: Path, image: Image.Image) -> None:
    with atomic_path(target) as part:
        image.save(part, format="PNG")


def write_frames(target: Path, frames: torch.Tensor, **values: Any) -> None:
    """Write raw frames (T, 3, H, W) without loss, and further arrays or numbers, as .npz."""
    import numpy

    with atomic_path(target) as part, part.open("wb") as file:
        numpy.savez(file, frames=frames.numpy(), **values)


def remove_parts(folder: Path) -> None:
    """Remove what a killed process left half-written in `folder`."""
    for part in folder.glob(f".*{PART_SUFFIX}"):
        part.unlink()
