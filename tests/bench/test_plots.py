"""Plots: drawn from the committed results, up to date, nothing invented."""

import json
from pathlib import Path

import pytest
from PIL import Image

from diffsieve.bench import plots
from diffsieve.bench.config import parse_grid, percent
from diffsieve.bench.drawing import COLOURS, Axis, Line, bar_plot, line_plot
from diffsieve.bench.plots import SOURCE, _over_tokens, best_ms, draw_plots, rows_digest
from diffsieve.bench.results import read_results
from diffsieve.errors import UserInputError
from page_tables import block_sparse

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "benchmarks" / "results" / "h200" / "bench").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_plots_of_the_pages_are_of_the_committed_results(path):
    results = read_results(path)
    found = sorted((ROOT / "docs" / "images").glob(f"bench-{path.stem}-*.png"))
    assert found
    for plot in found:
        assert Image.open(plot).text[SOURCE] == rows_digest(results), "run: make tables"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_row_has_a_figure_or_a_reason(path):
    results = read_results(path)
    assert results["device"]
    assert results["versions"]["torch"]
    for row in results["rows"]:
        assert (row["ms"] > 0) if row["ok"] else row["reason"]
        for name, ratio in row.get("speedup", {}).items():
            assert ratio == pytest.approx(row["baseline_ms"][name] / best_ms(row), rel=1e-9)


def test_rows_without_a_figure_are_not_drawn(tmp_path):
    rows = [
        {"problem": "p", "name": str(tokens), "tokens": tokens, "method": "torch", "sparsity": 0.5, "ok": ok, "ms": 1.0}
        for tokens, ok in ((1_000, True), (2_000, False))
    ]
    results = {"operation": "block-sparse", "device": "a CPU", "versions": {"torch": "2"},
               "settings": {"dtype": "float32"}, "rows": rows}  # fmt: skip
    draw_plots(results, tmp_path)
    one_point = (tmp_path / "block-sparse-time.png").read_bytes()
    draw_plots({**results, "rows": [{**row, "ok": True} for row in rows]}, tmp_path)
    assert (tmp_path / "block-sparse-time.png").read_bytes() != one_point
    assert draw_plots({**results, "rows": rows[1:]}, tmp_path) == []


@pytest.mark.parametrize("operation", ["block-sparse", "ba-att"])
def test_dense_rows_alone_are_not_drawn(operation, tmp_path):
    row = {"problem": "p", "name": "dense", "tokens": 256, "method": "dense", "sparsity": None, "peer": True, "ms": 1.0}
    results = {"operation": operation, "device": "a CPU", "versions": {"torch": "2"},
               "settings": {"dtype": "float32"}, "rows": [{**row, "ok": True}]}  # fmt: skip
    assert draw_plots(results, tmp_path) == []


def test_lines_hold_the_measured_points_in_order():
    rows = [{"tokens": 9, "ms": 3.0}, {"tokens": 4, "ms": 2.0, "graph_ms": 1.0}]
    assert _over_tokens(rows, lambda row: "x") == [Line("x", [(4, 1.0), (9, 3.0)])]


def test_a_plot_shows_its_lines():
    axis = Axis("x"), Axis("y")
    lines = [Line("up", [(1.0, 1.0), (10.0, 100.0)]), Line("limit", [(1.0, 2.0), (10.0, 2.0)], dashed=True)]
    both, one = (line_plot("title", "where", part, *axis) for part in (lines, lines[:1]))
    assert both.size == one.size == (900, 560)
    assert both.tobytes() != one.tobytes()
    assert len(line_plot("title", "where", [Line("one", [(5.0, 5.0)])], *axis).getcolors(1 << 20)) > 2


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_no_two_lines_of_a_committed_plot_share_a_colour(path, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plots, "line_plot", lambda *args: drawn.append(args[2]) or line_plot(*args))
    draw_plots(read_results(path), tmp_path)
    assert drawn
    assert max(len([line for line in lines if not line.dashed]) for lines in drawn) <= len(set(COLOURS))


def test_ticks_lie_within_the_axis():
    assert Axis("x").marks(0.3, 40.0) == [0.5, 1, 2, 5, 10, 20]
    assert Axis("x", log=False).marks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Axis("x", ticks=(1, 4, 9)).marks(2, 9) == [4, 9]


def test_bars():
    image = bar_plot("title", "where", {"a": {"x": 1.0, "y": 3.0}, "b": {"x": 2.0, "y": 0.1}}, "ms")
    assert image.width == 900


@pytest.mark.parametrize("text", ["21x45", "21x45x80x1", "axbxc", "21x-4x80", "²x45x80"])
def test_wrong_grids(text):
    with pytest.raises(UserInputError, match="grid"):
        parse_grid(text)


def test_grids_and_percent():
    assert parse_grid("21x45x80") == (21, 45, 80)
    assert [percent(share) for share in (0.5, 0.125, 0.0)] == ["50 %", "12.5 %", "0 %"]


def test_a_page_is_written_from_the_json_alone(monkeypatch):
    """Another figure in the file is another figure in the table."""
    before = block_sparse.kernel_table()
    original = block_sparse.result

    def slower(name):
        data = json.loads(json.dumps(original(name)))
        for row in data["rows"]:
            row |= {kind: 3 * row[kind] for kind in ("ms", "graph_ms") if kind in row}
        return data

    monkeypatch.setattr(block_sparse, "result", slower)
    assert block_sparse.kernel_table() != before
