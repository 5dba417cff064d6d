"""What the page says before there is anything and when something fails, and that all on it has a name."""

import threading
import time

import pytest

from diffsieve.app.events.settings import SettingsEvents
from diffsieve.app.models import Shelf
from diffsieve.app.server import ServerConfig, serve
from diffsieve.errors import UserInputError
from tests.app.acting import TABS, eventually, field, open_more_settings, pick, press_compare, same, settle, shoot, tab
from tests.app.browser import opened
from tests.app.conftest import small
from tests.app.serving import EXAMPLE, tiny_examples, tiny_server
from tests.app.test_browser_pictures import CLIPS
from tests.app.test_pictures import load
from tests.tiny import wan_pipeline

EMPTY = {
    "Compare": "Nothing compared yet",
    "Metrics": "No metrics yet",
    "Attention": "No block mask yet",
    "Run info": "No run yet",
    "Sweep": "No sweep yet",
    "Gallery": "No finished run yet",
}
# The elements that are seen and have no name: neither a label nor a text, of their own or of what they hold.
NAMELESS = """() => [...document.querySelectorAll(
    'input, textarea, select, button, a[href], video, img, table, [role=tab], [role=progressbar]')]
  .filter((e) => e.offsetParent).filter((e) => {
    const by = (e.getAttribute('aria-labelledby') ?? '').split(' ').map((id) => document.getElementById(id)?.innerText);
    const inside = [...e.querySelectorAll('[alt], [aria-label], [title]')].map((i) => i.alt || i.ariaLabel || i.title);
    const labels = [...(e.labels ?? []), ...(e.caption ? [e.caption] : [])].map((label) => label.innerText);
    const text = e.matches('button, a, [role=tab]') ? [e.innerText, ...inside] : [];
    return ![e.ariaLabel, e.alt, e.title, ...text, ...by, ...labels].some((name) => name?.trim());
  }).map((e) => e.outerHTML.slice(0, 300))"""


@pytest.mark.parametrize("pictures", [False, True], ids=["clips", "pictures"])
def test_all_on_the_page_has_a_name(browser, tmp_path, pictures):
    shelf = Shelf({"model": "pixels" if pictures else "tiny"}, load=load)
    settings = ServerConfig(folder=tmp_path / "store")
    examples = tmp_path / "none" if pictures else tiny_examples(tmp_path / "examples")
    with serve(settings, shelf=shelf, examples=examples) as running, opened(browser, running.url) as watched:
        page = watched.page
        if pictures:  # with the first settings, which are small
            press_compare(page)
        else:
            page.locator("#ds-examples button").first.click()
        page.locator("diffsieve-player img, diffsieve-player video").first.wait_for()
        open_more_settings(page)
        page.get_by_label("Block size, tokens").wait_for()
        for name in TABS:
            tab(page, name)
            page.locator(".tabitem:visible").first.wait_for()
            if name == "Attention":
                page.locator(".ds-spot").wait_for()
            eventually(lambda: nothing(page.evaluate(NAMELESS)))
        tab(page, "Compare")
        for view in ("Slider", "Difference"):
            page.get_by_role("radio", name=view).check(force=True)
            eventually(lambda: nothing(page.evaluate(NAMELESS)))


def controls_of_attention(page):
    """How many lists, sliders and pictures of the tab are seen."""
    shown = "'.tabitem input, .tabitem img, .tabitem button:has(svg)'"
    return page.evaluate(f"[...document.querySelectorAll({shown})].filter((e) => e.offsetParent).length")


def nothing(found):
    assert found == []


def test_an_empty_page_says_what_will_be_there(browser, tmp_path):
    with tiny_server(tmp_path) as running, opened(browser, running.url) as watched:
        page = watched.page
        for name, text in EMPTY.items():
            tab(page, name)
            page.locator(".ds-empty b", has_text=text).wait_for()
        shoot(page, "empty-gallery")
        tab(page, "Attention")
        assert controls_of_attention(page) == 0
        shoot(page, "empty-attention")
        tab(page, "Gallery")
        page.get_by_role("button", name="Show both sparse results").click()
        page.get_by_test_id("toast-text").filter(has_text="choose two finished runs").wait_for()
        page.get_by_role("button", name="Keep the run that is shown").click()
        page.locator(".ds-status.ds-bad", has_text="Nothing is shown yet that could be kept.").wait_for()
        settle(page, {"Steps": "2", "Frames": "5", "Width, px": "32", "Height, px": "32", "Guidance": "1"})
        press_compare(page)
        tab(page, "Gallery")
        page.locator("#ds-gallery button.thumbnail-item").first.wait_for()
        page.get_by_text("Runs that are not kept go after a week").wait_for()
        assert not page.get_by_text("No finished run yet").is_visible()
        tab(page, "Attention")  # the sequence is shorter than the shortest sparse one
        page.locator(".ds-empty", has_text="Every step of this run was dense, so there is no block mask.").wait_for()
        assert controls_of_attention(page) == 0
        open_more_settings(page)
        settle(page, {"Shortest sparse sequence, tokens": "0", "Block size, tokens": "8"})
        press_compare(page)
        tab(page, "Attention")
        page.locator(".ds-spot", has_text="the query at").wait_for()
        assert controls_of_attention(page) > 0
        assert page.get_by_label("number input for Query: row of tokens").input_value() == "2"
        page.get_by_label("Layer").wait_for()


def test_a_run_that_is_chosen_while_the_list_is_made_anew_stays_chosen(browser, tmp_path):
    with tiny_server(tmp_path) as running:
        handlers = running.handlers
        for seed in range(3):
            handlers.compare(small(seed=seed), owner="me", tell=lambda share, text: None)
        listed, fast = threading.Event(), handlers.runs

        def slow():
            time.sleep(2)
            listed.set()
            return fast()

        with opened(browser, running.url) as watched:
            page = watched.page
            tab(page, "Gallery")
            page.locator("#ds-gallery button.thumbnail-item").first.wait_for()
            left = page.get_by_label("Left", exact=True)
            eventually(lambda: same("seed 2" in left.input_value(), True))
            handlers.runs = slow
            page.locator("#ds-gallery button.thumbnail-item").last.click()
            page.locator(".ds-status.ds-good", has_text="Shown:").wait_for()
            tab(page, "Gallery")
            pick(page, "Left", "BA-Att 50 % · a cat moves left · seed 1")
            assert not listed.is_set(), "the list was there before the choice"
            assert listed.wait(20)
            page.wait_for_timeout(1500)  # for the answer to arrive
            assert "seed 1" in left.input_value()


def test_a_model_that_is_refused_is_told_until_another_one_is_chosen(browser, tmp_path):
    def broken(model, **options):
        if model == "broken":
            raise UserInputError("the weights of /srv/models/broken must be readable")
        return wan_pipeline()

    shelf = Shelf({CLIPS: "tiny", "broken": "broken"}, load=broken)
    settings = ServerConfig(folder=tmp_path / "store")
    with serve(settings, shelf=shelf, examples=tmp_path / "none") as running, opened(browser, running.url) as watched:
        page = watched.page
        settle(page, {"Steps": "7"})
        pick(page, "Model", "broken")
        told = page.locator("#ds-told")
        told.filter(has_text="Not loaded: the weights of a path on the server must be readable").wait_for()
        shoot(page, "refused-model")
        pick(page, "Model", CLIPS)
        told.filter(has_text=f"{CLIPS} is chosen again; the settings are as they were.").wait_for()
        assert page.get_by_label("Steps", exact=True).input_value() == "7"


def test_values_of_a_sweep_typed_while_an_example_sets_the_controls_are_kept(page, monkeypatch):
    typed, of_run = threading.Event(), SettingsEvents.of_run

    def late(*arguments):
        assert typed.wait(60)
        return of_run(*arguments)

    monkeypatch.setattr(SettingsEvents, "of_run", late)
    page.locator("#ds-examples button").first.click()
    tab(page, "Sweep")
    page.get_by_label("Sparsities, %").fill("30, 60")
    typed.set()
    eventually(lambda: same(field(page, "Steps").input_value(), str(EXAMPLE["steps"])))
    page.locator("diffsieve-player video").first.wait_for()
    tab(page, "Sweep")
    assert page.get_by_label("Sparsities, %").input_value() == "30, 60"
