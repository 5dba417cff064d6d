"""Structural similarity of two clips (Wang et al., IEEE TIP 13(4), 2004), data range 1."""

from __future__ import annotations

import math

import torch

from ..errors import UserInputError
from .frames import check_frames, frame_chunks
from .result import MetricResult

WINDOW_SIZE = 11
_SIGMA = 1.5
C1 = 0.01**2
C2 = 0.03**2


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
        values += ssim_per_frame(chunk, other.to(chunk.device))
    return MetricResult("ssim", tuple(values), math.fsum(values) / len(values), "", "higher")


def ssim_per_frame(reference: torch.Tensor, test: torch.Tensor) -> list[float]:
    """Return the SSIM of each frame of two float64 chunks (n, 3, H, W)."""
    luminance, structure = similarity_maps(reference, test)
    return (luminance * structure).mean(dim=(1, 2, 3)).tolist()


def similarity_maps(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two factors of SSIM at every whole position, float64 (n, 3, H - 10, W - 10).

    The luminance `(2 mx my + C1) / (mx^2 + my^2 + C1)` and contrast with structure `(2 cxy + C2) / (vx + vy + C2)`.
    """
    mean_x, mean_y = _window_mean(x), _window_mean(y)
    # E[x^2] - E[x]^2 loses about 2e-16 here, against C2 = 9e-4: float64 makes the short form safe.
    variance_x = _window_mean(x * x) - mean_x * mean_x
    variance_y = _window_mean(y * y) - mean_y * mean_y
    covariance = _window_mean(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x * mean_x + mean_y * mean_y + C1)
    return luminance, (2 * covariance + C2) / (variance_x + variance_y + C2)


def _window_mean(image: torch.Tensor) -> torch.Tensor:
    """Return the Gaussian-weighted mean at every whole position: (T, 3, H, W) -> (T, 3, H - 10, W - 10)."""
    weights = _gaussian_weights()
    height, width = image.shape[-2] - WINDOW_SIZE + 1, image.shape[-1] - WINDOW_SIZE + 1
    # Eleven shifted sums per axis: float64 convolution has no fast path on CPU.
    rows = weights[0] * image[..., :height, :]
    for i, weight in enumerate(weights[1:], 1):
        rows.add_(image[..., i : i + height, :], alpha=weight)  # one pass; a product and a sum would be two
    columns = weights[0] * rows[..., :width]
    for i, weight in enumerate(weights[1:], 1):
        columns.add_(rows[..., i : i + width], alpha=weight)
    return columns


def _gaussian_weights() -> list[float]:
    raw = [math.exp(-((i - WINDOW_SIZE // 2) ** 2) / (2 * _SIGMA**2)) for i in range(WINDOW_SIZE)]
    total = math.fsum(raw)
    return [weight / total for weight in raw]
