"""What report.json says beside the clips: versions, device, statistics over clips."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from .. import __version__
from ..eval import summarize
from .clip import Clip

COMPARE_SCHEMA = "diffsieve.compare/1"
GENERATE_SCHEMA = "diffsieve.generate/1"


def versions() -> dict[str, str | None]:
    """Return the versions that can change a number."""
    found: dict[str, str | None] = {"diffsieve": __version__, "torch": torch.__version__}
    for package in ("diffusers", "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def environment(pipe: Any) -> dict[str, Any]:
    """Describe where the clips were made."""
    device = pipe._execution_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "dtype": dtype_name(pipe, "transformer"),
        "vae_dtype": dtype_name(pipe, "vae"),
        "pipeline": type(pipe).__name__,
    }


def dtype_name(pipe: Any, part: str) -> str | None:
    module = getattr(pipe, part, None)
    return None if module is None else str(module.dtype).removeprefix("torch.")


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def size_text(settings: Mapping[str, Any]) -> str:
    """Return the size of a clip or picture, such as "25 frames of 192 x 192" or "128 x 128"."""
    size = f"{settings['width']} x {settings['height']}"
    return size if settings["fps"] is None else f"{settings['frames']} frames of {size}"


def clip_seconds(clip: Clip) -> dict[str, Any]:
    """Return the times of a clip, rounded to 0.1 ms."""
    return {
        "total": round(clip.seconds_total, 4),
        "steps": [round(value, 4) for value in clip.seconds_steps],
        "decode": round(clip.seconds_decode, 4),
    }


def speed_up(dense: Mapping[str, Any], sparse: Mapping[str, Any], steps_dense: int) -> dict[str, float | None]:
    """Compare the times of two runs.

    Returns:
        `total`: whole calls; `sparse_step`: the median step of the dense run over that of the sparse run after its
        `steps_dense` dense ones, without the first step of either; `None` where there is no such step.
    """
    ordinary = dense["steps"][1:]
    sparse_only = sparse["steps"][max(steps_dense, 1) :]
    step = median(ordinary) / median(sparse_only) if ordinary and sparse_only else None
    return {"total": dense["total"] / sparse["total"], "sparse_step": step}


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean, sample standard deviation and n over clips of every figure in the table."""

    def statistics(*keys: str) -> dict[str, Any]:
        values = []
        for record in records:
            value: Any = record
            for key in keys:
                value = value[key]
            values.append(value)
        return summarize(values).to_dict()

    names = list(records[0]["metrics"]) if records else []
    return {
        **{name: statistics("metrics", name, "mean") for name in names},
        "density_overall": statistics("sparsity", "density_overall"),
        "density_sparse_steps": statistics("sparsity", "density_sparse_steps"),
        "seconds_dense": statistics("seconds", "dense", "total"),
        "seconds_sparse": statistics("seconds", "sparse", "total"),
        "speed_up": statistics("speed_up", "total"),
        "speed_up_sparse_step": statistics("speed_up", "sparse_step"),
    }


def floor_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return statistics of the noise floor over clips, by metric; `None` where it was not measured."""
    found = [record["floor"] for record in records if record.get("floor")]
    if not found:
        return None
    names = list(found[0]["metrics"])
    return {name: summarize([floor["metrics"][name]["mean"] for floor in found]).to_dict() for name in names}
