"""How the clips of a folder were made, from the report that `generate` or `compare` left beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from .folder import REPORT
from .report import COMPARE_SCHEMA, GENERATE_SCHEMA

_MADE_BY = {GENERATE_SCHEMA: "diffsieve generate", COMPARE_SCHEMA: "diffsieve compare"}
_DENSITIES = ("density_overall", "density_sparse_steps")
# What a dense and a sparse clip must have in common to be compared.
_SHARED = (
    "model", "steps", "frames", "height", "width", "guidance_scale", "negative_prompt", "max_sequence_length", "dtype",
)  # fmt: skip


def is_comparison(folder: Path) -> bool:
    """Say whether a folder is a finished one of `diffsieve compare`."""
    report = _read(folder)
    return report is not None and report["schema"] == COMPARE_SCHEMA


def comparison_clips(folder: Path, side: str, *, raw: bool) -> dict[str, Path]:
    """Return the clips of a folder of `diffsieve compare` by name.

    Args:
        folder: see `is_comparison`.
        side: "dense", "sparse" or "floor".
        raw: the raw frames, else the videos.

    Returns:
        Paths by name; for a side that was not made, those of the clips that have it.
    """
    report = _read(folder)
    assert report is not None
    found = {}
    for clip in report["clips"]:
        file = clip["files"].get(f"{side}_frames" if raw else side)
        if file is not None:
            found[clip["folder"]] = folder / clip["folder"] / file
    return found


def provenance(folder: Path, *, dense: bool = False) -> dict[str, Any] | None:
    """Return how the clips of a folder were made, `None` where no report says so.

    Args:
        folder: of clips.
        dense: of a folder of `diffsieve compare`, the dense clips.

    Returns:
        `made_by`, `created`, `command`, `settings`, `prompts`, `seeds`, `environment`, the mean measured densities, and
        `clips`: by file name prompt, seed and measured densities of each.
    """
    report = _read(folder)
    if report is None:
        return None
    clips = {}
    for clip in report["clips"]:
        sparsity: Mapping[str, Any] = {} if dense else clip.get("sparsity") or {}
        own = {"prompt": clip["prompt"], "seed": clip["seed"]} | {name: sparsity.get(name) for name in _DENSITIES}
        clips[clip.get("file") or clip["folder"]] = own
    settings = dict(report["settings"])
    if dense:
        settings["attention"] = None
    return {
        "made_by": _MADE_BY[report["schema"]],
        "created": report.get("created"),
        "command": report.get("command"),
        "settings": settings,
        "prompts": report.get("prompt"),
        "seeds": report.get("seed"),
        "environment": report.get("environment"),
        **{name: _mean([clip[name] for clip in clips.values()]) for name in _DENSITIES},
        "clips": clips,
    }


def disagreements(dense: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> list[str]:
    """Say in what two folders differ that should be the same for a fair comparison; nothing where one is unknown."""
    if dense is None or other is None:
        return []
    found = []
    for name in _SHARED:
        values = [made["settings"].get(name) for made in (dense, other)]
        if values[0] != values[1]:
            found.append(f"{name} {values[0]!r} and {values[1]!r}")
    for clip in dense["clips"].keys() & other["clips"].keys():
        seeds = [made["clips"][clip]["seed"] for made in (dense, other)]
        if seeds[0] != seeds[1]:
            found.append(f"seed {seeds[0]} and {seeds[1]} of {clip}")
    return found


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        report: Any = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        known = report["schema"] in _MADE_BY and isinstance(report["settings"], dict)
        for clip in report["clips"]:
            _ = clip["prompt"], clip["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if known else None


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present and len(present) == len(values) else None
