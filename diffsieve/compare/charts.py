"""Line charts as SVG for a page: no script, no font, nothing from outside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 30, 42
_COLOURS = ("#2f6fb0", "#c2571a", "#3a8c4d", "#8a4fa3", "#a8862a", "#37848c")  # readable on white and on near-black


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Args:
        label: for the legend.
        points: (x, y); a `y` that is `None` or not finite leaves a gap.
    """

    label: str
    points: Sequence[tuple[float, float | None]]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    levels: Sequence[tuple[str, float]] = (),
    marks: bool = False,
) -> str:
    """Draw lines over common axes.

    Args:
        title: above the chart.
        series: lines; the legend is left out for a single one.
        x_label: below.
        y_label: before the scale.
        levels: dashed horizontal lines with their labels, such as a noise floor; one that would flatten the lines
            stands in the title instead.
        marks: whether every point gets a dot with its values as a tooltip.

    Returns:
        An `<svg>` element, or an empty text when there is nothing to draw.
    """
    shown = [(x, float(y)) for line in series for x, y in line.points if y is not None and math.isfinite(y)]
    if not shown:
        return ""
    far = [level for level in levels if _far(level[1], [y for _, y in shown])]
    levels = [level for level in levels if level not in far]
    title += "".join(f" ({label} {value:.4g})" for label, value in far)
    xs = [x for x, _ in shown]
    ys = [y for _, y in shown] + [y for _, y in levels]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    x_ends = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    y_ends = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ends[0]) / (x_ends[1] - x_ends[0]) * (_WIDTH - _LEFT - _RIGHT)
        up = (y - y_ends[0]) / (y_ends[1] - y_ends[0]) * (_HEIGHT - _TOP - _BOTTOM)
        return round(_LEFT + across, 1), round(_HEIGHT - _BOTTOM - up, 1)

    legend = 18 * len(series) if len(series) > 1 else 0
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + legend}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text x="{_LEFT}" y="16" class="head">{escape(title)}</text>')
    for value in y_ticks:
        _, y = at(x_ends[0], value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        if x_ends[0] <= value <= x_ends[1]:
            x, _ = at(value, y_ends[0])
            parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    half = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f'transform="rotate(-90 12 {half})"'
    parts.append(f'<text x="12" y="{half}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    for label, value in levels:
        _, y = at(x_ends[0], value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="level"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{y - 4}" text-anchor="end">{escape(label)}</text>')
    for number, line in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        for run in _runs(line):
            path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in run))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
            for point in run if marks or len(run) == 1 else ():
                x, y = at(*point)
                tip = f"{line.label}: {point[0]:g}, {point[1]:.4g}"
                parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"><title>{escape(tip)}</title></circle>')
        if legend:
            y = _HEIGHT + 18 * number + 8
            parts.append(f'<rect x="{_LEFT}" y="{y - 8}" width="14" height="4" fill="{colour}"/>')
            parts.append(f'<text x="{_LEFT + 22}" y="{y}">{escape(line.label)}</text>')
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """Return three to seven round values that enclose a range."""
    if low == high:
        margin = abs(low) * 0.05 or 0.5
        low, high = low - margin, high + margin
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _far(level: float, values: Sequence[float]) -> bool:
    low, high = min(values), max(values)
    return max(level - high, low - level) > 2 * (high - low) > 0


def _runs(line: Series) -> Iterator[list[tuple[float, float]]]:
    """Split a line at its gaps."""
    run: list[tuple[float, float]] = []
    for x, y in line.points:
        if y is not None and math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run
