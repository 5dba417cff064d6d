"""Sprites of the training clips: cut out of an npm package of emoji pictures into one small file.

The pictures are not part of diffsieve. `find_package` gets the package with `npm pack`, `build_sprites` reads the
archive (it is never unpacked) and writes a `.npz` file, `load_sprites` reads that file. `subjects.json` beside this
module lists the subjects: caption name -> code points of the picture, in four groups.

Legend: S sprites, P edge of a sprite in pixels.
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from ...errors import UserInputError

PACKAGE = "@lobehub/fluent-emoji-3d@1.1.0"
PACKAGE_FILE = "lobehub-fluent-emoji-3d-1.1.0.tgz"
PACKAGE_SHA256 = "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58"
PACK_COMMAND = f"npm pack {PACKAGE}"

SPRITE_PX = 160
_ASSETS = PurePosixPath("package/assets")
_MAX_PICTURE_BYTES = 2**20
_PACK_TIMEOUT_S = 600
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


def find_package(folder: Path) -> Path:
    """The package archive in `folder`, fetched there with `npm pack` when it is missing.

    Raises:
        UserInputError: If the archive is missing and npm is not installed or fails. The message has the command.
    """
    archive = folder / PACKAGE_FILE
    if archive.is_file():
        return archive
    npm = shutil.which("npm")
    if npm is None:
        raise UserInputError(f"{archive} is missing and npm is not installed; run `{PACK_COMMAND}` in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [npm, "pack", "--ignore-scripts", PACKAGE],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_PACK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserInputError(f"`{PACK_COMMAND}` in {folder} took longer than {_PACK_TIMEOUT_S} s") from None
    if done.returncode != 0 or not archive.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserInputError(f"`{PACK_COMMAND}` in {folder} failed with exit code {done.returncode}: {last}")
    return archive


def build_sprites(
    archive: Path,
    out: Path,
    *,
    subjects: dict[str, str] | None = None,
    sha256: str | None = PACKAGE_SHA256,
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
        _compare_checksum(archive, sha256)
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


def _compare_checksum(archive: Path, expected: str) -> None:
    if not archive.is_file():
        raise UserInputError(f"package archive {archive} is missing; run `{PACK_COMMAND}` in {archive.parent}")
    with archive.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise UserInputError(f"{archive} must have sha256 {expected}, got {got}; delete it and fetch it again")


def _read_pictures(archive: Path, codes: set[str]) -> dict[str, bytes]:
    """The encoded pictures of `codes` that the archive holds, read in memory. No member is ever written to disk."""
    pictures = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise UserInputError(f"{archive} must hold plain files inside it, got {member.name!r}")
                if path.parent != _ASSETS or path.suffix != ".webp" or path.stem not in codes:
                    continue
                if member.size > _MAX_PICTURE_BYTES:
                    raise UserInputError(
                        f"{member.name} must have at most {_MAX_PICTURE_BYTES} bytes, got {member.size}"
                    )
                file = tar.extractfile(member)
                assert file is not None  # a plain file, as checked above
                pictures[path.stem] = file.read()
    except FileNotFoundError:
        raise UserInputError(f"package archive {archive} is missing; run `{PACK_COMMAND}`") from None
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserInputError(f"{archive} must be a .tgz archive: {error}") from error
    return pictures


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
