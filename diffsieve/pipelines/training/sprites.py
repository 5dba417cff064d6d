"""Sprites of the training clips: cut out of an npm package of emoji pictures into one small file.

The pictures are not part of diffsieve. `build_sprites` reads the archive of their npm package (it is never unpacked)
and writes a `.npz` file, `load_sprites` reads that file. `subjects.json` beside this module lists the subjects: caption
name -> code points of the picture, in four groups.

Legend: S sprites, P edge of a sprite in pixels.
"""

import io
import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from ...errors import UserInputError
from .npm import FLUENT_3D, check_archive, read_members

SPRITE_PX = 160
_ASSETS = PurePosixPath("package/assets")
_MAX_PICTURE_BYTES = 2**20
# Below this coverage (of 255) a pixel does not count for the box that a picture is cropped to.
_BOX_ALPHA = 8


@dataclass(frozen=True)
class Sprites:
    """Pictures with transparency, one per subject.

    Attributes:
        rgba: `(S, 4, P, P)` float, premultiplied red, green, blue and coverage, all in [0, 1]. Rows from the top.
        names: The S caption names, in the order of `rgba`.
    """

    rgba: torch.Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rgba.ndim != 4 or self.rgba.shape[1] != 4 or self.rgba.shape[2] != self.rgba.shape[3]:
            raise UserInputError(f"rgba must have shape (S, 4, P, P), got {tuple(self.rgba.shape)}")
        if len(self.names) != len(self.rgba):
            raise UserInputError(f"names must have one entry per sprite ({len(self.rgba)}), got {len(self.names)}")
        if len(set(self.names)) != len(self.names):
            raise UserInputError("names must differ from each other")

    def __len__(self) -> int:
        return len(self.names)

    def to(self, device: torch.device | str) -> "Sprites":
        """The same sprites with `rgba` on another device."""
        return replace(self, rgba=self.rgba.to(device))

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def index(self, name: str) -> int:
        """Position of the subject called `name`. Raises `UserInputError` for an unknown name."""
        if name not in self._index:
            raise UserInputError(f"subject must be one of the {len(self)} sprite names, got {name!r}")
        return self._index[name]


def load_subjects() -> dict[str, str]:
    """The committed subject list: caption name -> code points of its picture, joined by dashes."""
    groups = json.loads(Path(__file__).with_name("subjects.json").read_text(encoding="utf-8"))
    return {name: code for group in groups.values() for name, code in group.items()}


def build_sprites(
    archive: Path,
    out: Path,
    *,
    subjects: dict[str, str] | None = None,
    sha256: str | None = FLUENT_3D.sha256,
    sprite_px: int = SPRITE_PX,
    progress: Callable[[int, int], None] | None = None,
) -> Sprites:
    """Read the subjects' pictures from a package archive and write them as one sprite file.

    Each picture is premultiplied, cropped to the box of its coverage and fitted into the square of a sprite.

    Args:
        archive: The `.tgz` that `npm pack` wrote.
        out: File to write. It appears complete or not at all.
        subjects: Caption name -> code points; default `load_subjects()`.
        sha256: Expected checksum of `archive` in hex; None skips the comparison.
        sprite_px: Edge P of a sprite in pixels, at least 16.
        progress: Called with (subjects done, subjects in all).

    Raises:
        UserInputError: If the archive is missing, has another checksum, is damaged, holds a path that leads out of
            the archive, or lacks a picture; or if `out` cannot be written.
    """
    if sprite_px < 16:
        raise UserInputError(f"sprite_px must be at least 16, got {sprite_px}")
    subjects = load_subjects() if subjects is None else subjects
    if sha256 is not None:
        check_archive(archive, sha256, FLUENT_3D.command)
    pictures = _read_pictures(archive, set(subjects.values()))
    missing = [f"{name} ({code})" for name, code in subjects.items() if code not in pictures]
    if missing:
        raise UserInputError(f"{archive} must hold a picture of every subject, lacks {', '.join(missing)}")
    stack = np.empty((len(subjects), 4, sprite_px, sprite_px), dtype=np.uint8)
    for i, (name, code) in enumerate(subjects.items()):
        stack[i] = _cut_out(pictures[code], name, sprite_px)
        if progress is not None:
            progress(i + 1, len(subjects))
    names = tuple(subjects)
    _write(out, stack, names)
    return Sprites(_to_float(stack), names)


def load_sprites(path: Path | str) -> Sprites:
    """Read a sprite file. Raises `UserInputError` when it is missing or is not a complete sprite file."""
    path = Path(path)
    if not path.is_file():
        raise UserInputError(f"sprite file {path} is missing; make it with `diffsieve data sprites --out {path}`")
    try:
        with np.load(path, allow_pickle=False) as file:
            stack, names = np.cumsum(file["rgba_dx"], axis=-1, dtype=np.uint8), [str(name) for name in file["names"]]
    except (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserInputError(f"{path} must be a sprite file of `diffsieve data sprites`: {error}") from error
    return Sprites(_to_float(stack), tuple(names))


def _to_float(stack: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(stack).float().div_(255)


def _read_pictures(archive: Path, codes: set[str]) -> dict[str, bytes]:
    """The encoded pictures of `codes` that the archive holds."""
    found = read_members(
        archive,
        lambda path: path.parent == _ASSETS and path.suffix == ".webp" and path.stem in codes,
        _MAX_PICTURE_BYTES,
    )
    return {path.stem: content for path, content in found.items()}


def _cut_out(encoded: bytes, name: str, sprite_px: int) -> np.ndarray:
    """One encoded picture as `(4, P, P)` premultiplied uint8, its box of coverage fitted into the square."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded)) as picture:
            rgba = np.asarray(picture.convert("RGBA"), dtype=np.float32) / 255
    except (UnidentifiedImageError, OSError) as error:
        raise UserInputError(f"the picture of subject {name!r} cannot be decoded: {error}") from error
    # Premultiplied before the resize: colours of invisible pixels would otherwise leak into the edges.
    rgba[..., :3] *= rgba[..., 3:]
    covered = rgba[..., 3] > _BOX_ALPHA / 255
    if not covered.any():
        raise UserInputError(f"the picture of subject {name!r} must not be empty")
    rows, columns = np.flatnonzero(covered.any(1)), np.flatnonzero(covered.any(0))
    box = rgba[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = sprite_px / max(box.shape[:2])
    height, width = (max(1, round(edge * scale)) for edge in box.shape[:2])
    top, left = (sprite_px - height) // 2, (sprite_px - width) // 2
    sprite = np.zeros((4, sprite_px, sprite_px), dtype=np.float32)
    for channel in range(4):
        # Channel by channel in float ("F" mode), so that the resize does not round to 8 bits and premultiply again.
        plane = Image.fromarray(np.ascontiguousarray(box[..., channel]))
        resized = np.asarray(plane.resize((width, height), Image.Resampling.BICUBIC))
        sprite[channel, top : top + height, left : left + width] = resized
    sprite[3] = sprite[3].clip(0, 1)
    sprite[:3] = sprite[:3].clip(0, sprite[3])
    return np.rint(sprite * 255).astype(np.uint8)


def _write(out: Path, stack: np.ndarray, names: tuple[str, ...]) -> None:
    # Differences along x (modulo 256) compress to about two thirds of the plain values.
    rgba_dx = np.diff(stack, axis=-1, prepend=np.uint8(0))
    partial = out.with_name(out.name + ".part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez_compressed(file, rgba_dx=rgba_dx, names=np.array(names))
        partial.replace(out)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UserInputError(f"out must be a writable file path, got {out}: {error}") from error
