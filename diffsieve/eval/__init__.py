"""Paired metrics: how close the frames of a sparse run are to the frames of the dense run on the same noise."""

from .frames import check_frames
from .psnr import psnr, psnr_from_mean_mse
from .result import Direction, MetricResult, Statistics, summarize
from .ssim import ssim

__all__ = [
    "Direction",
    "MetricResult",
    "Statistics",
    "check_frames",
    "psnr",
    "psnr_from_mean_mse",
    "ssim",
    "summarize",
]
