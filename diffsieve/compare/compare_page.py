"""The page of a comparison, and the LPIPS that its table has when weights are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..eval import LoadedLpips, MetricResult
from .page import Page, PageClip, Table, frame_charts, metric_text, metric_title
from .pair_metrics import load_alex
from .report import size_text

_MOST_CLIPS = 8
_MEDIA = {"side_by_side": "dense and sparse", "difference": "difference from dense", "mask": "block mask"}


def load_lpips_or_say_why(device: torch.device) -> LoadedLpips | MetricResult:
    """Return LPIPS with AlexNet, or a result without a value that says what is missing."""
    found = load_alex(device)
    return found if isinstance(found, LoadedLpips) else MetricResult.missing("lpips[alex]", found, direction="lower")


def comparison_page(report: Mapping[str, Any], folder: Path, label: str) -> Page:
    """Lay out a comparison.

    Args:
        report: what report.json holds.
        folder: with a folder for each clip.
        label: of the sparse run.
    """
    place, settings = report["environment"], report["settings"]
    what = "pictures" if report["pictures"] else "clips"
    size = size_text(settings)
    versions = ", ".join(f"{name} {number}" for name, number in place["versions"].items() if number)
    facts = [
        f"{settings['model']}, {size}, {settings['steps']} steps",
        f"{report['created']}; {place['device_name']}, {place['dtype']}; {versions}",
    ]
    shown = report["clips"][:_MOST_CLIPS]
    if len(shown) < len(report["clips"]):
        facts.append(f"the first {len(shown)} of {len(report['clips'])} {what} are shown below; the figures are of all")
    clips = []
    for clip in shown:
        media = [(text, folder / clip["folder"] / clip["files"][k]) for k, text in _MEDIA.items() if k in clip["files"]]
        sparsity = clip["sparsity"]
        text = (
            f"density {sparsity['density_overall']:.3f} of the whole run, "
            f"{sparsity['steps_dense']} of {sparsity['steps_total']} steps dense"
        )
        charts = frame_charts({label: clip["metrics"]})
        clips.append(PageClip(f"{clip['prompt']}, seed {clip['seed']}", text, media, charts))
    return Page(f"{label} against dense attention", facts, _table(report), _notes(report), clips=clips)


def _table(report: Mapping[str, Any]) -> Table:
    names = [name for name in report["clips"][0]["metrics"] if name != "psnr_from_mean_mse"]
    units = {name: report["clips"][0]["metrics"][name]["unit"] for name in names}
    headings = [
        "picture" if report["pictures"] else "clip",
        *(metric_title(name) + (f", {units[name]}" if units[name] else "") for name in names),
    ]
    headings += ["density", "speed-up"]
    rows = []
    for clip in report["clips"]:
        cells = [f"{clip['prompt']}, seed {clip['seed']}"]
        cells += [metric_text(name, clip["metrics"][name]["mean"]) for name in names]
        rows.append([*cells, f"{clip['sparsity']['density_overall']:.3f}", f"{clip['speed_up']['total']:.2f}x"])
    floor = report["floor"]
    if floor:
        rows.append(["noise floor, mean", *(metric_text(name, floor[name]["mean"]) for name in names), "1.000", "-"])
    return Table(headings, rows)


def _notes(report: Mapping[str, Any]) -> list[str]:
    reasons = {
        f"{metric_title(name)} not computed: {result['reason']}"
        for clip in report["clips"]
        for name, result in clip["metrics"].items()
        if result["reason"]
    }
    return [*report["notes"], *sorted(reasons)]
