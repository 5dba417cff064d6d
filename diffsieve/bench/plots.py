"""The plots of each operation, from its results: what was measured is marked, nothing is drawn that was not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..compare.files import atomic_path
from .config import percent
from .drawing import Axis, Line, bar_plot, line_plot

Rows = Sequence[Mapping[str, Any]]

# Text of a PNG that says which rows it shows.
SOURCE = "diffsieve rows"


def draw_plots(results: Mapping[str, Any], folder: Path, prefix: str = "") -> list[Path]:
    """Draw the plots of one result file.

    Args:
        results: of `results.read_results`.
        folder: where the PNG files go.
        prefix: before their names.

    Returns:
        The files written: those for which there are rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, image in _plots(results).items():
        path = folder / f"{prefix}{results['operation']}-{name}.png"
        info = PngInfo()
        info.add_text(SOURCE, rows_digest(results))
        with atomic_path(path) as part:
            image.save(part, format="PNG", pnginfo=info, optimize=True)
        written.append(path)
    return written


def rows_digest(results: Mapping[str, Any]) -> str:
    """SHA-256 of the rows of a result, by which a plot tells whether it is of these."""
    return hashlib.sha256(json.dumps(results["rows"], sort_keys=True).encode()).hexdigest()


def best_ms(row: Mapping[str, Any]) -> float:
    """The time that plots show: that of the CUDA graph, without the host, else the eager one."""
    return float(row.get("graph_ms") or row["ms"])


def _plots(results: Mapping[str, Any]) -> dict[str, Image.Image]:
    rows = sorted((row for row in results["rows"] if row["ok"]), key=lambda row: row["tokens"])
    draw: Callable[[Rows, str], dict[str, Image.Image]] = _DRAWERS[results["operation"]]
    dtype = results["settings"]["dtype"]
    return draw(rows, f"{results['device']}, {dtype}, torch {results['versions']['torch']}") if rows else {}


def _tokens_axis(rows: Rows) -> Axis:
    return Axis("tokens", ticks=_spread(sorted({row["tokens"] for row in rows})), text=lambda value: f"{value:,.0f}")


def _spread(values: Sequence[float]) -> list[float]:
    """Values that are far enough apart for their labels, the last among them."""
    kept: list[float] = []
    for value in reversed(values):
        if not kept or kept[-1] / value > 1.6:
            kept.append(value)
    return kept[::-1]


def _over_tokens(rows: Rows, label: Callable[[Mapping[str, Any]], str]) -> list[Line]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(label(row), []).append((row["tokens"], best_ms(row)))
    return [Line(name, sorted(points)) for name, points in found.items()]


def _main(rows: Rows) -> list[Mapping[str, Any]]:
    """Rows of ours, and of what speed-ups are over: the others are in the table."""
    baselines = {name for row in rows for name in row.get("speedup", {})}
    return [row for row in rows if not row.get("peer") or row["method"] in baselines]


def _sparse_name(row: Mapping[str, Any]) -> str:
    method: str = row["method"]
    return method if row["sparsity"] is None else f"{method}, {percent(row['sparsity'])} skipped"


def _speedups(rows: Rows, label: Callable[[Mapping[str, Any]], str]) -> tuple[list[Line], str]:
    """Lines of the speed-up against the sparsity, with the limit of equal work per block; the baseline."""
    sparse = [row for row in rows if row["sparsity"] and row.get("speedup")]
    if not sparse:
        return [], ""
    baseline = next(iter(sparse[0]["speedup"]))
    found: dict[str, list[tuple[float, float]]] = {}
    for row in sparse:
        if baseline in row["speedup"]:
            found.setdefault(label(row), []).append((100 * row["sparsity"], row["speedup"][baseline]))
    shares = sorted({row["sparsity"] for row in sparse})
    limit = Line("1 / (1 - sparsity)", [(100 * share, 1 / (1 - share)) for share in shares], dashed=True)
    return [*(Line(name, sorted(points)) for name, points in found.items()), limit], baseline


def _speedup_plot(title: str, where: str, rows: Rows, label: Callable[[Mapping[str, Any]], str]) -> Image.Image | None:
    lines, baseline = _speedups(rows, label)
    if not lines:
        return None
    x = Axis("block pairs skipped, %", log=False, ticks=sorted({p[0] for line in lines for p in line.points}))
    y = Axis(f"speed-up over {baseline}", text=lambda value: f"{value:g}x")
    return line_plot(title, where, lines, x, y)


def _time(title: str, where: str, lines: Sequence[Line], rows: Rows) -> Image.Image | None:
    return line_plot(title, where, lines, _tokens_axis(rows), Axis("ms")) if lines else None


def _keep(images: Mapping[str, Image.Image | None]) -> dict[str, Image.Image]:
    return {name: image for name, image in images.items() if image is not None}


def _of_block_sparse(rows: Rows, where: str) -> dict[str, Image.Image]:
    shown = [row for row in _main(rows) if row["sparsity"] in (None, 0.5, 0.75, 0.9)]
    longest = max((row["tokens"] for row in rows if row.get("speedup") and row["sparsity"]), default=0)
    at_longest = [row for row in rows if row["tokens"] == longest]
    title = f"Attention kernel at {longest:,} tokens, random blocks kept"
    return _keep(
        {
            "time": _time("Attention kernel, random blocks kept", where, _over_tokens(shown, _sparse_name), shown),
            "speedup": _speedup_plot(title, where, at_longest, lambda row: row["method"]),
        }
    )


def _of_ba_att(rows: Rows, where: str) -> dict[str, Image.Image]:
    shown = [row for row in _main(rows) if row["method"] == "default" or row["sparsity"] is None]
    own = [row for row in rows if row["method"] == "default"]
    staged = [row for row in own if row.get("stages_ms")]
    least = min((row["sparsity"] for row in staged), default=None)
    bars = {f"{row['tokens']:,} tokens": row["stages_ms"] for row in staged if row["sparsity"] == least}
    title = f"Stages of the BA-Att call, {percent(least)} of the block pairs skipped" if least is not None else ""
    return _keep(
        {
            "time": _time("Whole BA-Att call, preset default", where, _over_tokens(shown, _sparse_name), shown),
            "speedup": _speedup_plot(
                "Whole BA-Att call, preset default", where, own, lambda row: f"{row['tokens']:,} tokens"
            ),
            "stages": bar_plot(title, where, bars, "ms") if bars else None,
        }
    )


def _of_llsa(rows: Rows, where: str) -> dict[str, Image.Image]:
    def label(row: Mapping[str, Any]) -> str:
        if row["method"] != "LLSA":
            return str(row["method"])
        return f"LLSA, {row['levels']} level{'s' * (row['levels'] > 1)}"

    def side(tokens: float) -> str:
        root = round(tokens**0.5)
        return f"{root}x{root}" if root * root == tokens else f"{tokens:,.0f}"

    images = {}
    for direction, name in (("forward", "forward"), ("forward and backward", "backward")):
        shown = [row for row in rows if row["direction"] == direction]
        # A dense call is the same in problems of different levels.
        once = {(label(row), row["tokens"]): row for row in shown}
        lines = sorted(_over_tokens(list(once.values()), label), key=lambda line: not line.label.startswith("LLSA"))
        if lines:
            x = Axis("tokens", ticks=_spread(sorted({row["tokens"] for row in shown})), text=side)
            images[name] = line_plot(f"LLSA, {direction}", where, lines, x, Axis("ms"))
    return images


def _of_wan(rows: Rows, where: str) -> dict[str, Image.Image]:
    def label(row: Mapping[str, Any]) -> str:
        return f"{row['model']}, {row['tokens']:,}"

    return _keep({"speedup": _speedup_plot("One forward of the transformer, BA-Att", where, rows, label)})


_DRAWERS: dict[str, Callable[[Rows, str], dict[str, Image.Image]]] = {
    "block-sparse": _of_block_sparse, "ba-att": _of_ba_att, "llsa": _of_llsa, "wan": _of_wan,
}  # fmt: skip
