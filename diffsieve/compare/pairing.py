"""Which clips of two folders belong together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UserInputError
from ..eval.clips import ARRAYS, PICTURES, VIDEOS, is_clip, natural_key
from .provenance import comparison_clips, is_comparison

_LISTED = 5


def pair_clips(reference: Path, test: Path, side: str = "sparse") -> list[tuple[str, Path, Path]]:
    """Pair the clips of two folders by their file names.

    A clip is a video file, an .npy or .npz file, or a folder of pictures. Two such clips may also be given themselves,
    and two folders of `diffsieve compare`: the dense clips of the first with the sparse ones of the second, or with
    those of another `side`, "floor".

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
    compared = [is_comparison(folder) for folder in (reference, test)]
    if compared[0] != compared[1]:
        raise UserInputError(f"{reference} and {test} must both be folders of diffsieve compare, or neither of them")
    if all(compared):
        sides = (reference, "dense"), (test, side)
        found = [comparison_clips(*place, raw=True) for place in sides]
        # Raw frames on both sides, or an encoder between on both.
        if found[0].keys() != found[1].keys() or not found[0]:
            found = [comparison_clips(*place, raw=False) for place in sides]
    else:
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
