"""What the events of the page set, without a browser: the controls, and the lines that say what happened."""

import dataclasses
import errno
from inspect import get_annotations
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest

from diffsieve.app.components import Ask
from diffsieve.app.events.attention import AttentionEvents
from diffsieve.app.events.gallery import GalleryEvents
from diffsieve.app.events.runs import RunEvents
from diffsieve.app.events.settings import SettingsEvents
from diffsieve.app.events.shown import Shown
from diffsieve.app.limits import Request
from diffsieve.app.models import Shelf
from diffsieve.app.page import build_page
from diffsieve.errors import UserInputError
from tests import tiny_pixels
from tests.app.conftest import make_handlers, small
from tests.app.test_pictures import PICTURE, load

# What a run is called after: a pipeline without a source has the name of its class.
CLIPS, PIXELS = "WanPipeline", "PixelDiTPipeline"


@pytest.fixture
def events(tmp_path):
    """The events of a page that offers both models, with a finished run of each."""
    handlers = make_handlers(tmp_path / "store")
    offer(handlers, {CLIPS: "tiny", PIXELS: "pixels"})
    for request in (small(model=CLIPS), small(**PICTURE | {"model": PIXELS, "class_name": tiny_pixels.CLASSES[1]})):
        handlers.compare(request, owner="me", tell=lambda share, text: None)
    page = build_page(handlers.shelf.names, handlers.shelf.get(CLIPS), handlers.limits, "here", [])
    shown = Shown(page, handlers, AttentionEvents(page, handlers))
    yield GalleryEvents(page, handlers, shown, SettingsEvents(page, handlers))
    handlers.store.close()


def offer(handlers, models):
    handlers.shelf = Shelf(models, load=load)
    for name in models:
        handlers.shelf.get(name)


def opened(events, *, pictures, chosen):
    """Open the run of pictures or of clips; return the line, and the properties of the controls that change."""
    ids = [run.id for run in events.handlers.runs() if run.pictures is pictures]
    updates = events.on_open(ids, chosen, events.page.followed.value, SimpleNamespace(index=0))
    assert updates[events.page.current] == ids[0]
    asked = {name: updates[control] for name, control in vars(events.page.ask).items() if control in updates}
    return updates[events.page.status], asked


def test_a_run_sets_the_controls_to_what_it_was_made_with(events):
    line, asked = opened(events, pictures=True, chosen=CLIPS)
    assert "settings stay" not in line
    assert asked["model"]["value"] == PIXELS
    assert (asked["class_name"]["value"], asked["class_name"]["visible"]) == (tiny_pixels.CLASSES[1], True)
    assert (asked["prompt"]["visible"], asked["width"]["value"], asked["steps"]["value"]) == (False, 24, 3)
    _, asked = opened(events, pictures=False, chosen=PIXELS)
    assert asked["model"]["value"] == CLIPS
    assert (asked["prompt"]["value"], asked["prompt"]["visible"]) == ("a cat moves left", True)
    assert (asked["class_name"]["visible"], asked["frames"]["value"]) == (False, 9)


@pytest.mark.parametrize("pictures", [False, True], ids=["clips", "pictures"])
def test_a_run_whose_model_is_gone_leaves_the_controls_of_another_kind_alone(events, pictures):
    chosen = CLIPS if pictures else PIXELS
    offer(events.handlers, {chosen: "tiny" if pictures else "pixels"})
    line, asked = opened(events, pictures=pictures, chosen=chosen)
    assert asked == {}, "the prompt or the class that the chosen model needs would be hidden"
    assert "Its model is not offered any more, so the settings stay as they were." in line


def test_a_run_whose_model_is_gone_is_asked_of_the_chosen_one_if_that_makes_the_same(events):
    offer(events.handlers, {"other": "pixels"})
    _, asked = opened(events, pictures=True, chosen="other")
    assert asked["model"]["value"] == "other"
    assert (asked["class_name"]["value"], asked["class_name"]["choices"]) == (
        tiny_pixels.CLASSES[1],
        list(tiny_pixels.CLASSES),
    )
    assert asked["width"]["value"] == 24


def test_a_run_of_an_embedded_model_that_left_it_to_the_device_is_repeated_sparse(events, monkeypatch):
    request = small(model=CLIPS, min_tokens=None, seed=7)
    events.handlers.compare(request, owner="me", tell=lambda share, text: None)
    assert opened(events, pictures=False, chosen=CLIPS)[1]["min_tokens"]["value"] is None
    monkeypatch.setattr("diffsieve.app.controls.EMBEDDED", {CLIPS: Path("tiny")})
    assert opened(events, pictures=False, chosen=CLIPS)[1]["min_tokens"]["value"] == 0


@pytest.mark.parametrize(("method", "stays"), [("ba-att", True), ("llsa", False)])
def test_values_of_a_sweep_stay_where_a_run_or_a_model_has_the_method_that_is_set(events, method, stays):
    """They may have been typed while the settings were on their way; numbers of top k are no sparsities."""
    field, followed = events.page.sweep_values, events.page.followed.value._replace(method=method)
    ids = [run.id for run in events.handlers.runs() if not run.pictures]
    opened_run = events.on_open(ids, CLIPS, followed, SimpleNamespace(index=0))[field]
    loaded = events.settings.on_load(ME, CLIPS, followed._replace(model=PIXELS))[field]
    for update in (opened_run, loaded):
        assert update["label"] == "Sparsities, %"
        assert update.get("value") == (None if stays else "25, 50, 75, 90")


def test_the_controls_are_named_by_the_request_alone(events):
    assert get_annotations(Ask) == {}
    ask = events.page.ask
    assert ask.list() == [getattr(ask, field.name) for field in dataclasses.fields(Request)]
    assert all(isinstance(control, gr.components.Component) for control in ask.list()), "none is left at its default"


def test_the_attention_view_has_controls_while_there_is_something_to_choose(events):
    view = events.page.attention
    parts = (view.choice, view.query, view.picture)
    assert [part.visible for part in parts] == [False] * 3, "before the first run"
    dense = events.handlers.compare(small(model=CLIPS, min_tokens=10**6), owner="me", tell=lambda share, text: None)
    sparse = next(run for run in events.handlers.runs() if not run.pictures and run.id != dense.id)
    shown, hidden = events.shown.show(sparse), events.shown.show(dense)
    assert [shown[part]["visible"] for part in parts] == [True] * 3
    assert [hidden[part]["visible"] for part in parts] == [False] * 3
    assert "Every step of this run was dense, so there is no block mask." in hidden[view.told]


@pytest.mark.parametrize("heads", [1, 2])
def test_one_head_leaves_nothing_to_choose(events, monkeypatch, heads):
    run = next(run for run in events.handlers.runs() if not run.pictures)
    monkeypatch.setattr(type(events.handlers.masks(run.id)), "heads", property(lambda self: heads))
    head = events.shown.show(run)[events.page.attention.head]
    assert (head["visible"], head["value"], head["maximum"]) == (heads > 1, 0, 1)


ME = SimpleNamespace(session_hash="me")


def full_disk(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device: /srv/secret")


def test_the_line_of_a_model_that_was_refused_goes_with_the_choice_of_the_one_before(events):
    def broken(model, **options):
        if model == "broken":
            raise UserInputError("weights must be readable")
        return load(model)

    events.handlers.shelf = Shelf({CLIPS: "tiny", "broken": "broken", PIXELS: "pixels"}, load=broken)
    page, followed = events.page, events.page.followed.value
    refused = events.settings.on_load(ME, "broken", followed)
    assert "Not loaded: weights must be readable" in refused[page.status]
    assert set(refused) == {page.status, page.followed}, "the settings stay"
    back = events.settings.on_load(ME, CLIPS, refused[page.followed])
    assert f"{CLIPS} is chosen again" in back[page.status]
    assert "ds-bad" not in back[page.status]
    assert back[page.followed] == followed
    # A list that is only passed says nothing.
    assert set(events.settings.on_load(ME, CLIPS, followed)) == {page.followed}
    other = events.settings.on_load(ME, PIXELS, refused[page.followed])
    assert f"{PIXELS} is loaded." in other[page.status]
    assert (other[page.followed].model, other[page.followed].refused) == (PIXELS, None)


@pytest.mark.parametrize("sweep", [False, True], ids=["comparison", "sweep"])
@pytest.mark.filterwarnings("ignore:the disk of the server is full")
def test_a_result_that_cannot_be_shown_ends_as_a_line_and_gives_the_buttons_back(events, monkeypatch, sweep):
    monkeypatch.setattr(events.handlers.store, "publish_text", full_disk)
    runs, page = RunEvents(events.page, events.handlers, events.shown), events.page
    values = list(vars(small(model=CLIPS)).values())
    *_, last = runs.on_sweep(ME, *values, "50") if sweep else runs.on_compare(ME, *values)
    assert "Not done: the disk of the server is full; finished runs are still there" in last[page.status]
    assert "secret" not in last[page.status]
    buttons = (page.run, page.sweep_run, page.cancel)
    assert [last[button]["interactive"] for button in buttons] == [True, True, False]


def test_keeping_a_run_on_a_full_disk_is_told(events, monkeypatch):
    run = next(run for run in events.handlers.runs() if not run.pictures)
    monkeypatch.setattr(Path, "touch", full_disk)
    line, _ = events.on_keep(run.id)
    assert "Not changed: the disk of the server is full" in line
    assert "secret" not in line


def test_the_line_beside_the_gallery_is_of_the_run_that_is_shown(events):
    kept, other = (run.id for run in events.handlers.runs())
    assert "Kept until it is given free." in events.on_keep(kept)[0]
    line, button = events.on_other_run(other)
    assert "Runs that are not kept go after a week" in line
    assert button["value"] == "Keep the run that is shown"
    line, button = events.on_other_run(kept)
    assert "The run that is shown is kept until it is given free." in line
    assert button["value"] == "Give the run that is shown free"
    assert "Runs that are not kept" in events.on_other_run(None)[0]


def test_an_empty_gallery_says_so(events, tmp_path):
    none, pictures, *_ = events.on_list_runs(None, None)
    assert (none["visible"], pictures["visible"], len(pictures["value"])) == (False, True, 2)
    empty = make_handlers(tmp_path / "empty")
    events.handlers = empty
    none, pictures, ids, left, right = events.on_list_runs(None, None)
    assert (none["visible"], pictures["visible"], ids, left["choices"], right["choices"]) == (True, False, [], [], [])
    with pytest.raises(gr.Error, match="choose two finished runs, one on the left and one on the right"):
        events.on_pair(None, None)
    empty.store.close()


def test_the_list_sets_only_sides_that_have_no_run(events):
    def sides(left, right):
        return [side.get("value", "stays") for side in events.on_list_runs(left, right)[3:]]

    newest, oldest = (run.id for run in events.handlers.runs())
    assert sides(None, None) == [newest, oldest]
    assert sides(oldest, newest) == ["stays", "stays"]
    assert sides("gone", newest) == [newest, oldest], "not the same run on both sides"
    assert sides(oldest, oldest) == ["stays", newest]
