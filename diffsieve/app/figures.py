"""The measured figures of runs as HTML: tables, curves and the row of those that matter, each with its unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..compare.charts import Series, line_chart
from ..compare.page import frame_charts, metric_text, metric_title
from .errors import without_paths
from .store import Run
from .views import notes

_METRICS = {
    "psnr": "pixel error on a log scale, mean over frames; 100 dB means identical",
    "psnr_from_mean_mse": "the same of the error over the whole clip; never above the line before",
    "ssim": "likeness of local structure, 1 means identical",
    "ms_ssim": "the same over five sizes",
}
_LPIPS = "distance that a network trained on human judgements sees, 0 means identical"


def metrics_table(runs: Sequence[tuple[str, Run]]) -> str:
    """Return the metrics of one or more runs against their dense clips.

    Args:
        runs: heading and run of each column.
    """
    names = list(dict.fromkeys(name for _, run in runs for name in run.clip["metrics"]))
    what = runs[0][1].what
    if what == "picture":  # of one frame it is the same figure as the PSNR
        names = [name for name in names if name != "psnr_from_mean_mse"]
    headings = ["metric", *(heading for heading, _ in runs), "unit", "better", "what it is"]
    rows = []
    for name in names:
        results = [run.clip["metrics"].get(name) for _, run in runs]
        known = next(result for result in results if result is not None)
        cells = [_value(name, result) for result in results]
        better = "higher" if known["direction"] == "higher" else "lower"
        meaning = _METRICS.get(name, _LPIPS if name.startswith("lpips") else "")
        if what == "picture":
            meaning = meaning.replace(", mean over frames", "")
        rows.append([metric_title(name), *cells, known["unit"] or "none", better, meaning])
    raw = "on raw frames" if what == "clip" else "before it becomes a file"
    return _table(f"Distance from the dense {what}, {raw}", headings, rows, numbers=len(runs))


def cost_table(runs: Sequence[tuple[str, Run]]) -> str:
    """Return the measured densities and times of one or more runs."""
    rows: list[list[str]] = []

    def add(name: str, values: Sequence[str], unit: str, meaning: str) -> None:
        rows.append([name, *values, unit, meaning])

    clips = [run.clip for _, run in runs]
    whole = "from noise to picture" if runs[0][1].pictures else "text to frames"
    meant = {"most keys of a query, of all" if _llsa(run) else "block pairs computed of all" for _, run in runs}
    add("density, whole run", [_share(clip["sparsity"]["density_overall"]) for clip in clips], "%",
        f"{' or '.join(sorted(meant))}, warm-up and dense layers included; measured")  # fmt: skip
    add("density, sparse steps", [_share(clip["sparsity"]["density_sparse_steps"]) for clip in clips], "%",
        "the same over the steps that are not dense")  # fmt: skip
    add("dense steps", [f"{c['sparsity']['steps_dense']} of {c['sparsity']['steps_total']}" for c in clips], "steps",
        "steps at the start that ran with dense attention")  # fmt: skip
    add("time, dense", [f"{clip['seconds']['dense']['total']:.1f}" for clip in clips], "s", whole)
    add("time, sparse", [f"{clip['seconds']['sparse']['total']:.1f}" for clip in clips], "s", whole)
    add("speed-up, whole run", [_times(clip["speed_up"]["total"]) for clip in clips], "times",
        "time of the dense run over that of the sparse run")  # fmt: skip
    add("speed-up, one step", [_times(clip["speed_up"]["sparse_step"]) for clip in clips], "times",
        "median dense step over median sparse step")  # fmt: skip
    headings = ["measured", *(heading for heading, _ in runs), "unit", "what it is"]
    return _table("Density and time", headings, rows, numbers=len(runs))


def headline(run: Run) -> str:
    """Return the figures that matter in one row."""
    clip = run.clip
    psnr, ssim = clip["metrics"]["psnr"], clip["metrics"]["ssim"]
    cells = [
        (_value("psnr", psnr), "dB PSNR" if psnr["mean"] is not None else "PSNR"),
        (_value("ssim", ssim), "SSIM"),
        (
            f"{_share(clip['sparsity']['density_overall'])} %",
            "of the keys of dense attention" if _llsa(run) else "of block pairs computed",
        ),
        (f"{clip['seconds']['dense']['total']:.1f} s → {clip['seconds']['sparse']['total']:.1f} s", "dense → sparse"),
        (f"{_times(clip['speed_up']['total'])}x", "speed-up"),
    ]
    parts = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in cells)
    return f'<div class="ds-headline">{parts}</div>{notes(run)}'


def curves(runs: Sequence[tuple[str, Run]]) -> str:
    """Return a chart over the frames for each metric."""
    charts = frame_charts({label: run.clip["metrics"] for label, run in runs})
    if not charts:  # pictures
        return ""
    return f'<div class="ds-charts">{"".join(charts)}</div>'


def sweep_charts(runs: Sequence[Run]) -> str:
    """Return quality and time over sparsity, with LLSA over top k, and the table of the figures."""
    llsa = _llsa(runs[0])
    name, label = ("top k", "top k, blocks per level") if llsa else ("sparsity", "sparsity, %")
    points = [(_swept(run), run) for run in runs]
    metrics = [
        metric
        for metric in ("psnr", "ssim", "lpips[alex]")
        if any(run.clip["metrics"].get(metric, {}).get("mean") is not None for run in runs)
    ]
    charts = []
    for metric in metrics:
        values = [(x, run.clip["metrics"][metric]["mean"]) for x, run in points]
        title, unit = f"{metric_title(metric)} against {name}", _with_unit(metric, runs[0])
        charts.append(line_chart(title, [Series(metric, values)], x_label=label, y_label=unit, marks=True))
    times = [
        Series(kind, [(x, run.clip["seconds"][kind]["total"]) for x, run in points]) for kind in ("dense", "sparse")
    ]
    charts.append(line_chart(f"Time against {name}", times, x_label=label, y_label="time, s", marks=True))
    headings = [label, "density, %", *(_with_unit(name, runs[0]) for name in metrics), "time dense, s",
                "time sparse, s", "speed-up"]  # fmt: skip
    rows = [
        [
            f"{x:g}",
            _share(run.clip["sparsity"]["density_overall"]),
            *(_value(name, run.clip["metrics"][name]) for name in metrics),
            f"{run.clip['seconds']['dense']['total']:.1f}",
            f"{run.clip['seconds']['sparse']['total']:.1f}",
            f"{_times(run.clip['speed_up']['total'])}x",
        ]
        for x, run in points
    ]
    table = _table("Sweep", headings, rows, numbers=len(headings) - 1)
    return f'<div class="ds-charts">{"".join(charts)}</div>{table}'


def _value(name: str, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "not computed: another version made this run"
    if result["mean"] is None:
        return f"not computed: {without_paths(result['reason'])}"
    return metric_text(name, result["mean"])


def _with_unit(metric: str, run: Run) -> str:
    unit = run.clip["metrics"][metric]["unit"]
    return metric_title(metric) + (f", {unit}" if unit else "")


def _llsa(run: Run) -> bool:
    return bool(run.report["settings"]["method"] == "llsa")


def _swept(run: Run) -> float:
    """Return where a run stands in a sweep: its top k, or its sparsity in per cent."""
    settings = run.report["settings"]
    return settings["attention"]["topk"] if _llsa(run) else 100 * settings["sparsity"]


def _share(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f}"


def _times(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int) -> str:
    """Return a table whose first column are row headings and whose next `numbers` columns are aligned as numbers."""
    head = "".join(f'<th scope="col"{_kind(place, numbers)}>{escape(text)}</th>' for place, text in enumerate(headings))
    body = ""
    for row in rows:
        first = f'<th scope="row">{escape(row[0])}</th>'
        rest = "".join(
            f"<td{_kind(place, numbers, text)}>{escape(text)}</td>" for place, text in enumerate(row[1:], start=1)
        )
        body += f"<tr>{first}{rest}</tr>"
    return (
        f'<div class="ds-wide" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}">'
        f'<table class="ds-table"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _kind(place: int, numbers: int, text: str = "") -> str:
    if text.startswith("not computed"):
        return ' class="ds-missing"'
    if 1 <= place <= numbers:
        return ' class="ds-number"'
    return ' class="ds-short"' if len(text) < 10 else ""
