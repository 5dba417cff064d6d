"""Metrics as the papers of the Sparse-VideoGen line state them, for comparison with their numbers only.

They are taken from 8-bit frames decoded from video files. Their SSIM uses a box window and counts the border, their
LPIPS uses VGG on frames in [0, 1]; neither value may stand beside one of the standard definition.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .ssim import C1, C2

_WINDOW = 11


def box_ssim_per_frame(reference: torch.Tensor, test: torch.Tensor) -> list[float]:
    """Return the SSIM with a box window of each frame of two float64 chunks (n, 3, H, W) in [0, 1].

    Mean over 11 x 11 pixels with zeros around the frame, always divided by 121; population covariances; the mean goes
    over all positions, those of the border too, and channels.
    """
    mean_x, mean_y = _box_mean(reference), _box_mean(test)
    variance_x = _box_mean(reference * reference) - mean_x * mean_x
    variance_y = _box_mean(test * test) - mean_y * mean_y
    covariance = _box_mean(reference * test) - mean_x * mean_y
    numerator = (2 * mean_x * mean_y + C1) * (2 * covariance + C2)
    denominator = (mean_x * mean_x + mean_y * mean_y + C1) * (variance_x + variance_y + C2)
    return (numerator / denominator).mean(dim=(1, 2, 3)).tolist()


def _box_mean(image: torch.Tensor) -> torch.Tensor:
    # Rows, then columns: 22 additions for each pixel in place of 121.
    rows = F.avg_pool2d(image, (_WINDOW, 1), stride=1, padding=(_WINDOW // 2, 0))
    return F.avg_pool2d(rows, (1, _WINDOW), stride=1, padding=(0, _WINDOW // 2))
