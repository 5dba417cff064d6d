"""Multi-scale structural similarity of two clips (Wang, Simoncelli, Bovik, Asilomar 2003), data range 1."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .frames import check_frames, frame_chunks
from .result import MetricResult
from .ssim import WINDOW_SIZE, similarity_maps

WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
"""Exponents of the five scales, from the finest to the coarsest (table of the paper)."""

SMALLEST_SIDE = WINDOW_SIZE * 2 ** (len(WEIGHTS) - 1)
"""176 pixels: halved four times, the window of 11 pixels still fits."""


def ms_ssim(reference: torch.Tensor, test: torch.Tensor, *, chunk_size: int = 16) -> MetricResult:
    """Return the MS-SSIM per frame and its mean over frames, in [0, 1].

    Windows and constants of `ssim`. Per channel of RGB: the mean of contrast with structure at the four finer scales
    and the mean of SSIM at the coarsest, negative means as 0, to the powers `WEIGHTS`, multiplied; then the mean over
    channels. Between scales a mean of 2 x 2 pixels; a last odd row or column is dropped. In float64.

    Args:
        reference: (T, 3, H, W) uint8, or floating point in [0, 1].
        test: same shape.
        chunk_size: frames in work at once; bounds the memory, does not change the result.

    Returns:
        The result; without a value, and with the reason, for frames that are too small for five scales.

    Raises:
        UserInputError: see `check_frames`.
    """
    check_frames(reference, test)
    obstacle = too_small(*reference.shape[-2:])
    if obstacle is not None:
        return MetricResult.missing("ms_ssim", obstacle)
    values: list[float] = []
    for chunk, other in frame_chunks(reference, test, chunk_size):
        values += ms_ssim_per_frame(chunk, other.to(chunk.device))
    return MetricResult("ms_ssim", tuple(values), math.fsum(values) / len(values), "", "higher")


def too_small(height: int, width: int) -> str | None:
    """Say why frames are too small for five scales, or `None`."""
    if min(height, width) >= SMALLEST_SIDE:
        return None
    return f"MS-SSIM needs frames of at least {SMALLEST_SIDE} x {SMALLEST_SIDE} pixels, got {height} x {width}"


def ms_ssim_per_frame(reference: torch.Tensor, test: torch.Tensor) -> list[float]:
    """Return the MS-SSIM of each frame of two float64 chunks (n, 3, H, W)."""
    return ssim_and_ms_ssim_per_frame(reference, test)[1]


def ssim_and_ms_ssim_per_frame(reference: torch.Tensor, test: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return `ssim_per_frame` and `ms_ssim_per_frame`, whose finest scale is the same maps."""
    product = torch.ones(reference.shape[:2], dtype=torch.float64, device=reference.device)  # (n, 3)
    ssim = product
    for scale, weight in enumerate(WEIGHTS):
        luminance, structure = similarity_maps(reference, test)
        if scale == 0:
            ssim = (luminance * structure).mean(dim=(1, 2, 3))
        last = scale == len(WEIGHTS) - 1
        term = (luminance * structure if last else structure).mean(dim=(2, 3))
        product = product * term.clamp_min(0.0) ** weight
        if not last:
            reference, test = F.avg_pool2d(reference, 2), F.avg_pool2d(test, 2)
    return ssim.tolist(), product.mean(dim=1).tolist()
