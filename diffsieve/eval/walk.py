"""Two clips side by side in chunks of frames: equal counts and sizes, values in [0, 1], bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from ..errors import UserInputError
from .clips import ClipReader
from .frames import to_float64

# Pixels in work at once. SSIM holds about 15 float64 copies of its chunk: 0.4 GB on a CPU, 3 GB on a GPU.
_PIXELS = {"cpu": 1 << 20, "cuda": 1 << 23}
_MOST_FRAMES = 16


def default_chunk(height: int, width: int, device: torch.device) -> int:
    """Return how many frames of a size are computed at once: at most 16, fewer for large frames."""
    budget = _PIXELS.get(device.type, _PIXELS["cpu"])
    return max(1, min(_MOST_FRAMES, budget // (height * width)))


def walk_pair(
    reference: ClipReader, test: ClipReader, *, chunk_size: int | None = None, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of (n, 3, H, W) float64 chunks in [0, 1] on the device; both clips are read in step.

    Args:
        reference: the dense clip.
        test: the clip to compare.
        chunk_size: frames at once; default: by the size of the frames.
        device: where the chunks are computed on.

    Raises:
        UserInputError: unequal frame counts or sizes, no frames, values outside [0, 1] or not finite, broken files.
    """
    if chunk_size is not None and chunk_size < 1:
        raise UserInputError(f"chunk_size must be at least 1, got {chunk_size}")
    streams = reference.frames(), test.frames()
    heads = tuple(next(stream, None) for stream in streams)
    for clip, head in zip((reference, test), heads, strict=True):
        if head is None:
            raise UserInputError(f"{clip.name} must have at least one frame, got none")
    shape = heads[0].shape  # type: ignore[union-attr]
    size = chunk_size or default_chunk(shape[1], shape[2], device)
    pending: list[list[torch.Tensor]] = [[head] for head in heads if head is not None]
    done = 0
    while True:
        for rows, stream in zip(pending, streams, strict=True):
            rows.extend(islice(stream, size - len(rows)))
        counts = [len(rows) for rows in pending]
        if counts[0] != counts[1]:
            totals = [done + n + sum(1 for _ in stream) for n, stream in zip(counts, streams, strict=True)]
            raise UserInputError(
                f"{reference.name} and {test.name} must have the same number of frames, got {totals[0]} and {totals[1]}"
            )
        if not counts[0]:
            return
        chunks = []
        for clip, rows in zip((reference, test), pending, strict=True):
            for number, frame in enumerate(rows):
                if frame.shape != shape:
                    raise UserInputError(
                        f"all frames of {reference.name} and {test.name} must have the same size, got "
                        f"{shape[2]} x {shape[1]} and {frame.shape[2]} x {frame.shape[1]} "
                        f"(frame {done + number} of {clip.name})"
                    )
            chunks.append(_check_range(torch.stack(rows).to(device), clip.name))
        yield chunks[0], chunks[1]
        done += counts[0]
        pending = [[], []]


def _check_range(frames: torch.Tensor, name: str) -> torch.Tensor:
    """Check one chunk and return it in float64."""
    if frames.dtype != torch.uint8:
        if not frames.is_floating_point():
            raise UserInputError(f"{name} must be uint8 or floating point, got {frames.dtype}")
        low, high = (float(value) for value in torch.aminmax(frames))
        if not (low >= 0.0 and high <= 1.0):
            raise UserInputError(f"{name} must be finite and inside [0, 1], got values from {low} to {high}")
    return to_float64(frames)
