"""What the tests of the page do on it, over and over."""

import os
import time
from pathlib import Path

TABS = ("Compare", "Metrics", "Attention", "Run info", "Sweep", "Gallery")
# Fields whose label begins like that of another.
_EXACT = ("Steps", "Frames", "Width, px", "Height, px", "Guidance")


def shoot(page, name):
    folder = os.environ.get("DIFFSIEVE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")


def settle(page, wanted):
    """Fill fields until all of them keep what they were given."""

    def settled():
        painted(page)
        lost = [label for label, value in wanted.items() if field(page, label).input_value() != value]
        for label in lost:
            field(page, label).fill(wanted[label])
        assert not lost

    eventually(settled)


def field(page, label):
    return page.get_by_label(label, exact=label in _EXACT)


def press_compare(page):
    # What an earlier run left must not count as the end of this one.
    page.evaluate("document.querySelector('#ds-told .ds-good')?.classList.remove('ds-good')")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator("#ds-told .ds-good", has_text="Done in").wait_for()


def tab(page, name):
    """Open a tab; which ones are behind the dots changes while the page is laid out, and on a narrow screen."""
    from playwright.sync_api import TimeoutError as TooLateError

    visible = page.get_by_role("tab", name=name, exact=True)

    def click():
        try:
            if visible.count() and visible.first.is_visible():
                visible.first.click(timeout=3000)
            else:
                page.locator(".overflow-menu button").first.click(timeout=3000)
                page.get_by_role("button", name=name, exact=True).last.click(timeout=3000)
        except TooLateError as error:
            raise AssertionError(f"{name} is not there") from error

    eventually(click)
    painted(page)


def open_more_settings(page):
    page.get_by_role("button", name="More settings").click()
    painted(page)


def painted(page):
    """Wait until what was just opened or shown has been painted.

    Gradio gives fields that come into being their first values once more right before they are painted. Nobody can type
    so early, but a test can, and what it typed was gone then.
    """
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def pick(page, label, option):
    """Choose in a list, and wait until the list has gone: it fades, and the next one must not be taken for it."""
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=option).first.click()
    page.get_by_role("option").first.wait_for(state="detached")


def choose_class(page, name):
    pick(page, "Class", name)
    eventually(lambda: same(page.get_by_label("Class", exact=True).input_value(), name))


def shown(page):
    """Return side, natural width and height of each picture of the view that is seen, once all are loaded."""
    return page.evaluate(
        """() => [...document.querySelectorAll('diffsieve-player img')].filter((i) => i.offsetParent && i.complete)
             .map((i) => [i.dataset.side, i.naturalWidth, i.naturalHeight])"""
    )


def width_of_spot(page):
    """Return the width on the screen of the picture of what a query attended to, 0 before it is loaded."""
    return page.evaluate(
        "(() => { const i = document.querySelector('#ds-spot img'); return i?.complete ? i.clientWidth : 0 })()"
    )


def click_token(page, row, column, *, columns):
    """Click a token in the picture of what a query attended to: 448 pixels, a caption of 20 above, a margin of 12."""
    picture = page.locator("#ds-spot img")
    scale = width_of_spot(page) / picture.evaluate("image => image.naturalWidth")
    x, y = (12 + 448 / columns * (place + 0.5) for place in (column, row))
    picture.click(position={"x": x * scale, "y": (20 + y) * scale})


def same(value, expected):
    assert value == expected


def differs(value, other):
    assert value != other


def eventually(check, seconds=60.0):
    end = time.monotonic() + seconds
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
