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
