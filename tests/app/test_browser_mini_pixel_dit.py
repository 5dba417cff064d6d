"""The embedded model of pictures on the page in a real Chromium: its example, first settings, runs at a small size."""

from pathlib import Path

import pytest

from diffsieve.app.models import Shelf, offered_models
from diffsieve.app.server import ServerConfig, serve
from diffsieve.pipelines.defaults import MINI_PIXEL_DIT
from tests.app.acting import (
    TABS,
    choose_class,
    click_token,
    eventually,
    pick,
    press_compare,
    same,
    settle,
    shoot,
    shown,
    tab,
    width_of_spot,
)
from tests.app.browser import opened

# A few seconds of work, where the 128 x 128 pixels of the first settings take minutes with full attention.
SMALL = {"Steps": "2", "Width, px": "32", "Height, px": "32"}


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    """The server as it starts from the command line: embedded models, shipped examples."""
    folder = tmp_path_factory.mktemp("mini") / "store"
    with serve(ServerConfig(folder=folder), shelf=Shelf(offered_models(), device="cpu")) as running:
        yield running


def open_example(page):
    page.locator("#ds-examples button", has_text="LLSA").first.click()
    page.get_by_role("group", name="Smileys & Emotion: dense and LLSA top 8").wait_for()
    eventually(lambda: same(shown(page), [["left", 128, 128], ["right", 128, 128]]))


def choose_model(page):
    """Take the model and wait until its first settings have arrived."""
    pick(page, "Model", MINI_PIXEL_DIT)
    page.locator("#ds-told", has_text=f"{MINI_PIXEL_DIT} is loaded.").wait_for()

    def arrived():
        values = {label: page.get_by_label(label, exact=True).input_value() for label in (*SMALL, "Guidance", "Class")}
        assert values == {
            "Steps": "20",
            "Width, px": "128",
            "Height, px": "128",
            "Guidance": "2.5",
            "Class": "Activities",
        }
        assert page.get_by_label("Top k, blocks kept per level").first.input_value() == "8"

    eventually(arrived)


def test_its_example_is_there_at_once_with_the_view_of_attention(page):
    open_example(page)
    shoot(page, "mini-pixel-dit-example")
    tab(page, "Metrics")
    page.get_by_role("table").filter(has_text="Distance from the dense picture").wait_for()
    tab(page, "Attention")
    told, mask = page.locator(".ds-spot"), page.locator("#ds-mask img")
    told.filter(has_text="row 64, column 64 attended to").filter(has_text="of 16,384 tokens").wait_for()
    eventually(lambda: same(width_of_spot(page) > 0, True))
    shoot(page, "mini-pixel-dit-attention")
    click_token(page, 40, 30, columns=128)
    told.filter(has_text="row 40, column 30 attended to").wait_for()
    before = mask.get_attribute("src")
    page.get_by_label("number input for Head").fill("2")
    page.keyboard.press("Enter")
    told.filter(has_text="Head 2: the query at row 40, column 30").wait_for()
    eventually(lambda: same(mask.get_attribute("src") != before, True))


def test_a_run_a_sweep_the_gallery_and_a_download(page):
    choose_model(page)
    choose_class(page, "Flags")
    settle(page, SMALL)
    press_compare(page)
    page.get_by_role("group", name="Flags: dense and LLSA top 8").wait_for()
    eventually(lambda: same(shown(page), [["left", 32, 32], ["right", 32, 32]]))
    tab(page, "Run info")
    with page.expect_download() as download:
        page.get_by_role("link", name="Sparse picture").click()
    assert Path(download.value.path()).read_bytes()[1:4] == b"PNG"
    tab(page, "Sweep")
    page.get_by_role("textbox", name="Top k, blocks kept per level").fill("2, 4")
    page.get_by_role("button", name="Run the sweep").click()
    page.locator(".ds-status.ds-good", has_text="Sweep done: 2 runs").wait_for()
    page.get_by_text("PSNR against top k").wait_for()
    shoot(page, "mini-pixel-dit-sweep")
    tab(page, "Gallery")
    for side, label in (("Left", "LLSA top 2"), ("Right", "LLSA top 4")):
        pick(page, side, f"{label} · Flags")
    page.get_by_role("button", name="Show both sparse results").click()
    page.get_by_role("group", name="LLSA top 2 and LLSA top 4").wait_for()


def test_a_phone_shows_the_example_without_scrolling_sideways(browser, server):
    with opened(browser, server.url, width=390, height=844, phone=True) as watched:
        page = watched.page
        open_example(page)
        page.locator("diffsieve-player").scroll_into_view_if_needed()
        shoot(page, "mini-pixel-dit-phone")
        for name in TABS:
            tab(page, name)
            page.locator(".tabitem:visible").first.wait_for()
            eventually(lambda: same(page.evaluate("document.documentElement.scrollWidth") <= 390, True))
            if name == "Attention":
                eventually(lambda: same(250 < width_of_spot(page) <= 390, True))
                shoot(page, "mini-pixel-dit-phone-attention")
