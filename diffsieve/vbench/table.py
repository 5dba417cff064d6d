"""`diffsieve vbench table`: scores of several folders side by side, with paired metrics and density."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..compare.lines import read_lines
from ..compare.page import Table, metric_text, metric_title
from ..errors import UserInputError
from ..eval import summarize
from .generate import MANIFEST, RUNS, read_generated
from .score import FLICKERING, SCORE_SCHEMA, SCORES
from .suite import DIMENSIONS, SCORED_VIDEOS

TABLE_SCHEMA = "diffsieve.vbench.table/1"
_AGREE = 1e-4  # two decoders may differ by a level here and there


def score_table(folders: Sequence[Path]) -> dict[str, Any]:
    """Merge what `generate_suite` and `score_videos` left.

    No total is formed: VBench's own counts a missing dimension as 0.

    Args:
        folders: of `diffsieve vbench generate`.

    Returns:
        `{"schema", "rows", "notes"}`; a row has folder, run, prompts, videos, scores, paired metrics, density, seconds.

    Raises:
        UserInputError: no such folder.
    """
    rows, notes = [], set()
    for folder in folders:
        settings, suite = read_generated(folder)
        lines = list({(line["prompt"], line["index"]): line for line in read_lines(folder, MANIFEST)}.values())
        for run in RUNS:
            if not (folder / run).is_dir():
                continue
            scores = _scores(folder / SCORES / run)
            rows.append(
                {
                    "folder": str(folder),
                    "run": run,
                    "attention": settings["attention"] if run == "sparse" else None,
                    "prompts": len(suite.prompts),
                    "videos": len(lines),
                    "scores": {name: record["value"] for name, record in scores.items()},
                    "metrics": _metrics(lines) if run == "sparse" else {},
                    "density": _mean(lines, "density_overall") if run == "sparse" else 1.0,
                    "density_sparse_steps": _mean(lines, "density_sparse_steps") if run == "sparse" else None,
                    "seconds": summarize([line["seconds"].get(run) for line in lines]).to_dict(),
                }
            )
            notes |= _notes(scores, settings)
    return {"schema": TABLE_SCHEMA, "rows": rows, "notes": sorted(notes)}


def table_rows(report: dict[str, Any]) -> Table:
    """Lay the report out: a line for each folder and run."""
    names = [name for name in DIMENSIONS if any(name in row["scores"] for row in report["rows"])]
    metrics = list(dict.fromkeys(name for row in report["rows"] for name in row["metrics"]))
    headings = ["folder", "run", "videos", "density", *(metric_title(name) for name in metrics), *names]
    rows = []
    for row in report["rows"]:
        cells = [row["folder"], row["run"], str(row["videos"])]
        cells.append("-" if row["density"] is None else f"{row['density']:.3f}")
        cells += [metric_text(name, row["metrics"].get(name, {}).get("mean")) for name in metrics]
        cells += ["-" if name not in row["scores"] else f"{100 * row['scores'][name]:.2f} %" for name in names]
        rows.append(cells)
    return Table(headings, rows)


def _scores(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name in DIMENSIONS:
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.get("schema") != SCORE_SCHEMA:
            raise UserInputError(f"{path} must be a score of this version, got another file")
        found[name] = record
    return found


def _metrics(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for line in lines for name in line.get("metrics", {}) if name != "psnr_from_mean_mse")
    return {name: summarize([line.get("metrics", {}).get(name) for line in lines]).to_dict() for name in names}


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    return summarize([(line["sparsity"] or {}).get(name) for line in lines]).mean


def _notes(scores: dict[str, dict[str, Any]], settings: dict[str, Any]) -> set[str]:
    notes = set()
    suite = settings["suite"]
    if suite["limit"] is not None:
        notes.add(f"{suite['prompts']} prompts, spread evenly over those of the dimensions: no official list of VBench")
    for name, record in scores.items():
        if record["videos_per_prompt"] < SCORED_VIDEOS:
            notes.add(f"{record['videos_per_prompt']} videos of each prompt, where VBench takes {SCORED_VIDEOS}")
        if record["videos"] < record["expected_videos"]:
            notes.add(f"{name}: VBench found the object in {record['videos']} of {record['expected_videos']} videos")
        if name == FLICKERING:
            notes.add("temporal_flickering without the static filter of VBench; it rewards blur and stillness")
            difference = record["in_process_difference"]
            if difference is not None and difference > _AGREE:
                notes.add(f"temporal_flickering computed in process differs by {difference:.1g} from VBench's")
    return notes
