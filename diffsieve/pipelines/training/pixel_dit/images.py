"""Picture sets: a folder or an archive of pictures, its subfolders as classes, read once into memory.

Legend: N pictures, S side in pixels.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....errors import UserInputError, os_reason
from ....pictures import upright

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
_MAX_FILE_BYTES = 2**28
_MAX_SKIPPED_NAMES = 20


@dataclass(frozen=True)
class ImageSet:
    """Square pictures of one size.

    Args:
        pixels: (N, 3, S, S) uint8.
        labels: (N,) int64, class of each picture; 0 for all where there are no classes.
        classes: names; empty where there are no classes.
        skipped: (name, reason) of files that could not be read.
        digest: of the names and the order of the pictures.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    digest: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def side(self) -> int:
        """S."""
        return int(self.pixels.shape[-1])

    def describe_skipped(self) -> str:
        """One line for people, or an empty text."""
        if not self.skipped:
            return ""
        shown = "; ".join(f"{name}: {reason}" for name, reason in self.skipped[:_MAX_SKIPPED_NAMES])
        more = len(self.skipped) - _MAX_SKIPPED_NAMES
        return f"{len(self.skipped)} unreadable pictures were skipped: {shown}" + (f"; {more} more" if more > 0 else "")


def load_images(source: Path, side: int, *, workers: int | None = None) -> ImageSet:
    """Read all pictures of a folder or archive, cropped to their middle square and resized.

    A picture is turned as its EXIF orientation says; one with transparency is put on white. Files that are no pictures
    by their name are left alone; pictures that cannot be read are skipped and listed. With pictures in subfolders, the
    first-level folders are the classes, in alphabetical order.

    Args:
        source: a folder, or a .zip or .tar archive, of .jpg, .png and .webp files.
        side: S, pixels.
        workers: threads; default one for each CPU.

    Raises:
        UserInputError: the source is missing or unreadable, or holds no readable picture, or pictures both beside and
            in subfolders.
    """
    if side < 1:
        raise UserInputError(f"side must be positive, got {side}")
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        if source.is_dir():
            names = _folder_names(source)
            decoded = pool.map(lambda name: _decode_file(source / name, side), names)
            return _collect(source, names, decoded, side)
        members = dict(_archive_members(source))
        names = sorted(members)
        decoded = pool.map(lambda name: _decode(members[name], side), names)
        return _collect(source, names, decoded, side)


def resized(images: torch.Tensor, side: int) -> torch.Tensor:
    """Pictures (N, 3, S, S) uint8 at another size, antialiased; halving and quartering are means of pixels."""
    own = images.shape[-1]
    if own == side:
        return images
    parts = []
    for part in images.split(256):
        values = part.float()
        if own % side == 0:
            values = torch.nn.functional.avg_pool2d(values, own // side)
        else:
            values = torch.nn.functional.interpolate(values, size=(side, side), mode="bicubic", antialias=True)
        parts.append(values.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts)


def _collect(source: Path, names: list[str], decoded: Iterator[np.ndarray | str], side: int) -> ImageSet:
    classes = _classes(source, names)
    pixels = np.empty((len(names), 3, side, side), dtype=np.uint8)
    labels: list[int] = []
    skipped: list[tuple[str, str]] = []
    digest = hashlib.sha256()
    for name, result in zip(names, decoded, strict=True):
        if isinstance(result, str):
            skipped.append((name, result))
            continue
        pixels[len(labels)] = result
        labels.append(classes.index(PurePosixPath(name).parts[0]) if classes else 0)
        digest.update(f"{name}\n".encode())
    if not labels:
        first = f", the first one because of: {skipped[0][1]}" if skipped else ""
        raise UserInputError(f"data must hold readable pictures, got {source} with {len(skipped)} unreadable{first}")
    return ImageSet(
        torch.from_numpy(pixels[: len(labels)]),
        torch.tensor(labels),
        classes,
        tuple(skipped),
        digest.hexdigest()[:16],
    )


def _classes(source: Path, names: list[str]) -> tuple[str, ...]:
    if not names:
        raise UserInputError(f"data must hold pictures ({', '.join(SUFFIXES)}), got none in {source}")
    top = [name for name in names if len(PurePosixPath(name).parts) == 1]
    if len(top) == len(names):
        return ()
    if top:
        raise UserInputError(
            f"data must hold pictures in subfolders or beside them, not both, got {top[0]} in {source}"
        )
    return tuple(sorted({PurePosixPath(name).parts[0] for name in names}))


def _folder_names(folder: Path) -> list[str]:
    def fail(error: OSError) -> None:
        raise UserInputError(f"data must be readable, got {error.filename}: {os_reason(error)}") from error

    found = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                found.append((Path(parent) / name).relative_to(folder).as_posix())
    return sorted(found)


def _archive_members(archive: Path) -> Iterator[tuple[str, bytes | None]]:
    """Name and content of every picture; None for one that is too large to be unpacked."""
    if not archive.is_file():
        raise UserInputError(f"data must be a folder or an archive of pictures, got {archive}, which does not exist")
    if not archive.name.lower().endswith(_ARCHIVES):
        raise UserInputError(f"data must be a folder or an archive ({', '.join(_ARCHIVES)}), got {archive.name}")
    try:
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as file:
                for info in file.infolist():
                    if _is_picture(info.filename):
                        yield info.filename, file.read(info) if info.file_size <= _MAX_FILE_BYTES else None
            return
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and _is_picture(member.name):
                    content = tar.extractfile(member)
                    assert content is not None  # a plain file
                    small = member.size <= _MAX_FILE_BYTES
                    yield str(PurePosixPath(member.name)), content.read() if small else None
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, RuntimeError) as error:
        raise UserInputError(f"data must be a readable archive, got {archive}: {error}") from error


def _is_picture(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return path.name.lower().endswith(SUFFIXES) and not hidden


def _decode_file(path: Path, side: int) -> np.ndarray | str:
    try:
        return _decode(path.read_bytes(), side)
    except OSError as error:
        return os_reason(error)


def _decode(content: bytes | None, side: int) -> np.ndarray | str:
    """(3, S, S) uint8, or why the picture cannot be read."""
    from PIL import Image, UnidentifiedImageError

    if content is None:
        return f"larger than {_MAX_FILE_BYTES} bytes"
    try:
        with Image.open(io.BytesIO(content)) as picture:
            picture.draft("RGB", (side, side))  # a JPEG is read at a fraction of its size where that is enough
            square = _middle_square(_on_white(upright(picture)))
            return np.asarray(square.resize((side, side), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    except UnidentifiedImageError:
        return "no picture of a known format"  # Pillow's own message is an address in memory
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return " ".join(str(error).split())[:200] or type(error).__name__


def _on_white(picture: Image) -> Image:
    from PIL import Image as Pictures

    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture.convert("RGB")
    rgba = picture.convert("RGBA")
    white = Pictures.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Pictures.alpha_composite(white, rgba).convert("RGB")


def _middle_square(picture: Image) -> Image:
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))
