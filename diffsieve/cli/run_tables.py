"""What `generate` and `compare` print for people: a table, notes, and where the files lie."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NARROWEST = 120  # in a file; a narrower terminal shortens the prompts


def format_comparison(report: Mapping[str, Any], out: Path) -> str:
    """Lay out the report of `compare`: a line for each pair, mean and deviation, notes, files."""
    table = _table(report, "prompt")
    for heading in (
        "seed",
        "PSNR\ndB",
        "SSIM",
        "LPIPS",
        "density\nall/sparse",
        "steps\ndense",
        "seconds\ndense/sparse",
        "speed-up\nclip/step",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for clip in report["clips"]:
        sparsity, seconds, speed_up = clip["sparsity"], clip["seconds"], clip["speed_up"]
        table.add_row(
            _flexible(clip["prompt"]),
            str(clip["seed"]),
            _number(clip["metrics"]["psnr"]["mean"], 2),
            _number(clip["metrics"]["ssim"]["mean"], 4),
            _number(clip["metrics"]["lpips[alex]"]["mean"], 4),
            _pair(sparsity["density_overall"], sparsity["density_sparse_steps"], 3),
            f"{sparsity['steps_dense']}/{sparsity['steps_total']}",
            _pair(seconds["dense"]["total"], seconds["sparse"]["total"], 1),
            _pair(speed_up["total"], speed_up["sparse_step"], 2, "x"),
        )
    if len(report["clips"]) > 1:
        table.add_section()
        _add_statistics(table, report["summary"])
    lines = [render(table)]
    floor = report["floor"]
    if floor:
        figures = f"PSNR {_number(floor['psnr']['mean'], 2)} dB, SSIM {_number(floor['ssim']['mean'], 4)}"
        lines.append(f"noise floor (dense with another kernel, mean of {floor['psnr']['n']}): {figures}")
    lines += [f"note: {note}" for note in report["notes"]]
    missing = {clip["metrics"]["lpips[alex]"]["reason"] for clip in report["clips"]} - {None}
    lines += [f"LPIPS not computed: {reason}" for reason in sorted(missing)]
    backends = sorted({clip["sparsity"]["backend"] or "none" for clip in report["clips"]})
    place = report["environment"]
    lines.append(
        f"backend {', '.join(backends)}; {place['device_name']}, {place['dtype']}, {place['threads']} CPU threads; "
        f"torch {place['versions']['torch']}, diffusers {place['versions']['diffusers']}"
    )
    lines += ["", f"written to {out}:"]
    for clip in report["clips"]:
        lines += [f"  {clip['folder']}/{name}" for name in clip["files"].values()]
    lines += ["  report.html", "  report.json"]
    return "\n".join(lines)


def format_evaluation(report: Mapping[str, Any], out: Path) -> str:
    """Lay out the report of `eval`: a column for each run and the noise floor, notes, files."""
    from ..compare.evaluate_table import summary_table

    rows = summary_table(report)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Turned: metrics are many, runs are few.
    for number, row in enumerate([rows.headings, *rows.rows]):
        table.add_column(Text(row[0]), justify="right" if number else "left", overflow="fold")
    for cells in list(zip(rows.headings, *rows.rows, strict=True))[1:]:
        table.add_row(*(Text(cell) for cell in cells))  # as they are: "lpips[alex]" is no markup
    lines = [render(table), *(f"note: {note}" for note in report["notes"])]
    return "\n".join([*lines, "", f"written to {out}: report.json, metrics.csv, report.html"])


def format_generation(report: Mapping[str, Any], out: Path) -> str:
    """Lay out the report of `generate`: a line for each clip, and where it lies."""
    table = _table(report, "file")
    pictures = "own_attention" in report["settings"]
    for heading in ("seed", "seconds") if pictures else ("seed", "density", "steps\ndense", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for clip in report["clips"]:
        if pictures:
            table.add_row(_flexible(clip["file"]), str(clip["seed"]), _number(clip["seconds"]["total"], 1))
            continue
        sparsity = clip["sparsity"] or {"density_overall": 1.0, "steps_dense": "all", "steps_total": "all"}
        steps = f"{sparsity['steps_dense']}/{sparsity['steps_total']}" if clip["sparsity"] else "all"
        density = _number(sparsity["density_overall"], 3)
        table.add_row(_flexible(clip["file"]), str(clip["seed"]), density, steps, _number(clip["seconds"]["total"], 1))
    return "\n".join([render(table), "", f"written to {out}, with report.json"])


def _title(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    attention = settings["attention"]
    how = settings.get("own_attention", "dense")
    if attention is not None:
        if "topk" in attention:
            how = f"{settings['method']}, top {attention['topk']}, blocks of {attention['block_size']}"
        else:
            how = f"{settings['method']}, preset {attention['preset']}, sparsity {settings['sparsity']:g}"
    frames = "" if settings["fps"] is None else f"{settings['frames']} frames "
    size = f"{frames}{settings['width']} x {settings['height']}"
    return f"{settings['model']} · {how} · {size} · {settings['steps']} steps"


def _table(report: Mapping[str, Any], first: str) -> Table:
    table = Table(title=_title(report), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, min_width=8)  # the one column that may shrink
    return table


def _flexible(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _add_statistics(table: Table, summary: Mapping[str, Any]) -> None:
    count = summary["psnr"]["n"]
    for name, key in ((f"mean ({count})", "mean"), ("deviation", "std")):
        value = {figure: statistics[key] for figure, statistics in summary.items()}
        table.add_row(
            name,
            "",
            _number(value["psnr"], 2),
            _number(value["ssim"], 4),
            _number(value["lpips[alex]"], 4),
            _pair(value["density_overall"], value["density_sparse_steps"], 3),
            "",
            _pair(value["seconds_dense"], value["seconds_sparse"], 1),
            _pair(value["speed_up"], value["speed_up_sparse_step"], 2, "x"),
            style="bold" if key == "mean" else None,
        )


def _pair(first: float | None, second: float | None, digits: int, unit: str = "") -> str:
    return f"{_number(first, digits, unit)}/{_number(second, digits, unit)}"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def render(table: Table, narrowest: int = _NARROWEST) -> str:
    """Draw a table for a terminal, or `narrowest` characters wide or more for a file."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, narrowest)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
