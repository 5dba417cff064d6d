"""Clips read frame by frame: tensors, arrays, .npy and .npz files, folders of pictures, video files."""

from __future__ import annotations

import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch

from ..errors import UserInputError
from ..pictures import upright

PICTURES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
VIDEOS = frozenset({".avi", ".mkv", ".mov", ".mp4", ".webm"})
ARRAYS = frozenset({".npy", ".npz"})

Kind = Literal["tensor", "array", "pictures", "video"]


@dataclass(frozen=True)
class ClipReader:
    """A clip that can be walked through any number of times, one frame in memory at a time.

    Args:
        name: what errors call it; the path of a file.
        kind: ``"tensor"`` and ``"array"`` keep values as they are; ``"pictures"`` and ``"video"`` are 8-bit files, and
            a video has lost something in its encoder.
        source: what it is read from.
    """

    name: str
    kind: Kind
    source: Path | torch.Tensor

    def frames(self) -> Iterator[torch.Tensor]:
        """Yield frames (3, H, W), uint8 or floating point.

        Raises:
            UserInputError: no frames, another shape or dtype, or a file that cannot be read whole; names the file.
        """
        if isinstance(self.source, torch.Tensor):
            return iter(self.source)
        if self.kind == "pictures":
            return _picture_frames(self.source)
        return _array_frames(self.source) if self.kind == "array" else _video_frames(self.source)


ClipSource = str | Path | torch.Tensor | np.ndarray | ClipReader


def open_clip(source: ClipSource, name: str | None = None) -> ClipReader:
    """Say how a clip is read, and check what can be told without reading it.

    Args:
        source: tensor or array (T, 3, H, W) or (T, H, W, 3); path of a .npy or .npz file with such an array (in an
            .npz the only one, or the one called `frames`); path of a folder of pictures, whose frames go by the
            numbers in the file names and are turned as their EXIF orientation says; path of one picture, a clip of one
            frame; path of a video file; a reader, which is returned as it is.
        name: what errors call it; default: the path, or "clip".

    Raises:
        UserInputError: no such file, or not one of these.
    """
    if isinstance(source, ClipReader):
        return source
    if isinstance(source, np.ndarray):
        source = torch.from_numpy(source)
    if isinstance(source, torch.Tensor):
        called = name or "clip"
        return ClipReader(called, "tensor", _channels_first(source, called))
    path = Path(source)
    called = name or str(path)
    if path.is_dir():
        if not picture_files(path):
            raise UserInputError(f"{called} must hold pictures ({', '.join(sorted(PICTURES))}), got none")
        return ClipReader(called, "pictures", path)
    if not path.is_file():
        raise UserInputError(f"{called} must be a file or a folder of pictures, got no such path")
    suffix = path.suffix.lower()
    if suffix in ARRAYS:
        return ClipReader(called, "array", path)
    if suffix in VIDEOS:
        return ClipReader(called, "video", path)
    if suffix in PICTURES:
        return ClipReader(called, "pictures", path)
    known = ", ".join(sorted(ARRAYS | VIDEOS | PICTURES))
    raise UserInputError(f"{called} must be one of {known}, got {suffix or 'no suffix'}")


def picture_files(folder: Path) -> list[Path]:
    """Return the pictures of a folder in the order of the numbers in their names: frame_9 before frame_10."""
    files = (path for path in folder.iterdir() if path.suffix.lower() in PICTURES and not path.name.startswith("."))
    return sorted(files, key=lambda path: natural_key(path.name))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"[0-9]+|[^0-9]+", name))


def _channels_first(frames: torch.Tensor, name: str) -> torch.Tensor:
    if frames.ndim == 4 and 0 not in frames.shape:
        if frames.shape[1] == 3:
            return frames
        if frames.shape[3] == 3:
            return frames.permute(0, 3, 1, 2)
    raise UserInputError(f"{name} must have shape (T, 3, H, W) or (T, H, W, 3), not empty, got {tuple(frames.shape)}")


def _picture_frames(source: Path) -> Iterator[torch.Tensor]:
    """Read the pictures of a folder, or one picture."""
    from PIL import Image

    for path in picture_files(source) if source.is_dir() else [source]:
        try:
            with Image.open(path) as image:
                if image.mode not in ("RGB", "L", "P") or "transparency" in image.info:
                    raise UserInputError(f"{path} must be an 8-bit picture without alpha, got mode {image.mode}")
                pixels = np.array(upright(image).convert("RGB"))
        except UserInputError:
            raise
        # Pillow's decoders report damage in all of these.
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserInputError(f"{path} cannot be read as a picture: {error}") from None
        yield torch.from_numpy(pixels).permute(2, 0, 1)


def _array_frames(path: Path) -> Iterator[torch.Tensor]:
    try:
        if path.suffix.lower() == ".npy":
            with path.open("rb") as file:
                yield from _stream_array(file, path)
            return
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            if "frames.npy" not in members and len(members) != 1:
                raise UserInputError(f"{path} must hold one array, or one called 'frames', got {members}")
            with archive.open("frames.npy" if "frames.npy" in members else members[0]) as member:
                yield from _stream_array(member, path)
    except (zipfile.BadZipFile, zipfile.zlib.error, EOFError, ValueError) as error:  # type: ignore[attr-defined]
        if isinstance(error, UserInputError):
            raise
        raise UserInputError(f"{path} cannot be read as an array file: {error}") from None


def _stream_array(file: IO[bytes], path: Path) -> Iterator[torch.Tensor]:
    """Yield the frames of an open .npy file without holding the array."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read_header(file)
    if fortran_order or dtype.kind not in "fu" or dtype.byteorder == ">":
        raise UserInputError(f"{path} must be a row-major array of uint8 or floating point, got {dtype}")
    empty = torch.empty(shape, device="meta")
    channels_last = _channels_first(empty, str(path)).shape != empty.shape
    size = dtype.itemsize * int(np.prod(shape[1:]))
    for index in range(shape[0]):
        data = bytearray()
        while len(data) < size and (piece := file.read(size - len(data))):
            data += piece
        if len(data) < size:
            raise UserInputError(f"{path} is incomplete: it ends in frame {index} of {shape[0]}")
        frame = torch.from_numpy(np.frombuffer(data, dtype=dtype).reshape(shape[1:]))
        yield frame.permute(2, 0, 1) if channels_last else frame


def _video_frames(path: Path) -> Iterator[torch.Tensor]:
    """Decode every frame once, as 8-bit RGB; none is repeated or left out to fit a frame rate."""
    from imageio_ffmpeg import get_ffmpeg_exe

    command = [get_ffmpeg_exe(), "-nostdin", "-loglevel", "error", "-i", str(path), "-map", "0:v:0", "-an"]
    command += ["-fps_mode", "passthrough", "-pix_fmt", "rgb24", "-c:v", "ppm", "-f", "image2pipe", "pipe:1"]
    with tempfile.TemporaryFile() as messages:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages)
        assert process.stdout is not None
        finished = False
        try:
            while (frame := _read_ppm(process.stdout, path)) is not None:
                yield frame
            finished = True
        finally:
            if not finished:
                process.kill()
            process.stdout.close()
            process.wait()
        messages.seek(0)
        text = " ".join(messages.read().decode(errors="replace").split())
        # ffmpeg decodes what it can of a damaged file, complains, and may still return 0.
        if process.returncode or text:
            raise UserInputError(f"{path} cannot be read as a video: {text or f'ffmpeg returned {process.returncode}'}")


def _read_ppm(stream: IO[bytes], path: Path) -> torch.Tensor | None:
    """Read one picture "P6", width and height, 255, pixels; `None` at the end of the stream."""
    if not stream.readline():
        return None
    width, height = (int(word) for word in stream.readline().split())
    stream.readline()
    pixels = stream.read(3 * width * height)
    if len(pixels) < 3 * width * height:
        raise UserInputError(f"{path} cannot be read as a video: the decoder stopped inside a frame")
    return torch.from_numpy(np.frombuffer(bytearray(pixels), np.uint8).reshape(height, width, 3)).permute(2, 0, 1)


def is_clip(path: Path) -> bool:
    """Say whether a path looks like a clip: an array or video file, or a folder with pictures."""
    if path.name.startswith("."):
        return False
    if path.is_dir():
        return bool(picture_files(path))
    return path.suffix.lower() in ARRAYS | VIDEOS
