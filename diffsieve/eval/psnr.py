"""Peak signal-to-noise ratio of two clips, data range 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .frames import check_frames, frame_chunks
from .result import MetricResult

IDENTICAL_DB = 100.0
"""What a frame with a mean squared error of 1e-10 or less counts in a mean, which would be infinite otherwise."""


def psnr(reference: torch.Tensor, test: torch.Tensor, *, chunk_size: int = 16) -> MetricResult:
    """Return the PSNR per frame and its mean over frames, in dB.

    Per frame `10 log10(1 / MSE)`, MSE over channels and pixels in float64. Identical frames have an infinite
    value; in the mean every frame counts at most 100 dB, and the number of identical frames is reported beside it.

    Args:
        reference: (T, 3, H, W) uint8, or floating point in [0, 1].
        test: same shape.
        chunk_size: frames in work at once; bounds the memory, does not change the result.

    Raises:
        UserInputError: see `check_frames`.
    """
    return psnr_result(_mse_of_clip(reference, test, chunk_size))


def psnr_from_mean_mse(reference: torch.Tensor, test: torch.Tensor, *, chunk_size: int = 16) -> MetricResult:
    """Return the PSNR of the clip's mean squared error, in dB; the per-frame values are those of `psnr`.

    Never above the mean of `psnr` (Jensen), equal when all frames have the same error. Identical clips give 100 dB.
    """
    return psnr_from_mean_mse_result(_mse_of_clip(reference, test, chunk_size))


def mse_per_frame(reference: torch.Tensor, test: torch.Tensor) -> list[float]:
    """Return the mean squared error of each frame of two float64 chunks (n, 3, H, W)."""
    return (reference - test).square().mean(dim=(1, 2, 3)).tolist()


def psnr_result(errors: Sequence[float]) -> MetricResult:
    """Turn the errors of a clip's frames into `psnr`."""
    values = tuple(_decibel(error) for error in errors)
    mean = math.fsum(min(value, IDENTICAL_DB) for value in values) / len(values)
    return MetricResult("psnr", values, mean, "dB", "higher", identical_frames=list(errors).count(0.0))


def psnr_from_mean_mse_result(errors: Sequence[float]) -> MetricResult:
    """Turn the errors of a clip's frames into `psnr_from_mean_mse`."""
    value = min(_decibel(math.fsum(errors) / len(errors)), IDENTICAL_DB)
    per_frame = tuple(_decibel(error) for error in errors)
    return MetricResult(
        "psnr_from_mean_mse", per_frame, value, "dB", "higher", identical_frames=list(errors).count(0.0)
    )


def _mse_of_clip(reference: torch.Tensor, test: torch.Tensor, chunk_size: int) -> list[float]:
    check_frames(reference, test)
    errors: list[float] = []
    for chunk, other in frame_chunks(reference, test, chunk_size):
        errors += mse_per_frame(chunk, other.to(chunk.device))
    return errors


def _decibel(mse: float) -> float:
    return -10.0 * math.log10(mse) if mse > 0.0 else math.inf
