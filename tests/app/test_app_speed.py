"""The benchmark of the app asks for the same with the page as without it, and says which it was."""

import importlib.util
from pathlib import Path

import pytest

from diffsieve.app.models import Shelf
from tests.app.browser import MISSING, find_chromium
from tests.app.serving import Tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "app_speed.py"


@pytest.fixture
def script():
    location = importlib.util.spec_from_file_location("app_speed", SCRIPT)
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


class Small(Tiny):
    """The tiny pipeline, whose folder says that its clips are small."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __call__(self, model, **place):
        pipe = super().__call__(model, **place)
        pipe.register_to_config(_name_or_path=str(self.folder))
        return pipe


@pytest.fixture
def small_shelf(tmp_path):
    (tmp_path / "generation_defaults.json").write_text(
        '{"steps": 3, "frames": 9, "height": 32, "width": 32, "guidance_scale": 1.0, "max_sequence_length": 16,'
        ' "fps": 8, "prompts": ["a fox"]}'
    )
    return lambda: Shelf({"tiny": "tiny"}, load=Small(tmp_path))


def test_the_page_is_timed_in_a_browser(script, small_shelf):
    if find_chromium() is None:
        pytest.skip(MISSING)
    report = script.look(small_shelf(), openings=1)
    assert report["measured"].startswith("the page in Chromium over HTTP")
    assert len(report["seconds_ready"]) == 1
    (row,) = report["runs"]
    assert (row["settings"]["steps"], row["settings"]["frames"]) == (3, 9)
    assert row["seconds"] >= row["seconds_dense"] + row["seconds_sparse"]


def test_the_page_and_its_handler_are_asked_for_the_same(script, small_shelf):
    found = [script.measure(small_shelf(), without_page=without) for without in (False, True)]
    assert [report["measured"] for report in found] == [
        "/compare of the server",
        "the handler that the page calls, without the page",
    ]
    asked = [[row["settings"] for row in report["runs"]] for report in found]
    assert asked[0] == asked[1]
    assert [row["seed"] for row in asked[0]] == [0, 1, 2]
    assert (asked[0][0]["steps"], asked[0][0]["frames"], asked[0][0]["width"]) == (3, 9, 32)
    for report in found:
        assert report["goal_seconds"] == 240
        assert all(row["seconds"] >= row["seconds_dense"] + row["seconds_sparse"] for row in report["runs"])
        assert [row["sparsity"]["steps_dense"] for row in report["runs"]][1:] == [1, 1]
