"""Paired metrics of generated clips, on the GPU that made them or else on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..eval import DEFAULT_METRICS, LoadedLpips, MetricResult, MissingWeightsError, load_lpips, measure
from .clip import Clip


def load_alex(device: torch.device, weights: Path | None = None) -> LoadedLpips | str:
    """Return LPIPS with AlexNet, or the reason why it is not there.

    Args:
        device: of the pipeline; see `metrics_device`.
        weights: file of AlexNet; default: the usual places.
    """
    try:
        return load_lpips("alex", weights=weights, device=metrics_device(device))
    except MissingWeightsError as error:
        return str(error)


def measure_clips(
    pipe: Any, dense: Clip, other: Clip, lpips: Mapping[str, LoadedLpips | str]
) -> dict[str, MetricResult]:
    """Measure a clip of a pipeline against its dense clip; `lpips` as in `diffsieve.eval.measure`."""
    device = metrics_device(pipe._execution_device)
    return measure(dense.frames, other.frames, metrics=DEFAULT_METRICS, lpips=lpips, device=device)


def metrics_device(device: torch.device) -> torch.device:
    """Return the device itself where it is a GPU of CUDA, else the CPU, where the frames are."""
    return device if device.type == "cuda" else torch.device("cpu")
