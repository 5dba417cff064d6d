"""One HTML file that holds everything it shows: tables, charts, pictures and clips."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from .charts import Series, line_chart
from .files import atomic_path

_TYPES = {".mp4": "video/mp4", ".png": "image/png", ".webp": "image/webp"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2026; --paper: #fff; --faint: #6a727c; --rule: #d4d9df; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --paper: #14171c; --faint: #98a1ab; --rule: #363d46; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 68rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; border-top: 1px solid var(--rule);
  padding-top: 1rem; }
.faint, figcaption { color: var(--faint); font-size: .88rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { text-align: right; padding: .3rem .8rem; border-bottom: 1px solid var(--rule); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1rem; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); } svg .head { font-size: 13px; fill: var(--ink); }
svg .grid { stroke: var(--rule); } svg .level { stroke: var(--faint); stroke-dasharray: 5 4; }
figure { margin: 1rem 0; } video, img { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; the first column is the widest."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class PageClip:
    """What a page shows of one clip.

    Args:
        title: heading.
        text: a line below it.
        media: captions and files, .mp4 or .png, which become part of the page.
        charts: SVG elements.
    """

    title: str
    text: str
    media: Sequence[tuple[str, Path]]
    charts: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A report to read.

    Args:
        title: heading.
        facts: short lines: how it was made, versions.
        table: the figures.
        notes: what a reader must know.
        charts: SVG elements over all clips.
        clips: one section each.
    """

    title: str
    facts: Sequence[str]
    table: Table
    notes: Sequence[str] = ()
    charts: Sequence[str] = ()
    clips: Sequence[PageClip] = ()


def write_page(target: Path, page: Page) -> None:
    """Write the page; it needs no other file and asks for nothing from a network."""
    with atomic_path(target) as part:
        part.write_text(render_page(page), encoding="utf-8")


def render_page(page: Page) -> str:
    """Return the page as HTML."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # A second lock beside having no references: a browser would refuse them.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; media-src data:; '
        "style-src 'unsafe-inline'\">",
        f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(page.title)}</h1>",
        *(f'<p class="faint">{escape(line)}</p>' for line in page.facts),
        _table(page.table),
        *(f"<p>Note: {escape(note)}</p>" for note in page.notes),
        _charts(page.charts),
    ]
    for clip in page.clips:
        parts += [f"<section><h2>{escape(clip.title)}</h2>", f'<p class="faint">{escape(clip.text)}</p>']
        parts += [_figure(caption, path) for caption, path in clip.media]
        parts += [_charts(clip.charts), "</section>"]
    return "\n".join([*parts, "</body></html>\n"])


def frame_charts(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Draw the values over the frames of one clip, a chart for each metric.

    Args:
        metrics: by run, what `MetricResult.to_dict` gave by metric.
    """
    names = list(dict.fromkeys(name for results in metrics.values() for name in results))
    charts = []
    for name in names:
        if name == "psnr_from_mean_mse":  # the same values per frame as psnr
            continue
        results = {label: found[name] for label, found in metrics.items() if name in found}
        if max(len(result["per_frame"]) for result in results.values()) < 2:  # a picture
            continue
        series = [Series(label, list(enumerate(result["per_frame"]))) for label, result in results.items()]
        unit = next(iter(results.values()))["unit"]
        title = f"{metric_title(name)} over frames"
        charts.append(line_chart(title, series, x_label="frame", y_label=unit or metric_title(name)))
    return [chart for chart in charts if chart]


def metric_title(name: str) -> str:
    """Return how people write a metric's name."""
    titles = {"psnr": "PSNR", "ssim": "SSIM", "ms_ssim": "MS-SSIM", "psnr_from_mean_mse": "PSNR of mean MSE"}
    return titles.get(name) or name.replace("lpips", "LPIPS").replace("_", " ")


def metric_text(name: str, value: float | None) -> str:
    """Return a value with the digits that mean something: two for dB, four else."""
    return "-" if value is None else f"{value:.{2 if 'psnr' in name else 4}f}"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in table.headings)
    rows = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _charts(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""


def _figure(caption: str, path: Path) -> str:
    kind = _TYPES[path.suffix]
    data = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    if kind.startswith("video/"):
        shown = f'<video controls loop muted playsinline src="{data}"></video>'
    else:
        shown = f'<img alt="{escape(caption)}" src="{data}">'
    return f"<figure>{shown}<figcaption>{escape(caption)}</figcaption></figure>"
