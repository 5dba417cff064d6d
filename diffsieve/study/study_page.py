"""The page of a study: its tables as one, and quality and recall over sparsity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compare.charts import Series, line_chart
from ..compare.page import Page, Table, metric_text, metric_title

# A chart holds six lines; these tell the story.
_DRAWN = ("default", "paper", "mean pooling", "hindsight", "oracle", "random")
_FLOOR = "noise floor"


def study_page(report: Mapping[str, Any]) -> Page:
    """Lay out a study; `report` is what study.json holds."""
    clips, recall = report["clips"], report["recall"]
    facts, notes = [report["created"]], []
    if clips:
        settings = clips["settings"]
        place = settings["environment"]
        facts.append(
            f"{settings['model']}: {len(clips['clips'])} clips ({len(clips['prompts'])} prompts), {settings['frames']} "
            f"frames of {settings['width']} x {settings['height']}, {settings['tokens']:,} tokens, {settings['steps']} "
            f"steps, warm-up {settings['warmup']}, blocks of {settings['block_size']}"
        )
        facts.append(f"{place['device_name']}, {settings['dtype']}; torch {place['versions']['torch']}")
        facts.append("means and sample deviations over clips; over another variant: of the differences clip by clip")
        notes += [f"{metric_title(name)} not computed: {'; '.join(why)}" for name, why in clips["reasons"].items()]
        notes += _unfinished(clips)
        notes += [
            f"{row['variant']}, {_percent(row['sparsity'])}: skipped, {'; '.join(row['skipped'])}"
            for row in clips["rows"]
            if row["skipped"]
        ]
    if recall:
        facts.append(
            f"recall on {recall['calls']} captured calls, layers {', '.join(recall['layers'])}, "
            f"steps {', '.join(map(str, recall['steps']))}"
        )
        notes += [_bound_note(order, figures) for order, figures in recall["bound"].items()]
        base = [row for row in recall["rows"] if row["variant"] == "base"]
        notes += [_calibration_note(row) for row in base if "predicted" in row]
    return Page("Which blocks to keep: a study", facts, study_table(report), notes, _charts(report))


def _unfinished(clips: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know of clips that are not there; nothing where all are."""
    if clips["complete"]:
        return []
    if clips["complete"] is None:
        return ["whether clips are missing is not known: the folder does not hold what was asked for"]
    missing = "unfinished" if clips["missing"] is None else f"unfinished, {clips['missing']:,} clips are missing"
    in_all = max((row["in_all_rows"]["clips"] for row in clips["rows"] if row["clips"]), default=0)
    if in_all == len(clips["clips"]):
        return [f"{missing}: the rows that are there are over the same clips"]
    charts = (
        f"the charts are over the {in_all} that all rows have"
        if in_all
        else "no clip has all rows yet, so there are no charts of them"
    )
    return [
        f"{missing}: the rows of a sparsity are over the clips that all of its variants have, or each over its own "
        f"where there are none; rows of different sparsities are over different clips; {charts}"
    ]


def study_table(report: Mapping[str, Any]) -> Table:
    """Return a row for each variant and sparsity: means over clips, and recall where it was measured."""
    clips = (report["clips"] or {}).get("rows", [])
    recall = {(row["variant"], row["sparsity"]): row for row in (report["recall"] or {}).get("rows", [])}
    names = [
        name
        for name in dict.fromkeys(name for row in clips for name in row.get("metrics", {}))
        if name != "psnr_from_mean_mse"
    ]
    headings = ["variant", "sparsity", *(["clips"] if clips else [])]
    headings += [metric_title(name) + (", dB" if name == "psnr" else "") for name in names]
    headings += ["over paper, dB", "over default, dB", "density, all", "sparse steps"] if clips else []
    headings += ["recall", "output error"] if recall else []
    rows = []
    seen = {(row["variant"], row["sparsity"]) for row in clips}
    rest = [{"variant": pair[0], "sparsity": pair[1]} for pair in recall if pair not in seen]
    for row in [*clips, *rest]:
        cells = [row["variant"], _percent(row["sparsity"])]
        if clips:
            cells.append(str(row.get("clips", "-")))
        for name in names:
            cells.append(_with_deviation(name, row.get("metrics", {}).get(name)))
        if clips:
            for key in ("over_paper", "over_default"):
                cells.append(_with_deviation("psnr", (row.get(key) or {}).get("psnr")))
            cells += [_share(row.get("density_overall")), _share(row.get("density_sparse_steps"))]
        if recall:
            found = recall.get((row["variant"], row["sparsity"]), {})
            cells += [_share(found.get(key, {}).get("mean")) for key in ("recall", "error")]
        rows.append(cells)
    return Table(headings, rows)


def _charts(report: Mapping[str, Any]) -> list[str]:
    charts = []
    clips = (report["clips"] or {}).get("rows", [])
    for name in ("psnr", "ssim", "ms_ssim", "lpips[alex]"):
        # Over the same clips at all sparsities: in an unfinished study the table's rows are not.
        series = _series(clips, lambda row, name=name: _in_all_rows(row, name))
        floor = [_in_all_rows(row, name) for row in clips if row["variant"] == _FLOOR]
        levels = [(_FLOOR, value) for value in floor if value is not None]
        charts.append(
            line_chart(
                f"{metric_title(name)} against sparsity",
                series,
                x_label="sparsity of the sparse steps",
                y_label=metric_title(name),
                levels=levels,
                marks=True,
            )
        )
    series = _series((report["recall"] or {}).get("rows", []), lambda row: row.get("recall", {}).get("mean"))
    charts.append(
        line_chart("Recall against sparsity", series, x_label="sparsity", y_label="attention mass kept", marks=True)
    )
    return [chart for chart in charts if chart]


def _series(rows: Sequence[Mapping[str, Any]], value: Any) -> list[Series]:
    found = []
    for name in _DRAWN:
        points = [(row["sparsity"], value(row)) for row in rows if row["variant"] == name]
        if points:
            found.append(Series(name, sorted(points)))
    return found


def _in_all_rows(row: Mapping[str, Any], name: str) -> float | None:
    return row["in_all_rows"]["metrics"].get(name) if row["clips"] else None


def _bound_note(order: str, figures: Mapping[str, Any]) -> str:
    r = figures["r"]["mean"]
    return (
        f"the paper's bound U against the largest deviation, order {order}: r {'-' if r is None else f'{r:.3f}'} on "
        f"average over heads; mean bound {figures['bound']:.3g}, mean deviation {figures['deviation']:.3g}"
    )


def _calibration_note(row: Mapping[str, Any]) -> str:
    figures = [
        f"{name} {found['predicted']:.3f} predicted in the last dense step, {found['got']:.3f} got in later ones, "
        f"{found['absolute_difference']:.3f} apart on average over heads"
        for name, found in row["predicted"].items()
    ]
    return f"self-calibration of {row['variant']} at {100 * row['sparsity']:.4g} %: {'; '.join(figures)}"


def _with_deviation(name: str, figures: Mapping[str, Any] | None) -> str:
    if figures is None or figures["mean"] is None:
        return "-"
    text = metric_text(name, figures["mean"])
    return text if figures["std"] is None else f"{text} ± {metric_text(name, figures['std'])}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.4g} %"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
