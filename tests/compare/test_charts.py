"""Charts: round ticks, gaps, well-formed SVG."""

import math
from xml.etree import ElementTree

import pytest

from diffsieve.compare.charts import Series, line_chart, ticks
from diffsieve.compare.page import Page, PageClip, Table, render_page


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (27.3, 34.9, [26.0, 28.0, 30.0, 32.0, 34.0, 36.0]),
        (0.9991, 0.9999, [0.999, 0.9992, 0.9994, 0.9996, 0.9998, 1.0]),
        (-3, 2, [-3, -2, -1, 0, 1, 2]),
    ],
    ids=["unit", "decibel", "narrow", "signed"],
)
def test_ticks_are_round_and_enclose_the_range(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 5.0, -1e-9])
def test_ticks_of_a_single_value(value):
    found = ticks(value, value)
    assert found[0] < value < found[-1]


def chart(*lines, **options) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart("a < b", lines, x_label="x & y", y_label="z", **options))


def test_a_chart_is_well_formed_and_breaks_at_gaps():
    drawn = chart(
        Series('"a"', [(0, 1.0), (1, 2.0), (2, None), (3, math.inf), (4, 2.0), (5, 1.0)]), Series("b", [(0, 1.5)])
    )
    assert len(drawn.findall("polyline")) == 3
    assert len(drawn.findall("circle")) == 1  # a line of one point would be invisible
    texts = [text.text for text in drawn.findall("text")]
    assert {"a < b", "x & y", "z", '"a"', "b"} <= set(texts)


def test_points_lie_inside_the_axes_and_levels_widen_them():
    drawn = chart(Series("a", [(0, 1.0), (1, 2.0)]), levels=[("floor", 3.0)], marks=True)
    top, bottom = (float(circle.get("cy")) for circle in reversed(drawn.findall("circle")))
    (level,) = (line for line in drawn.findall("line") if line.get("class") == "level")
    assert 0 < float(level.get("y1")) < top < bottom < 250


def test_nothing_to_draw_is_no_chart():
    assert line_chart("a", [Series("a", [(0, None)])], x_label="x", y_label="y") == ""


def test_a_page_escapes_what_it_is_given():
    evil = '<script>alert("x")</script>'
    page = render_page(Page(evil, [evil], Table([evil], [[evil]]), [evil], clips=[PageClip(evil, evil, [])]))
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 8  # the title stands twice


def test_a_level_far_off_stands_in_the_title_and_leaves_the_scale_alone():
    series = [Series("a", [(0.0, 20.0), (1.0, 30.0)])]
    near = line_chart("PSNR", series, x_label="x", y_label="y", levels=[("floor", 45.0)])
    far = line_chart("PSNR", series, x_label="x", y_label="y", levels=[("floor", 100.0)])
    assert 'class="level"' in near
    assert "(floor" not in near
    assert 'class="level"' not in far
    assert "PSNR (floor 100)" in far
