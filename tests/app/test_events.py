"""What the events of the page set, without a browser: the controls after a run is opened."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from diffsieve.app.events.attention import AttentionEvents
from diffsieve.app.events.gallery import GalleryEvents
from diffsieve.app.events.settings import SettingsEvents
from diffsieve.app.events.shown import Shown
from diffsieve.app.models import Shelf
from diffsieve.app.page import build_page
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
    updates = events.on_open(ids, chosen, SimpleNamespace(index=0))
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


@pytest.mark.parametrize("heads", [1, 2])
def test_one_head_leaves_nothing_to_choose(events, monkeypatch, heads):
    run = next(run for run in events.handlers.runs() if not run.pictures)
    monkeypatch.setattr(type(events.handlers.masks(run.id)), "heads", property(lambda self: heads))
    head = events.shown.show(run)[events.page.attention.head]
    assert (head["visible"], head["value"], head["maximum"]) == (heads > 1, 0, 1)
