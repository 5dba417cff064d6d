"""The page in a real Chromium, over the tiny pipeline. Pictures go to the folder in DIFFSIEVE_SCREENSHOTS, if set."""

import os
import sys
import threading
import time
from pathlib import Path
from statistics import median

import pytest

from diffsieve.app.models import Shelf
from diffsieve.app.server import ServerConfig, serve
from tests.app.acting import TABS, differs, eventually, open_more_settings, press_compare, settle, shoot, tab
from tests.app.browser import opened
from tests.app.serving import Tiny, tiny_server
from tests.app.test_api import Slow

# Named first, so that no server is started where there is no Chromium.
pytestmark = pytest.mark.usefixtures("browser")

SETTINGS = {"Steps": 4, "Frames": 9, "Width, px": 64, "Height, px": 64, "Guidance": 1}
MORE = {"Block size, tokens": 16, "Shortest sparse sequence, tokens": 0}


def fill(page, **changes):
    """Set the controls to a request of a second or less."""
    if not page.get_by_label("Block size, tokens").is_visible():
        open_more_settings(page)
    page.get_by_label("Prompt", exact=True).fill(changes.pop("prompt", "a cat moves left"))
    wanted = {label: str(changes.pop(label, value)) for label, value in {**SETTINGS, **MORE}.items()}
    assert not changes
    settle(page, wanted)


def compare(page, **changes):
    fill(page, **changes)
    press_compare(page)


def videos(page):
    """Return time, duration, pause, readiness and error of each clip that is shown."""
    return page.evaluate(
        """() => [...document.querySelectorAll('diffsieve-player video')].filter((v) => v.offsetParent).map((v) => ({
             time: v.currentTime, duration: v.duration, paused: v.paused, ready: v.readyState,
             error: v.error && v.error.message, width: v.videoWidth}))"""
    )


def test_the_page_is_ready_within_three_seconds_of_the_model(browser, tmp_path):
    shelf = Shelf({"tiny": "tiny"}, load=Tiny())
    shelf.get("tiny")

    def ready(number):
        started = time.monotonic()
        with (
            serve(ServerConfig(folder=tmp_path / str(number)), shelf=shelf, examples=tmp_path / "none") as running,
            opened(browser, running.url) as watched,
        ):
            watched.page.get_by_text("Nothing compared yet").wait_for()
            seconds = time.monotonic() - started
            shoot(watched.page, "empty")
        return seconds

    within_three_seconds(ready)


def within_three_seconds(measure):
    """The median of five tries counts. Where more processes want to run than there are cores, each has its share alone:
    the bound grows with the load of the last minute over the cores, up to threefold."""
    seconds = [measure(number) for number in range(5)]
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    allowed = 3 * min(max(load, 1), 3)
    sys.__stderr__.write(f"\nmedian {median(seconds):.2f} s of {seconds}, allowed {allowed:.2f} s\n")
    assert median(seconds) < allowed, seconds


def test_a_comparison_plays_in_step_and_fills_every_tab(page, server):
    compare(page)
    page.get_by_role("group", name="a cat moves left: dense and BA-Att 50 %").wait_for()

    def play():
        both = videos(page)
        assert len(both) == 2
        for one in both:
            assert one["error"] is None
            assert one["ready"] >= 2
            assert one["width"] == 64
            assert one["duration"] == pytest.approx(9 / 16, abs=0.02)
            assert not one["paused"]

    eventually(play)
    first = videos(page)[0]["time"]
    eventually(lambda: differs(videos(page)[0]["time"], first))
    shoot(page, "compare")

    page.get_by_role("button", name="Pause").click()
    eventually(lambda: _all(one["paused"] for one in videos(page)))
    page.get_by_label("Frame", exact=True).fill("5")
    eventually(lambda: _all(abs(one["time"] - 5.5 / 16) < 0.01 for one in videos(page)))
    assert "frame 6 / 9" in page.locator(".ds-readout").inner_text()
    page.get_by_role("button", name="One frame forward").click()
    eventually(lambda: _all(abs(one["time"] - 6.5 / 16) < 0.01 for one in videos(page)))
    page.get_by_role("button", name="Play").click()
    eventually(lambda: _all(not one["paused"] for one in videos(page)))

    tab(page, "Metrics")
    table = page.get_by_role("table").filter(has_text="Distance from the dense clip")
    assert table.get_by_role("row").filter(has_text="PSNR").first.inner_text().split("\t")[2] == "dB"
    assert "not computed: MS-SSIM needs frames of at least" in table.inner_text()
    assert page.locator(".ds-charts svg").count() >= 2
    shoot(page, "metrics")

    tab(page, "Run info")
    page.get_by_text("BA-Att 50 %, warm-up").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Report").click()
    assert '"psnr"' in Path(download.value.path()).read_text()
    assert page.get_by_role("link", name="Dense clip").count() == 1
    assert "CompareConfig(" in page.locator(".cm-content").inner_text()
    shoot(page, "info")


def test_the_next_result_replaces_the_last_one(page):
    compare(page)
    page.get_by_role("group", name="a cat moves left: dense and BA-Att 50 %").wait_for()
    first = page.evaluate("document.querySelector('video').src")
    compare(page, prompt="a dog moves right", Frames=5)
    page.get_by_role("group", name="a dog moves right: dense and BA-Att 50 %").wait_for()
    eventually(lambda: _all(one["duration"] == pytest.approx(5 / 16, abs=0.02) for one in videos(page)))
    assert len(videos(page)) == 2
    assert page.evaluate("document.querySelector('video').src") != first
    eventually(lambda: _all(not one["paused"] for one in videos(page)))
    assert "/ 5" in page.locator(".ds-readout").inner_text()
    page.locator("#ds-examples button").first.click()
    page.get_by_role("group", name="a fox moves to the right over a blue background: dense and BA-Att 50 %").wait_for()


def _all(values):
    assert all(values)


def test_seeking_one_clip_moves_the_other_while_they_play(page):
    compare(page)
    eventually(lambda: _all(not one["paused"] for one in videos(page)))
    for _ in range(5):
        page.evaluate("document.querySelector('diffsieve-player video').currentTime = 0.3")
        page.wait_for_timeout(120)
        times = [one["time"] for one in videos(page)]
        assert abs(times[0] - times[1]) < 2.5 / 16 or abs(abs(times[0] - times[1]) - 9 / 16) < 2.5 / 16


def test_the_slider_divides_the_clips_and_the_keyboard_moves_it(page):
    compare(page)
    page.get_by_role("radio", name="Slider").check(force=True)
    divider = page.get_by_label("Position of the divider, per cent")
    divider.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert divider.input_value() == "60"
    place = "getComputedStyle(document.querySelector('.ds-cell + .ds-cell')).clipPath"
    assert page.evaluate(place) == "inset(0px 0px 0px 60%)"
    box = page.locator(".ds-stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
    page.mouse.down()
    page.mouse.up()
    assert abs(int(divider.input_value()) - 25) <= 1
    shoot(page, "slider")
    page.get_by_role("radio", name="Difference").check(force=True)
    assert [one["width"] for one in videos(page)] == [64]
    page.get_by_text("mean absolute difference of R, G and B").wait_for()
    shoot(page, "difference")


def test_the_block_mask_follows_layer_step_and_head_and_a_click(page):
    compare(page)
    tab(page, "Attention")
    mask, spot, told = page.locator("#ds-mask img"), page.locator("#ds-spot img"), page.locator(".ds-spot")
    told.wait_for()
    before = mask.get_attribute("src")
    page.get_by_label("number input for Head").fill("1")
    page.keyboard.press("Enter")
    eventually(lambda: differs(mask.get_attribute("src"), before))
    assert told.inner_text().startswith("Head 1: the query at row 4, column 4 of token frame 1 attended to 96 of 192")
    before = mask.get_attribute("src")
    page.get_by_label("Layer").click()
    page.get_by_role("option", name="layer 1").click()
    eventually(lambda: differs(mask.get_attribute("src"), before))
    before = mask.get_attribute("src")
    page.get_by_label("Step", exact=True).click()
    page.get_by_role("option", name="2").click()
    eventually(lambda: differs(mask.get_attribute("src"), before))
    sizes = "(() => { const i = document.querySelector('#ds-spot img'); return [i.naturalWidth, i.clientWidth] })()"
    eventually(lambda: _all(page.evaluate(sizes)))
    natural, shown = page.evaluate(sizes)
    scale = shown / natural
    spot.click(position={"x": (12 + 5) * scale, "y": (12 + 20 + 5) * scale})  # first frame, upper left corner
    eventually(lambda: _all(["row 0, column 0 of token frame 0" in told.inner_text()]))
    assert page.get_by_label("number input for Query: frame of tokens").input_value() == "0"
    shoot(page, "attention")


def test_a_wrong_value_is_a_readable_error(page):
    fill(page, Frames=10**9)
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".ds-status.ds-bad", has_text="frames must be a whole number from 1 to 129").wait_for()
    page.get_by_test_id("toast-text").filter(has_text="frames must be").wait_for()
    shoot(page, "error")
    assert page.get_by_role("button", name="Compare", exact=True).is_enabled()


def test_llsa_has_its_own_controls_and_its_warning(page):
    fill(page)
    page.get_by_label("Method").click()
    page.get_by_role("option", name="LLSA").click()
    page.get_by_label("Top k, blocks kept per level").wait_for()
    eventually(lambda: _all([not page.get_by_label("Preset").is_visible()]))
    settle(page, {"Top k, blocks kept per level": "2"})
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".ds-status.ds-good", has_text="LLSA top 2").wait_for()
    page.get_by_text("was not trained with it").first.wait_for()
    tab(page, "Attention")
    page.locator(".ds-spot", has_text="in detail, and saw").wait_for()


def test_text_of_a_user_is_never_markup(page):
    compare(page, prompt='<img src=x onerror="document.title=1"> a cat')
    for name in TABS:
        tab(page, name)
        page.wait_for_timeout(150)
    assert page.title() == "diffsieve"
    assert page.locator("img[src='x']").count() == 0


def test_an_example_is_there_at_once(browser, server):
    def shown(number):
        with opened(browser, server.url) as watched:
            button = watched.page.locator("#ds-examples button").first
            started = time.monotonic()
            button.click()
            watched.page.locator("diffsieve-player video").first.wait_for()
            seconds = time.monotonic() - started
            eventually(lambda: _all([watched.page.get_by_label("Steps", exact=True).input_value() == "4"]))
        return seconds

    within_three_seconds(shown)


def test_a_sweep_is_plotted(page):
    fill(page)
    tab(page, "Sweep")
    page.get_by_label("Sparsities, %").fill("25, 75")
    page.get_by_role("button", name="Run the sweep").click()
    page.locator(".ds-status.ds-good", has_text="Sweep done: 2 runs").wait_for()
    assert page.get_by_role("table").filter(has_text="Sweep").get_by_role("row").count() == 3
    page.get_by_text("PSNR against sparsity").wait_for()
    shoot(page, "sweep")


def test_runs_are_kept_opened_and_set_against_each_other(page, server):
    prompt = "a dog moves left"  # of this test alone: the server is shared
    compare(page, prompt=prompt)
    compare(page, prompt=prompt, Steps=3)
    tab(page, "Gallery")
    page.get_by_role("button", name="Keep the run that is shown").click()
    page.get_by_text("Kept until it is given free").wait_for()
    assert any(run.kept for run in server.handlers.runs())
    page.get_by_role("button", name="Give the run that is shown free").click()
    page.get_by_text("Given free").wait_for()
    for side, steps in (("Left", 3), ("Right", 4)):
        page.get_by_label(side, exact=True).click()
        page.get_by_role("option", name=f"seed 0 · {steps} steps").filter(has_text=prompt).last.click()
        page.get_by_role("option").first.wait_for(state="detached")
    page.get_by_role("button", name="Show both sparse results").click()
    pair = page.get_by_role("group", name="BA-Att 50 %, seed 0 and BA-Att 50 %, seed 0")
    pair.wait_for()
    assert pair.locator("video").count() == 2
    shoot(page, "gallery")
    page.locator("#ds-gallery button.thumbnail-item").first.click()
    page.locator(".ds-status.ds-good", has_text="Shown:").wait_for()


def test_cancel_ends_a_run(browser, tmp_path):
    load = Slow()
    with tiny_server(tmp_path, load=load) as running, opened(browser, running.url) as watched:
        page = watched.page
        fill(page)
        page.get_by_role("button", name="Compare", exact=True).click()
        assert load.reached.wait(20)
        page.get_by_role("progressbar").wait_for()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("Cancelled: the step at work ends first").wait_for()
        load.go_on.set()
        eventually(lambda: _all([not running.handlers.jobs.busy]))
        assert running.handlers.runs() == []
        compare(page)


def test_closing_the_page_frees_the_model(browser, tmp_path):
    load = Slow()
    with tiny_server(tmp_path, load=load) as running:
        with opened(browser, running.url) as watched:
            fill(watched.page)
            watched.page.get_by_role("button", name="Compare", exact=True).click()
            assert load.reached.wait(20)
        threading.Timer(1.0, load.go_on.set).start()
        eventually(lambda: _all([load.go_on.is_set() and not running.handlers.jobs.busy]))
        assert running.handlers.runs() == []


@pytest.mark.slow
def test_the_embedded_model_end_to_end(browser, tmp_path):
    with (
        serve(ServerConfig(folder=tmp_path / "store", device="cpu")) as running,
        opened(browser, running.url) as watched,
    ):
        page = watched.page
        assert page.get_by_label("Steps", exact=True).input_value() == "14"
        compare(page, prompt="a fox moves to the right over a blue background", Steps=3)
        eventually(lambda: _all(one["ready"] >= 2 and one["error"] is None for one in videos(page)))
        assert len(videos(page)) == 2
        report = next(run for run in running.handlers.runs() if not run.example).report
        assert report["settings"]["model"] == "mini-wan"
        assert 0 < report["clips"][0]["sparsity"]["density_sparse_steps"] < 1
        tab(page, "Attention")
        page.get_by_text("Head 0: the query at row 4, column 4 of token frame 1").wait_for()
        shoot(page, "mini-wan")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(browser, server, dark):
    with opened(browser, server.url, width=390, height=844, phone=True, dark=dark) as watched:
        page = watched.page
        page.locator("#ds-examples button").first.click()
        page.locator("diffsieve-player video").first.wait_for()
        shoot(page, f"phone-{'dark' if dark else 'light'}")
        for name in TABS:
            tab(page, name)
            page.wait_for_timeout(200)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 390, f"{name} is {wide} pixels wide"
