"""A real Chromium for tests: where it is, and a page that remembers errors and requests to other machines."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A wait ends as soon as it can; a machine that is busy with other work may take long.
_PATIENCE_MS = 90_000
MISSING = "needs Chromium: run `make browser` or `playwright install chromium`, or set CHROMIUM to its path"


def find_chromium() -> str | None:
    """Return the browser's path: that of the variable CHROMIUM, of PATH, or the one that Playwright downloaded."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    found = next((path for path in map(shutil.which, _NAMES) if path), None)
    if found is not None:
        return found
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
    return str(own) if own.is_file() else None


@dataclass
class Watched:
    """A page, and what went wrong on it.

    Args:
        page: Playwright's.
        errors: of the console and of scripts.
        outside: addresses on other machines that were asked for.
    """

    page: object
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


@contextmanager
def launched() -> Iterator[object]:
    path = find_chromium()
    if path is None:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*options, "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@contextmanager
def opened(browser, url: str, *, width: int = 1366, height: int = 768, phone: bool = False, dark: bool = False):
    """Open the page at a size; at the end of the block there must have been no errors and no outside requests."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        is_mobile=phone,
        has_touch=phone,
        color_scheme="dark" if dark else "light",
    )
    page = context.new_page()
    page.set_default_timeout(_PATIENCE_MS)
    watched = Watched(page)
    page.on("console", lambda message: message.type == "error" and watched.errors.append(message.text))
    page.on("pageerror", lambda error: watched.errors.append(str(error)))

    def look(request):
        if not request.url.startswith((url, "data:", "blob:")):
            watched.outside.append(request.url)

    page.on("request", look)
    page.goto(url)
    page.get_by_role("button", name="Compare", exact=True).wait_for()
    yield watched
    context.close()
    assert watched.outside == []
    assert watched.errors == []
