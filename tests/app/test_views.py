"""What the page shows of a run: escaped text, units, reasons for what is missing, links to published files alone."""

import dataclasses
import json
import math
import re
from html import unescape
from pathlib import Path

import pytest

from diffsieve.app import figures, views
from diffsieve.app.errors import public_report, without_paths
from diffsieve.app.jobs import Follow, Job, duration
from diffsieve.app.make_examples import MAX_BYTES
from diffsieve.app.snippet import python_lines
from diffsieve.app.store import EXAMPLES, Store
from diffsieve.app.streaming import Done, Step, stream
from diffsieve.compare import CompareConfig, Progress
from tests.app.conftest import make_handlers, small
from tests.conftest import hide_weights

EVIL = "<img src=x onerror=alert(1)>\"' & a cat"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    handlers = make_handlers(folder / "store")
    with pytest.MonkeyPatch.context() as patch:  # a user's weights of LPIPS are not there
        hide_weights(patch, folder / "caches")
        yield handlers.compare(small(prompt=EVIL, negative_prompt="<b>"), owner="me", tell=lambda share, text: None)
    handlers.store.close()


def every_view(run):
    named = [("BA-Att <50 %>", run)]
    clip = Path("/tmp/a b'<.mp4")
    return [
        figures.headline(run),
        figures.metrics_table(named),
        figures.cost_table(named),
        figures.curves(named),
        views.facts(run),
        figures.sweep_charts([run]),
        views.player((EVIL, clip), ("b", clip), fps=16, frames=9, title=EVIL, difference=(clip, 0.1), psnr=[None, 3.5]),
        views.status(EVIL),
        views.progress(0.5, EVIL),
        views.empty(EVIL, EVIL),
        views.plain(EVIL),
    ]


def test_no_text_of_a_user_is_markup(run):
    for html in every_view(run):
        assert "<img" not in html
        assert "&lt;img" in html or EVIL not in unescape(html)
        assert "<50" not in html
    assert "&lt;b&gt;" in views.facts(run)


def test_a_missing_metric_says_why_and_is_no_number(run):
    table = figures.metrics_table([("a", run)])
    assert "not computed: MS-SSIM needs frames of at least" in table
    assert table.count("not computed") == 2  # LPIPS too, which needs its weights
    assert ">0<" not in table
    assert "<td></td>" not in table
    for unit in ("dB", "none", "higher", "lower"):
        assert f">{unit}<" in table


def test_every_figure_has_a_unit(run):
    """The word none stands where a figure has none."""
    units = {"dB", "none", "%", "steps", "s", "times"}
    for table in (figures.metrics_table([("a", run)]), figures.cost_table([("a", run)])):
        head, *rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]
        assert len(rows) > 4
        assert {row[head.index("unit")] for row in rows} <= units
    sweep = unescape(figures.sweep_charts([run]))
    for label in ("sparsity, %", "PSNR, dB", "time, s", "density, %", "time dense, s", "time sparse, s"):
        assert label in sweep, label


def test_figures_are_the_measured_ones(run):
    clip = run.clip
    cost = unescape(figures.cost_table([("a", run)]))
    assert f"{100 * clip['sparsity']['density_overall']:.1f}" in cost
    assert f"{clip['sparsity']['steps_dense']} of {clip['sparsity']['steps_total']}" in cost
    assert f"{clip['metrics']['psnr']['mean']:.2f}" in figures.headline(run)
    assert "sparse: torch" in views.facts(run)


def test_the_player_gets_addresses_of_this_server(run):
    html = views.player(("a", Path("/tmp/x y.mp4")), ("b", Path("/tmp/z.mp4")), fps=16, frames=9, title="t")
    data = json.loads(unescape(html.split('data-clip="')[1].split('"')[0]))
    assert data["left"]["src"] == "gradio_api/file=/tmp/x%20y.mp4"
    assert data["difference"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot read /srv/cache/x.pth now", "cannot read a path on the server now"),
        ("~/secret/file and C:\\Users\\me\\x", "a path on the server and a path on the server"),
        ("steps must be 4, got 3/4 or a/b", "steps must be 4, got 3/4 or a/b"),
        ("see https://example.com/a/b", "see https://example.com/a/b"),
    ],
)
def test_paths_are_left_out_of_messages(text, expected):
    assert without_paths(text) == expected


def test_a_public_report_keeps_prompts_and_hides_folders():
    report = {
        "prompt": ["/a/b a cat"],
        "clips": [{"notes": ["see /a/b"], "metrics": {"x": {"reason": "no /srv/x, y"}}}],
    }
    assert public_report(report) == {
        "prompt": ["/a/b a cat"],
        "clips": [
            {"notes": ["see a path on the server"], "metrics": {"x": {"reason": "no a path on the server, y"}}},
        ],
    }


def test_the_python_lines_build_the_same_configuration(run):
    lines = python_lines(run.report)
    seen = {}
    stub = {"summary": {"psnr": {"mean": 1.0}}}
    code = lines.replace("from diffsieve.compare import CompareConfig, compare", "")
    names = {
        "CompareConfig": CompareConfig,
        "compare": lambda config: seen.setdefault("config", config) and stub,
        "print": lambda *words: None,
    }
    exec(compile(code, "compare.py", "exec"), names)
    settings = run.report["settings"]
    made = dataclasses.asdict(seen["config"])
    assert made["prompt"] == (EVIL,)
    for name in (
        "method",
        "preset",
        "sparsity",
        "warmup",
        "block_size",
        "min_tokens",
        "steps",
        "frames",
        "width",
        "height",
        "dtype",
    ):
        assert made[name] == settings[name], name
    assert made["negative_prompt"] == "<b>"
    assert made["out"] == Path(f"outputs/compare-{run.report['created'][:19].replace(':', '')}")
    assert python_lines({**run.report, "created": "2026-01-01T00:00:00+00:00"}) != lines, "each run has its own folder"


def test_a_stream_tells_the_newest_progress_and_ends_with_the_result():
    def work(tell):
        for number in range(50):
            tell(number / 50, f"step {number}")
        return "result"

    messages = list(stream(work, lambda: pytest.fail("nobody went away")))
    assert messages[-1] == Done(result="result")
    assert all(isinstance(message, Step) for message in messages[:-1])


def test_a_stream_that_fails_ends_with_words():
    def work(tell):
        raise KeyError("/srv/secret/key")

    (message,) = stream(work, lambda: None)
    assert "the run failed with KeyError" in str(message.error)
    assert "secret" not in str(message.error)


def test_a_listener_that_goes_away_cancels():
    cancelled = []

    def work(tell):
        while not cancelled:
            tell(0.1, "at work")

    messages = stream(work, lambda: cancelled.append(True))
    next(messages)
    messages.close()
    assert cancelled == [True]


def test_the_time_left_follows_the_steps():
    now, told = [0.0], []
    follow = Follow(Job("me"), lambda share, text: told.append((share, text)), clock=lambda: now[0])
    for step in range(4):
        follow(Progress(0, 1, "a", 0, "dense", step, 10, "denoise"))
        now[0] += 6.0
    assert told[-1][1] == "dense clip, step 4 of 10, about 1 min 42 s left"  # 17 of 20 steps of 6 s
    assert told[-1][0] == pytest.approx(0.97 * 3 / 20)


def test_the_time_left_in_a_sweep_is_that_of_one_run():
    now, told = [0.0], []
    follow = Follow(Job("me"), lambda share, text: told.append((share, text)), 1, 4, clock=lambda: now[0])
    for step in range(2):
        follow(Progress(0, 1, "a", 0, "sparse", step, 10, "denoise"))
        now[0] += 6.0
    assert told[-1][1] == "run 2 of 4, sparse clip, step 2 of 10, about 54 s left of this run"
    assert told[-1][0] == pytest.approx((1 + 0.97 / 10) / 4)


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (59.4, "59 s"), (125, "2 min 5 s"), (4200, "1 h 10 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_shipped_examples_are_small_and_complete(tmp_path):
    store = Store(tmp_path / "store")
    store.open()
    examples = [run for run in store.runs() if run.example]
    assert examples, "make examples"
    assert sum(path.stat().st_size for path in EXAMPLES.rglob("*") if path.is_file()) <= MAX_BYTES
    for run in examples:
        own = ("difference_map", "selections") if run.pictures else ("difference_clip", "masks")
        for key in ("dense", "sparse", *own, "poster", "report"):
            assert store.publish(run, key) is not None, key
        assert run.report["settings"]["model"] == ("mini-pixel-dit" if run.pictures else "mini-wan")
        assert math.isfinite(run.clip["metrics"]["psnr"]["mean"])
        assert str(Path.home()) not in json.dumps(run.report)
        assert figures.headline(run)
    store.close()
