"""Structural similarity of two clips (Wang et al., IEEE TIP 13(4), 2004), data range 1."""

from __future__ import annotations

import math

import torch

from ..errors import UserInputError
from .frames import check_frames, frame_chunks
from .result import MetricResult

WINDOW_SIZE = 11
_SIGMA = 1.5
_C1 = 0.01**2
_C2 = 0.03**2


def ssim(reference: torch.Tensor, test: torch.Tensor, *, chunk_size: int = 16) -> MetricResult:
    """Return the SSIM per frame and its mean over frames.

    Gaussian window 11 x 11 with sigma 1.5 and sum 1 at the positions where it fits whole (no padding), population
    covariances, `C1 = 0.01^2`, `C2 = 0.03^2`; per channel of RGB, mean over positions and channels, in float64. No
    luma conversion, no downsampling, no clamping: values lie in [-1, 1].

    Args:
        reference: (T, 3, H, W) uint8, or floating point in [0, 1]; H and W at least 11.
        test: same shape.
        chunk_size: frames in work at once; bounds the memory, does not change the result.

    Raises:
        UserInputError: frames smaller than the window; see also `check_frames`.
    """
    check_frames(reference, test)
    if min(reference.shape[-2:]) < WINDOW_SIZE:
        raise UserInputError(
            f"reference and test must be at least {WINDOW_SIZE} x {WINDOW_SIZE} pixels for SSIM, "
            f"got {reference.shape[-2]} x {reference.shape[-1]}"
        )
    values: list[float] = []
    for chunk, other in frame_chunks(reference, test, chunk_size):
        values += _ssim_map(chunk, other.to(chunk.device)).mean(dim=(1, 2, 3)).tolist()
    return MetricResult("ssim", tuple(values), math.fsum(values) / len(values), "", "higher")


def _ssim_map(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mean_x, mean_y = _window_mean(x), _window_mean(y)
    # E[x^2] - E[x]^2 loses about 2e-16 here, against C2 = 9e-4: float64 makes the short form safe.
    variance_x = _window_mean(x * x) - mean_x * mean_x
    variance_y = _window_mean(y * y) - mean_y * mean_y
    covariance = _window_mean(x * y) - mean_x * mean_y
    numerator = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    denominator = (mean_x * mean_x + mean_y * mean_y + _C1) * (variance_x + variance_y + _C2)
    return numerator / denominator  # (T, 3, H - 10, W - 10)


def _window_mean(image: torch.Tensor) -> torch.Tensor:
    """Return the Gaussian-weighted mean at every whole position: (T, 3, H, W) -> (T, 3, H - 10, W - 10)."""
    weights = _gaussian_weights()
    height, width = image.shape[-2] - WINDOW_SIZE + 1, image.shape[-1] - WINDOW_SIZE + 1
    # Eleven shifted sums per axis: float64 convolution has no fast path on CPU.
    rows = sum(weight * image[..., i : i + height, :] for i, weight in enumerate(weights))
    assert isinstance(rows, torch.Tensor)
    columns = sum(weight * rows[..., i : i + width] for i, weight in enumerate(weights))
    assert isinstance(columns, torch.Tensor)
    return columns


def _gaussian_weights() -> list[float]:
    raw = [math.exp(-((i - WINDOW_SIZE // 2) ** 2) / (2 * _SIGMA**2)) for i in range(WINDOW_SIZE)]
    total = math.fsum(raw)
    return [weight / total for weight in raw]
