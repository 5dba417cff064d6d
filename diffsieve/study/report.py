"""The report of a study, from the lines that are there: study.json, and study.html to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import product
from pathlib import Path
from typing import Any

from ..compare.claim import read_settings
from ..compare.files import write_json
from ..compare.lines import read_lines
from ..compare.page import write_page
from ..compare.report import now
from ..errors import UserInputError
from ..eval import summarize
from .recall_table import summarize_recall
from .study_page import study_page
from .variants import FLOOR, VARIANTS

CLIPS, RECALL = "clips", "recall"
CLIPS_SETTINGS, RECALL_SETTINGS = "clips.settings.json", "recall.settings.json"
CLIPS_ASKED = "clips.asked.json"
CLIPS_SCHEMA, RECALL_SCHEMA = "diffsieve.study.clips/1", "diffsieve.study.recall/1"
ASKED_SCHEMA = "diffsieve.study.asked/1"
STUDY_SCHEMA = "diffsieve.study/1"
REPORT, PAGE = "study.json", "study.html"
_BASELINES = {"over_paper": "paper", "over_default": "default", "over_base": "base"}

Asked = tuple[str, int, str, float | None]
"""Prompt, seed, variant and sparsity of one clip."""


def write_report(out: Path, *, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Summarise the lines of a study and write study.json and study.html; of an unfinished one, what is there.

    Args:
        out: folder of the study.
        command: the words of the command line that made it.

    Returns:
        What study.json holds.

    Raises:
        UserInputError: there are no lines.
    """
    report: dict[str, Any] = {
        "schema": STUDY_SCHEMA,
        "created": now(),
        "command": None if command is None else list(command),
        "clips": None,
        "recall": None,
    }
    clips, recall = read_lines(out, CLIPS), read_lines(out, RECALL)
    if not clips and not recall:
        raise UserInputError(f"{out} must hold results of a study, got none")
    if clips:
        settings = read_settings(out / CLIPS_SETTINGS, CLIPS_SCHEMA)
        report["clips"] = {"settings": settings} | summarize_clips(clips, _asked(out / CLIPS_ASKED))
    if recall:
        report["recall"] = {"settings": read_settings(out / RECALL_SETTINGS, RECALL_SCHEMA)} | summarize_recall(recall)
    write_page(out / PAGE, study_page(report))
    write_json(out / REPORT, report)
    return report


def summarize_clips(lines: Sequence[Mapping[str, Any]], asked: Set[Asked] | None = None) -> dict[str, Any]:
    """Return a row for each variant and sparsity: statistics over clips, and the gains over `paper`, `default`, `base`.

    Rows of one sparsity are over the same clips, those that all of them have, so that they can be compared when the
    study is unfinished; where there is no such clip, each is over its own. `in_all_rows` holds the means over the clips
    that the rows of all sparsities have, to compare sparsities by. Gains are taken clip by clip, so that their
    deviation is that of the differences.

    `missing` counts the clips that are asked for and have no line, and is `None` where that is not known. `complete`
    says that none is missing and all rows are over the same clips; it is `None` where only the latter is known.

    Args:
        lines: of measured and skipped clips.
        asked: the clips of the whole study.
    """
    by_row: dict[tuple[str, float | None], dict[tuple[str, int], Mapping[str, Any]]] = {}
    for line in lines:  # of two lines for one clip the later one counts
        by_row.setdefault((line["variant"], line["sparsity"]), {})[line["prompt"], line["seed"]] = line
    clips = sorted({clip for row in by_row.values() for clip in row})
    shared = {
        sparsity: set.intersection(*(set(row) for (_, other), row in by_row.items() if other == sparsity))
        for _, sparsity in by_row
    }
    in_all = set.intersection(*shared.values())
    made = {(*clip, *row) for row, found in by_row.items() for clip in found}
    missing = None if asked is None else len(asked - made)
    same_clips = len({frozenset(found) for found in by_row.values()}) == 1
    complete = None if same_clips and missing is None else same_clips and not missing
    rows = []
    for variant, sparsity in sorted(by_row, key=_place):
        found = by_row[variant, sparsity]
        if common := shared[sparsity]:
            found = {clip: line for clip, line in found.items() if clip in common}
        baselines = {key: by_row.get((name, sparsity), {}) for key, name in _BASELINES.items() if name != variant}
        rows.append({"variant": variant, "sparsity": sparsity} | _row(variant, found, baselines, in_all))
    return {
        "prompts": sorted({prompt for prompt, _ in clips}),
        "seeds": sorted({seed for _, seed in clips}),
        "clips": [list(clip) for clip in clips],
        "complete": complete,
        "missing": missing,
        "rows": rows,
        "reasons": _reasons(lines),
    }


def _asked(path: Path) -> set[Asked] | None:
    """Return the clips that the last call of a study was to make, `None` where it did not say."""
    if not path.exists():
        return None
    asked = read_settings(path, ASKED_SCHEMA)
    items = product(asked["prompts"], asked["seeds"], asked["rows"])
    return {(prompt, seed, variant, sparsity) for prompt, seed, (variant, sparsity) in items}


def _row(
    variant: str,
    found: Mapping[tuple[str, int], Mapping[str, Any]],
    baselines: Mapping[str, Mapping[tuple[str, int], Mapping[str, Any]]],
    in_all: Set[tuple[str, int]],
) -> dict[str, Any]:
    about = "dense, another attention kernel" if variant == FLOOR else VARIANTS[variant].about
    run = {clip: line for clip, line in sorted(found.items()) if "skipped" not in line}
    skipped = sorted({line["skipped"] for line in found.values() if "skipped" in line})
    if not run:
        return {"about": about, "clips": 0, "skipped": skipped}
    names = list(dict.fromkeys(name for line in run.values() for name in line["metrics"]))

    def statistics(values: Sequence[float | None]) -> dict[str, Any]:
        return summarize(values).to_dict()

    def gain(name: str, baseline: Mapping[tuple[str, int], Mapping[str, Any]]) -> dict[str, Any]:
        pairs = [(line, baseline[clip]) for clip, line in run.items() if "metrics" in baseline.get(clip, {})]
        values = [(line["metrics"][name], other["metrics"].get(name)) for line, other in pairs]
        return statistics([None if a is None or b is None else a - b for a, b in values])

    gains = {
        key: {name: gain(name, baseline) for name in names} if (baseline := baselines.get(key)) else None
        for key in _BASELINES
    }
    by_all = [line["metrics"] for clip, line in run.items() if clip in in_all]
    orders: Counter[str] = Counter()
    for line in run.values():
        orders.update(line.get("orders", {}))
    return {
        "about": about,
        "clips": len(run),
        "skipped": skipped,
        "metrics": {name: statistics([line["metrics"].get(name) for line in run.values()]) for name in names},
        "in_all_rows": {
            "clips": len(by_all),
            "metrics": {name: statistics([metrics.get(name) for metrics in by_all])["mean"] for name in names},
        },
        **gains,
        "density_overall": statistics([line.get("density_overall") for line in run.values()])["mean"],
        "density_sparse_steps": statistics([line.get("density_sparse_steps") for line in run.values()])["mean"],
        "kernels": sorted({line["kernel"] or "none" for line in run.values()}),
        "orders": dict(orders.most_common()),
        "seconds": statistics([line["seconds"] for line in run.values()]),
        "psnr_by_clip": [line["metrics"]["psnr"] for line in run.values()],
        "notes": sorted({note for line in run.values() for note in line.get("notes", [])}),
    }


def _reasons(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Why metrics have no value, by metric."""
    found: dict[str, set[str]] = {}
    for line in lines:
        for name, reason in line.get("reasons", {}).items():
            found.setdefault(name, set()).add(reason)
    return {name: sorted(reasons) for name, reasons in found.items()}


def _place(row: tuple[str, float | None]) -> tuple[float, int]:
    variant, sparsity = row
    known = list(VARIANTS)
    return (-1.0 if sparsity is None else sparsity, known.index(variant) if variant in known else -1)
