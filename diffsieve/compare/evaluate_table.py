"""The figures of an evaluation as rows: for metrics.csv, the page and the terminal."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import atomic_path
from .page import Table, metric_text, metric_title


def write_csv(target: Path, report: Mapping[str, Any]) -> None:
    """Write one line for each run and clip: its densities and the mean of every metric; an empty field is no value."""
    runs = [*report["runs"], *([report["floor"]] if report["floor"] else [])]
    names = metric_names(report)
    with atomic_path(target) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "clip", "frames", "density_overall", "density_sparse_steps", *names])
        for run in runs:
            for clip in run["clips"]:
                means = [clip["metrics"].get(name, {}).get("mean") for name in names]
                densities = [clip.get(name, run[name]) for name in ("density_overall", "density_sparse_steps")]
                writer.writerow([run["label"], clip["name"], clip["frames"], *densities, *means])


def metric_names(report: Mapping[str, Any]) -> list[str]:
    """Return the metrics of all runs, in their order."""
    runs = [*report["runs"], *([report["floor"]] if report["floor"] else [])]
    return list(dict.fromkeys(name for run in runs for clip in run["clips"] for name in clip["metrics"]))


def summary_table(report: Mapping[str, Any]) -> Table:
    """Return a row for each run with the mean over clips of every metric, and the noise floor as the last one."""
    names = metric_names(report)
    runs = [*report["runs"], *([report["floor"]] if report["floor"] else [])]
    distance = next((run["frechet"]["name"] for run in runs if (run["frechet"] or {}).get("name")), None)
    headings = ["run", "clips", "density", *(_heading(name) for name in names), *([distance] if distance else [])]
    rows = []
    for run in runs:
        density = run["density_overall"]
        cells = [run["label"], str(len(run["clips"])), "-" if density is None else f"{density:.3f}"]
        for name in names:
            figures = run["summary"].get(name, {"mean": None, "std": None})
            text = metric_text(name, figures["mean"])
            cells.append(text if figures["std"] is None else f"{text} ± {metric_text(name, figures['std'])}")
        if distance:
            value = (run["frechet"] or {}).get("value")
            cells.append("-" if value is None else f"{value:.3f}")
        rows.append(cells)
    return Table(headings, rows)


def _heading(name: str) -> str:
    unit = ", dB" if name in ("psnr", "psnr_from_mean_mse") or name.endswith(" psnr") else ""
    return metric_title(name) + unit
