"""H.264 files that every player and browser opens."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F

from ..errors import DiffsieveError, UserInputError
from .files import atomic_path

_CRF = 14  # close to transparent; metrics never see the file


def to_uint8(frames: torch.Tensor) -> torch.Tensor:
    """Round frames in [0, 1] to 8 bits; same shape."""
    return (frames * 255.0).round().clamp(0, 255).to(torch.uint8)


def write_mp4(target: Path, frames: torch.Tensor, *, fps: int) -> None:
    """Write an H.264 file, yuv420p.

    The format needs even sides: an odd last row or column is repeated once, nothing is scaled or cut.

    Args:
        target: where the file appears, when it is complete.
        frames: (T, 3, H, W) uint8.
        fps: frames per second.

    Raises:
        UserInputError: frames of another shape or dtype.
        OSError: the disk is full, or the system allows no file of this size; nothing is left.
        DiffsieveError: ffmpeg failed otherwise; nothing is left under `target`.
    """
    write_mp4_chunks(target, [frames], fps=fps)


def write_mp4_chunks(target: Path, chunks: Iterable[torch.Tensor], *, fps: int) -> None:
    """Write an H.264 file from chunks of frames as they come; see `write_mp4`.

    Args:
        target: where the file appears, when it is complete.
        chunks: (n, 3, H, W) uint8 each, at least one.
        fps: frames per second.
    """
    from imageio_ffmpeg import get_ffmpeg_exe

    stream = (_even(chunk) for chunk in chunks)
    first = next(stream)
    size = f"{first.shape[2]}x{first.shape[1]}"
    with atomic_path(target) as part, tempfile.TemporaryFile() as messages:
        command = [get_ffmpeg_exe(), "-y", "-loglevel", "error"]
        command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size]
        command += ["-r", str(fps), "-i", "pipe:0", "-an", "-c:v", "libx264", "-crf", str(_CRF), "-preset", "medium"]
        command += ["-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4", str(part)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=messages)
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # ffmpeg has stopped; its exit code and message say why
                for pixels in itertools.chain([first], stream):
                    process.stdin.write(pixels.numpy().tobytes())
                process.stdin.close()
        except BaseException:
            process.kill()
            raise
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
        if process.returncode:
            messages.seek(0)
            text = messages.read().decode(errors="replace").strip()
            if "No space left on device" in text:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            if process.returncode == -getattr(signal, "SIGXFSZ", 0):
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(target))
            raise DiffsieveError(f"ffmpeg could not write {target}: {text}")


def _even(frames: torch.Tensor) -> torch.Tensor:
    """Check frames (n, 3, H, W) uint8 and return them as (n, H', W', 3) with even sides."""
    if frames.ndim != 4 or frames.shape[1] != 3 or 0 in frames.shape or frames.dtype != torch.uint8:
        raise UserInputError(f"frames must be (T, 3, H, W) uint8, not empty, got {tuple(frames.shape)} {frames.dtype}")
    height, width = frames.shape[-2:]
    # Replicate padding has no integer kernel; 8-bit values are exact in float32.
    even = F.pad(frames.float(), (0, width % 2, 0, height % 2), mode="replicate").to(torch.uint8)
    return even.permute(0, 2, 3, 1).contiguous()
