"""Metrics: how close the frames of a sparse run are to those of the dense run on the same noise."""

from .clips import ClipReader, open_clip
from .features import FeatureNetwork, frechet, load_features
from .flickering import temporal_flickering
from .frames import check_frames
from .frechet import FeatureMoments, FrechetResult, frechet_distance
from .lpips import LoadedLpips, MissingWeightsError, load_lpips, lpips
from .measure import DEFAULT_METRICS, METRICS, measure
from .ms_ssim import ms_ssim
from .psnr import psnr, psnr_from_mean_mse
from .result import Direction, MetricResult, Statistics, summarize
from .ssim import ssim
from .weights import install_effnet, install_lpips

__all__ = [
    "DEFAULT_METRICS",
    "METRICS",
    "ClipReader",
    "Direction",
    "FeatureMoments",
    "FeatureNetwork",
    "FrechetResult",
    "LoadedLpips",
    "MetricResult",
    "MissingWeightsError",
    "Statistics",
    "check_frames",
    "frechet",
    "frechet_distance",
    "install_effnet",
    "install_lpips",
    "load_features",
    "load_lpips",
    "lpips",
    "measure",
    "ms_ssim",
    "open_clip",
    "psnr",
    "psnr_from_mean_mse",
    "ssim",
    "summarize",
    "temporal_flickering",
]
