"""Which clips of two folders belong together, and what a generated folder says of its sparsity."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import UserInputError
from ..eval.clips import ARRAYS, PICTURES, VIDEOS, is_clip, natural_key

_LISTED = 5


def pair_clips(reference: Path, test: Path) -> list[tuple[str, Path, Path]]:
    """Pair the clips of two folders by their file names.

    A clip is a video file, an .npy or .npz file, or a folder of pictures. Two such clips may also be given themselves.

    Returns:
        Name, dense clip and other clip of each pair, in the order of the numbers in the names.

    Raises:
        UserInputError: a folder is missing or has no clips, or a clip has no partner; nothing is left out silently.
    """
    for folder in (reference, test):
        if not folder.exists():
            raise UserInputError(f"{folder} must be a folder of clips, got no such path")
    if _single(reference) or _single(test):
        if not (_single(reference) and _single(test)):
            raise UserInputError(f"{reference} and {test} must both be clips or both be folders of clips")
        return [(reference.name, reference, test)]
    found = [{path.name: path for path in folder.iterdir() if is_clip(path)} for folder in (reference, test)]
    for folder, clips in zip((reference, test), found, strict=True):
        if not clips:
            kinds = ", ".join(sorted(ARRAYS | VIDEOS))
            raise UserInputError(f"{folder} must hold clips ({kinds}, or folders of pictures), got none")
    dense, tested = found
    for folder, wanted, own in ((test, dense, tested), (reference, tested, dense)):
        if missing := sorted(wanted.keys() - own.keys(), key=natural_key):
            raise UserInputError(
                f"{folder} must hold a clip for each of the other folder, got none for {_few(missing)}"
            )
    return [(name, dense[name], tested[name]) for name in sorted(dense, key=natural_key)]


def measured_density(folder: Path) -> dict[str, float | None]:
    """Return the mean densities that the report of `diffsieve generate` in a folder states, else `None` for each."""
    names = ("density_overall", "density_sparse_steps")
    try:
        report: Any = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        clips = [clip["sparsity"] or {} for clip in report["clips"]]
    except (OSError, ValueError, KeyError, TypeError):
        return dict.fromkeys(names)
    return {name: _mean([clip.get(name) for clip in clips]) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present and len(present) == len(values) else None


def _single(path: Path) -> bool:
    """Say whether a path is one clip: a file, or a folder of pictures without any clip in it."""
    if path.is_file():
        return True
    suffixes = {entry.suffix.lower() for entry in path.iterdir()}
    if suffixes & PICTURES and suffixes & (ARRAYS | VIDEOS):
        raise UserInputError(f"{path} must hold either the pictures of one clip or files of clips, got both")
    return bool(suffixes & PICTURES)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
