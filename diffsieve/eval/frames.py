"""Checks on a pair of clips and the walk over them in chunks of frames, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import UserInputError


def check_frames(reference: torch.Tensor, test: torch.Tensor) -> None:
    """Check that two clips can be compared.

    Args:
        reference: frames of the dense run, (T, 3, H, W), uint8, or floating point in [0, 1].
        test: frames of the run under test, same shape.

    Raises:
        UserInputError: unequal or wrong shapes, another dtype, values that are not finite or outside [0, 1].
    """
    for name, frames in (("reference", reference), ("test", test)):
        if not isinstance(frames, torch.Tensor):
            raise UserInputError(f"{name} must be a torch.Tensor, got {type(frames).__name__}")
        if frames.ndim != 4 or frames.shape[1] != 3 or 0 in frames.shape:
            raise UserInputError(f"{name} must have shape (T, 3, H, W), not empty, got {tuple(frames.shape)}")
        if frames.dtype != torch.uint8 and not frames.is_floating_point():
            raise UserInputError(f"{name} must be uint8 or floating point, got {frames.dtype}")
    if reference.shape != test.shape:
        raise UserInputError(
            f"reference and test must have the same shape, got {tuple(reference.shape)} and {tuple(test.shape)}"
        )
    for name, frames in (("reference", reference), ("test", test)):
        if frames.dtype == torch.uint8:
            continue
        # aminmax passes NaN on, and infinity fails the range: one pass serves both checks.
        low, high = (float(value) for value in torch.aminmax(frames))
        if not (low >= 0.0 and high <= 1.0):
            raise UserInputError(f"{name} must be finite and inside [0, 1], got values from {low} to {high}")


def frame_chunks(
    reference: torch.Tensor, test: torch.Tensor, chunk_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of (<= chunk_size, 3, H, W) float64 chunks in [0, 1]; uint8 is cast and divided by 255 first."""
    if chunk_size < 1:
        raise UserInputError(f"chunk_size must be at least 1, got {chunk_size}")
    for start in range(0, reference.shape[0], chunk_size):
        yield (
            to_float64(reference[start : start + chunk_size]),
            to_float64(test[start : start + chunk_size]),
        )


def to_float64(frames: torch.Tensor) -> torch.Tensor:
    """Return frames in [0, 1] as float64; uint8 is cast before it is divided by 255."""
    # Apple's GPU backend has no float64.
    if frames.device.type == "mps":
        frames = frames.cpu()
    scale = 255.0 if frames.dtype == torch.uint8 else 1.0
    return frames.to(torch.float64) / scale
