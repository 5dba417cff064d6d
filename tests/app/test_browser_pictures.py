"""Pictures on the page in a real Chromium, over a tiny random pixel DiT beside the tiny model of clips."""

from pathlib import Path

import pytest

from diffsieve.app.models import Shelf
from diffsieve.app.server import ServerConfig, serve
from tests.app.acting import (
    TABS,
    choose_class,
    click_token,
    eventually,
    open_more_settings,
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
from tests.app.serving import tiny_examples
from tests.app.test_pictures import load
from tests.tiny_pixels import CLASSES

# Runs are called after these classes, so that their model is one that the page offers.
CLIPS, PIXELS = "WanPipeline", "PixelDiTPipeline"
SIZES = {"Steps": "3", "Width, px": "24", "Height, px": "16"}


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    shelf = Shelf({CLIPS: "tiny", PIXELS: "pixels"}, load=load)
    with serve(ServerConfig(folder=root / "store"), shelf=shelf, examples=tiny_examples(root / "examples")) as running:
        yield running


@pytest.fixture
def page(page):
    choose_pixels(page)
    return page


def choose_pixels(page):
    """Take the model of pictures and wait until all that its loading sets has arrived."""
    pick(page, "Model", PIXELS)
    page.locator("#ds-told", has_text=f"{PIXELS} is loaded.").wait_for()

    def arrived():
        assert page.get_by_label("Steps", exact=True).input_value() == "20"
        assert page.get_by_label("Width, px").input_value() == "16"
        assert page.get_by_label("Top k, blocks kept per level").first.input_value() == "2"
        assert page.get_by_label("Class", exact=True).is_visible()
        assert not page.get_by_label("Prompt", exact=True).is_visible()

    eventually(arrived)


def compare(page, name="Objects", **changes):
    choose_class(page, name)
    settle(page, SIZES | changes)
    press_compare(page)


def test_a_model_of_pictures_has_its_own_controls_and_clips_get_theirs_back(page):
    assert page.get_by_label("Frames", exact=True).is_visible() is False
    assert page.get_by_label("Preset").is_visible() is False
    page.get_by_label("Class", exact=True).click()

    def all_classes():
        texts = page.get_by_role("option").all_inner_texts()
        assert len(texts) == len(CLASSES)
        assert all(name in text for name, text in zip(CLASSES, texts, strict=True))

    eventually(all_classes)
    page.keyboard.press("Escape")
    tab(page, "Sweep")
    assert page.get_by_role("textbox", name="Top k, blocks kept per level").input_value() == "2, 4, 8, 16"
    shoot(page, "pictures-controls")
    pick(page, "Method", "BA-Att")
    page.get_by_label("Preset").wait_for()
    page.get_by_label("Sparsities, %").wait_for()
    pick(page, "Model", CLIPS)
    page.get_by_label("Prompt", exact=True).wait_for()
    page.get_by_label("Frames", exact=True).wait_for()
    eventually(lambda: same(page.get_by_label("Class", exact=True).is_visible(), False))


def test_a_comparison_of_pictures_fills_every_tab(page):
    compare(page)
    page.get_by_role("group", name="Objects: dense and LLSA top 2").wait_for()
    eventually(lambda: same(shown(page), [["left", 24, 16], ["right", 24, 16]]))
    assert page.locator("diffsieve-player video").count() == 0
    assert page.locator(".ds-transport").count() == 0
    assert page.get_by_text("not with dense attention").first.is_visible()
    shoot(page, "pictures-side-by-side")

    page.get_by_role("radio", name="Slider").check(force=True)
    divider = page.get_by_label("Position of the divider, per cent")
    divider.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    place = "getComputedStyle(document.querySelector('.ds-cell + .ds-cell')).clipPath"
    eventually(lambda: same(page.evaluate(place), "inset(0px 0px 0px 60%)"))
    shoot(page, "pictures-slider")
    page.get_by_role("radio", name="Difference").check(force=True)
    eventually(lambda: same(shown(page), [["difference", 24, 16]]))
    page.get_by_text("mean absolute difference of R, G and B").wait_for()
    shoot(page, "pictures-difference")

    tab(page, "Metrics")
    table = page.get_by_role("table").filter(has_text="Distance from the dense picture")
    assert table.get_by_role("row").filter(has_text="PSNR").first.inner_text().split("\t")[2] == "dB"
    page.get_by_role("table").filter(has_text="most keys of a query, of all").wait_for()
    shoot(page, "pictures-metrics")

    tab(page, "Run info")
    with page.expect_download() as download:
        page.get_by_role("link", name="Sparse picture").click()
    assert Path(download.value.path()).read_bytes()[1:4] == b"PNG"
    assert page.get_by_role("link", name="All chosen keys").count() == 1
    code = page.locator(".cm-content").inner_text()
    assert "prompt=('Objects',)" in code
    assert "frames" not in code
    shoot(page, "pictures-info")


def test_a_click_on_a_pixel_shows_where_it_looked(page):
    compare(page)
    tab(page, "Attention")
    told, mask = page.locator(".ds-spot"), page.locator("#ds-mask img")
    told.filter(has_text="row 8, column 12 attended to 16 of 384 tokens (4.2%) in detail").wait_for()
    assert page.get_by_label("number input for Query: frame of tokens").is_visible() is False
    eventually(lambda: same(width_of_spot(page) > 0, True))
    click_token(page, 2, 3, columns=24)
    told.filter(has_text="row 2, column 3 attended to 16 of 384").wait_for()
    before = mask.get_attribute("src")
    page.get_by_label("number input for Head").fill("1")
    page.keyboard.press("Enter")
    told.filter(has_text="Head 1: the query at row 2, column 3").wait_for()
    eventually(lambda: same(mask.get_attribute("src") != before, True))
    shoot(page, "pictures-attention")


def test_ba_att_on_pictures_has_block_masks(page):
    pick(page, "Method", "BA-Att")
    page.get_by_label("Preset").wait_for()
    open_more_settings(page)
    compare(page, **{"Block size, tokens": "16", "Shortest sparse sequence, tokens": "0"})
    page.get_by_role("group", name="Objects: dense and BA-Att 50 %").wait_for()
    tab(page, "Attention")
    page.locator(".ds-spot", has_text="the others are dark").wait_for()


def test_a_sweep_over_top_k_and_the_gallery(page):
    choose_class(page, "Food & Drink")
    settle(page, SIZES)
    tab(page, "Sweep")
    field = page.get_by_role("textbox", name="Top k, blocks kept per level")
    field.fill("1, 4")
    page.get_by_role("button", name="Run the sweep").click()
    page.locator(".ds-status.ds-good", has_text="Sweep done: 2 runs").wait_for()
    page.get_by_text("PSNR against top k").wait_for()
    assert page.get_by_role("table").filter(has_text="Sweep").get_by_role("row").count() == 3
    shoot(page, "pictures-sweep")
    tab(page, "Gallery")
    for side, label in (("Left", "LLSA top 1"), ("Right", "LLSA top 4")):
        pick(page, side, f"{label} · Food & Drink")
    page.get_by_role("button", name="Show both sparse results").click()
    pair = page.get_by_role("group", name="LLSA top 1 and LLSA top 4")
    pair.wait_for()
    eventually(lambda: same(pair.locator("img").count(), 2))
    shoot(page, "pictures-gallery")


def test_a_run_of_clips_brings_the_controls_of_clips_and_one_of_pictures_its_class(page):
    compare(page)
    page.locator("#ds-examples button").first.click()
    page.get_by_role("group", name="a fox moves to the right over a blue background: dense and BA-Att 50 %").wait_for()
    page.get_by_label("Prompt", exact=True).wait_for()
    eventually(lambda: same(page.get_by_label("Class", exact=True).is_visible(), False))
    assert page.locator("diffsieve-player video").count() == 3
    tab(page, "Gallery")
    page.locator("#ds-gallery button.thumbnail-item", has_text="LLSA top 2 · Objects").first.click()
    page.get_by_role("group", name="Objects: dense and LLSA top 2").wait_for()
    page.get_by_label("Class", exact=True).wait_for()
    eventually(lambda: same(page.get_by_label("Prompt", exact=True).is_visible(), False))
    assert page.get_by_label("Class", exact=True).input_value() == "Objects"
    eventually(lambda: same(page.locator("diffsieve-player video").count(), 0))


def test_a_picture_that_is_too_large_is_a_readable_error(page):
    settle(page, {"Width, px": "1000", "Height, px": "1000"})
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".ds-status.ds-bad", has_text="width x height must be at most 16,384 pixels").wait_for()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_shows_pictures_without_scrolling_sideways(browser, server, dark):
    with opened(browser, server.url, width=390, height=844, phone=True, dark=dark) as watched:
        page = watched.page
        choose_pixels(page)
        compare(page, name="Objects")
        eventually(lambda: same(len(shown(page)), 2))
        shoot(page, f"pictures-phone-{'dark' if dark else 'light'}")
        page.locator("diffsieve-player").scroll_into_view_if_needed()
        shoot(page, f"pictures-phone-player-{'dark' if dark else 'light'}")
        for name in TABS:
            tab(page, name)
            page.locator(".tabitem:visible").first.wait_for()
            eventually(lambda: same(page.evaluate("document.documentElement.scrollWidth") <= 390, True))
            if name == "Attention":
                eventually(lambda: same(250 < width_of_spot(page) <= 390, True))
                shoot(page, f"pictures-phone-attention-{'dark' if dark else 'light'}")
