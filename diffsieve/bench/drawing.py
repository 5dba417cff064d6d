"""Plots as PNG: lines over logarithmic or linear axes, and stacked bars. Drawn with Pillow, the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from PIL import Image, ImageDraw

from ..compare.canvas import FAINT, FRAME, INK, PAPER, draw_text, text_size

Colour = tuple[int, int, int]

# Told apart by lightness too; the first is for what matters most.
COLOURS: tuple[Colour, ...] = (
    (31, 95, 170), (205, 92, 20), (40, 130, 70), (140, 70, 160), (190, 150, 20), (60, 150, 160), (180, 50, 70),
    (110, 110, 110), (20, 40, 90), (240, 150, 90), (110, 60, 30), (225, 110, 170),
)  # fmt: skip
_SCALE = 2  # drawn larger and reduced, which smooths lines
_WIDTH, _HEIGHT = 900, 560
_LEFT, _TOP, _BOTTOM, _LEGEND = 86, 62, 64, 260
_BAR, _BAR_GAP = 34, 18


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Args:
        label: for the legend.
        points: (x, y), ascending in x. Each gets a mark.
        dashed: thin and without marks: a limit, not a measurement.
    """

    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis.

    Args:
        label: what it shows, with the unit.
        log: logarithmic.
        ticks: values with a label; by default round ones.
        text: writes a tick.
    """

    label: str
    log: bool = True
    ticks: Sequence[float] | None = None
    text: Callable[[float], str] = lambda value: f"{value:g}"

    def place(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def marks(self, low: float, high: float) -> list[float]:
        """Ticks within a range."""
        if self.ticks is not None:
            return [tick for tick in self.ticks if low <= tick <= high]
        if not self.log:
            step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if (high - low) / s <= 8)
            first = math.ceil(low / step - 1e-9)
            return [round(number * step, 9) for number in range(first, math.floor(high / step + 1e-9) + 1)]
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        digits = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
        return [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]


def line_plot(title: str, subtitle: str, lines: Sequence[Line], x: Axis, y: Axis) -> Image.Image:
    """Draw lines with a legend at the right.

    Args:
        title: what is shown.
        subtitle: where it was measured.
        lines: at least one with a point.
        x, y: axes.
    """
    xs = [point[0] for line in lines for point in line.points]
    ys = [point[1] for line in lines for point in line.points]
    x_ends, y_ends = _ends(x, xs, 0.03), _ends(y, ys, 0.05)
    image = Image.new("RGB", (_WIDTH * _SCALE, _HEIGHT * _SCALE), PAPER)
    draw = ImageDraw.Draw(image)
    right, bottom = _WIDTH - _LEGEND, _HEIGHT - _BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = (x.place(point[0]) - x_ends[0]) / (x_ends[1] - x_ends[0])
        up = (y.place(point[1]) - y_ends[0]) / (y_ends[1] - y_ends[0])
        return _SCALE * (_LEFT + across * (right - _LEFT)), _SCALE * (bottom - up * (bottom - _TOP))

    _titles(draw, title, subtitle)
    for tick in y.marks(*_values(y, y_ends)):
        _, height = at((xs[0], tick))
        draw.line([(_LEFT * _SCALE, height), (right * _SCALE, height)], fill=FRAME, width=1)
        _text(draw, (_LEFT - 8, height / _SCALE), y.text(tick), 14, FAINT, "rm")
    for tick in x.marks(*_values(x, x_ends)):
        across, _ = at((tick, ys[0]))
        draw.line([(across, bottom * _SCALE), (across, (bottom + 5) * _SCALE)], fill=FAINT, width=_SCALE)
        _text(draw, (across / _SCALE, bottom + 10), x.text(tick), 14, FAINT, "ma")
    draw.rectangle([_LEFT * _SCALE, _TOP * _SCALE, right * _SCALE, bottom * _SCALE], outline=FRAME, width=_SCALE)
    _text(draw, ((_LEFT + right) / 2, _HEIGHT - 24), x.label, 15, INK, "ma")
    _sideways(image, y.label, (14, (_TOP + bottom) / 2))
    for number, line in enumerate(lines):
        colour = FAINT if line.dashed else COLOURS[number % len(COLOURS)]
        places = [at(point) for point in line.points]
        legend = (_SCALE * (right + 16), _SCALE * (_TOP + 10 + 24 * number))
        sample = [legend, (legend[0] + 26 * _SCALE, legend[1])]
        for path in (places, sample):
            if line.dashed:
                _dashes(draw, path)
            else:
                draw.line(path, fill=colour, width=2 * _SCALE, joint="curve")
                _marks(draw, path if path is places else [_middle(path)], colour)
        _text(draw, (right + 50, legend[1] / _SCALE), line.label, 14, INK, "lm")
    return image.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS)


def bar_plot(title: str, subtitle: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> Image.Image:
    """Draw a bar for each row, cut into the shares of its parts, with the total behind it.

    Args:
        title: what is shown.
        subtitle: where it was measured.
        bars: by the label of the row, its parts by name.
        unit: of the parts, for the totals.
    """
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    per_row = 2
    legend_rows = math.ceil(len(names) / per_row)
    height = _TOP + len(bars) * (_BAR + _BAR_GAP) + 34 + 24 * legend_rows
    left = 24 + max(text_size(label, 14)[0] for label in bars)
    right = _WIDTH - 110
    image = Image.new("RGB", (_WIDTH * _SCALE, height * _SCALE), PAPER)
    draw = ImageDraw.Draw(image)
    _titles(draw, title, subtitle)
    for number, (label, parts) in enumerate(bars.items()):
        top = _TOP + number * (_BAR + _BAR_GAP)
        total = sum(parts.values())
        _text(draw, (left - 10, top + _BAR / 2), label, 14, INK, "rm")
        start = 0.0
        for name, value in parts.items():
            share = value / total
            ends = [left + part * (right - left) for part in (start, start + share)]
            colour = COLOURS[names.index(name) % len(COLOURS)]
            draw.rectangle([_SCALE * ends[0], _SCALE * top, _SCALE * ends[1], _SCALE * (top + _BAR)], fill=colour)
            if share >= 0.05:
                _text(draw, (sum(ends) / 2, top + _BAR / 2), f"{share:.0%}", 13, PAPER, "mm")
            start += share
        _text(draw, (right + 10, top + _BAR / 2), f"{total:.3g} {unit}", 14, INK, "lm")
    top = _TOP + len(bars) * (_BAR + _BAR_GAP) + 12
    for number, name in enumerate(names):
        x, y = 24 + (number % per_row) * (_WIDTH // per_row), top + 24 * (number // per_row)
        box = [_SCALE * x, _SCALE * (y - 7), _SCALE * (x + 20), _SCALE * (y + 7)]
        draw.rectangle(box, fill=COLOURS[number % len(COLOURS)])
        _text(draw, (x + 28, y), name, 14, INK, "lm")
    return image.resize((_WIDTH, height), Image.Resampling.LANCZOS)


def _ends(axis: Axis, values: Sequence[float], margin: float) -> tuple[float, float]:
    places = [axis.place(value) for value in values]
    low, high = min(places), max(places)
    room = margin * (high - low) or 0.5
    return low - room, high + room


def _values(axis: Axis, ends: tuple[float, float]) -> tuple[float, float]:
    return (10.0 ** ends[0], 10.0 ** ends[1]) if axis.log else ends


def _titles(draw: ImageDraw.ImageDraw, title: str, subtitle: str) -> None:
    _text(draw, (24, 12), title, 18, INK, "la")
    _text(draw, (24, 36), subtitle, 13, FAINT, "la")


def _text(
    draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, size: int, colour: Colour, anchor: str
) -> None:
    draw_text(draw, (place[0] * _SCALE, place[1] * _SCALE), text, size * _SCALE, colour=colour, anchor=anchor)


def _sideways(image: Image.Image, text: str, centre: tuple[float, float]) -> None:
    width, height = text_size(text, 15 * _SCALE)
    label = Image.new("RGB", (width + 4, height + 4), PAPER)
    draw_text(ImageDraw.Draw(label), (2, 0), text, 15 * _SCALE)
    label = label.rotate(90, expand=True)
    image.paste(label, (round(centre[0] * _SCALE) - 8, round(centre[1] * _SCALE - label.height / 2)))


def _marks(draw: ImageDraw.ImageDraw, places: Sequence[tuple[float, float]], colour: Colour) -> None:
    radius = 4 * _SCALE
    for x, y in places:
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)


def _middle(path: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return (path[0][0] + path[-1][0]) / 2, (path[0][1] + path[-1][1]) / 2


def _dashes(draw: ImageDraw.ImageDraw, path: Sequence[tuple[float, float]]) -> None:
    dash = 8 * _SCALE
    for start, end in pairwise(path):
        length = math.dist(start, end)
        for number in range(0, max(1, int(length // dash)), 2):
            ends = [min(1.0, (number + part) * dash / length) if length else 0.0 for part in (0, 1)]
            points = [tuple(a + part * (b - a) for a, b in zip(start, end, strict=True)) for part in ends]
            draw.line(points, fill=FAINT, width=_SCALE)
