"""The page without a mouse, in a real Chromium: every control is reached with Tab and used with keys alone."""

import pytest

from tests.app.acting import TABS, differs, eventually, field, painted, same, settle
from tests.app.serving import EXAMPLE

# Named first, so that no server is started where there is no Chromium.
pytestmark = pytest.mark.usefixtures("browser")

# The accessible name of what has the focus, or of what an element is labelled by.
NAME = """() => { const e = document.activeElement; const label = e.labels?.[0]?.innerText;
    return (e.getAttribute('aria-label') || label || e.innerText || e.placeholder || e.tagName).trim(); }"""
MOST = 80  # presses of Tab; the page has fewer places than that


@pytest.fixture
def page(page):
    page.get_by_label("Prompt", exact=True).focus()
    return page


def go(page, name, key="Tab"):
    """Press Tab until something of this name has the focus, which must then be seen; return the names on the way."""
    passed = []
    for _ in range(MOST):
        page.keyboard.press(key)
        passed.append(page.evaluate(NAME))
        if passed[-1].startswith(name):
            assert page.evaluate("document.activeElement.matches(':focus-visible')"), f"no focus is seen on {name}"
            return passed
    raise AssertionError(f"{name} is not reached: {passed}")


def panel(page, name):
    """Open a tab of the results with the keyboard, from the top of the page."""
    page.get_by_label("Prompt", exact=True).focus()
    go(page, name)
    assert page.evaluate("document.activeElement.role") == "tab"
    page.keyboard.press("Enter")
    eventually(lambda: same(page.get_by_role("tab", name=name, exact=True).get_attribute("aria-selected"), "true"))
    painted(page)


def show_example(page):
    """Show the example, which sets the controls to a run of a second."""
    go(page, "a fox moves")
    page.keyboard.press("Enter")
    page.locator("diffsieve-player video").first.wait_for()
    eventually(lambda: same(field(page, "Steps").input_value(), str(EXAMPLE["steps"])))


def sweep(page, values):
    """Run a sweep of two values from its tab."""
    panel(page, "Sweep")
    go(page, "Sparsities, %")
    page.keyboard.press("Control+a")
    page.keyboard.type(values)
    go(page, "Run the sweep")
    page.keyboard.press("Enter")
    page.locator(".ds-status.ds-good", has_text="Sweep done: 2 runs").wait_for()


def test_the_controls_of_a_comparison_are_reached_in_their_order(page):
    for name in (
        "Compare",
        "a fox moves",
        "Model",
        "Method",
        "Preset",
        "number input for Sparsity",
        "range slider for Sparsity",
        "number input for Warm-up",
        "range slider for Warm-up",
        "Steps",
        "Frames",
        "Seed",
        "Width",
        "Height",
        "Guidance",
        "More settings",
    ):
        go(page, name)
    page.keyboard.press("Enter")
    for name in ("Negative prompt", "Block size", "Shortest sparse sequence", *TABS):
        go(page, name)


def test_a_comparison_is_started_and_played_with_keys(page, server):
    page.get_by_label("Prompt", exact=True).fill("")
    page.keyboard.type("a cat moves left")
    for name, value in (("Steps", "2"), ("Frames", "9"), ("Width", "32"), ("Height", "32"), ("Guidance", "1")):
        go(page, name)
        page.keyboard.press("Control+a")
        page.keyboard.type(value)
    go(page, "Compare", "Shift+Tab")
    page.keyboard.press("Enter")
    page.locator("#ds-told .ds-good", has_text="Done in").wait_for()
    go(page, "Pause")
    page.keyboard.press("Enter")
    go(page, "Frame")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    eventually(lambda: same(page.locator(".ds-readout").inner_text().split(",")[0].strip()[:11], "frame 2 / 9"))


def test_the_attention_view_is_used_with_keys(page):
    show_example(page)
    panel(page, "Attention")
    mask, told = page.locator("#ds-mask img"), page.locator(".ds-spot")
    told.wait_for()
    for name, key, begins in (
        ("range slider for Head", "ArrowRight", "Head 1: the query at row 2, column 2 of token frame 1"),
        ("range slider for Query: frame", "ArrowLeft", "Head 1: the query at row 2, column 2 of token frame 0"),
        ("range slider for Query: row", "ArrowRight", "Head 1: the query at row 3, column 2 of token frame 0"),
        ("range slider for Query: column", "ArrowLeft", "Head 1: the query at row 3, column 1 of token frame 0"),
    ):
        go(page, name)
        page.keyboard.press(key)
        told.filter(has_text=begins).wait_for()
    for name in ("Step", "Layer"):
        before = mask.get_attribute("src")
        go(page, name, "Shift+Tab")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        eventually(lambda before=before: differs(mask.get_attribute("src"), before))


def test_a_list_that_is_only_passed_changes_nothing(page):
    """A list tells of its value whenever it loses the focus, which must not set the others to their first values."""
    wanted = {"Steps": "7", "Top k, blocks kept per level": "3"}
    page.get_by_label("Method").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.get_by_label("Top k, blocks kept per level").wait_for()
    settle(page, wanted)
    page.get_by_label("Prompt", exact=True).focus()
    for name in ("Model", "Method", "Seed"):
        go(page, name)
    page.wait_for_timeout(1500)  # what would be set anew comes back from the server
    assert {label: field(page, label).input_value() for label in wanted} == wanted
    assert "Ready." in page.locator("#ds-told").inner_text()


def test_a_sweep_is_run_with_keys(page):
    show_example(page)
    sweep(page, "25, 75")


def test_the_gallery_is_used_with_keys(page, server):
    show_example(page)
    sweep(page, "30, 60")
    panel(page, "Gallery")
    go(page, "Thumbnail 1")
    page.keyboard.press("Enter")
    page.locator(".ds-status.ds-good", has_text="Shown:").wait_for()
    panel(page, "Gallery")
    go(page, "Keep the run that is shown")
    page.keyboard.press("Enter")
    page.get_by_text("Kept until it is given free").wait_for()
    assert any(run.kept for run in server.handlers.runs())
    for side, place in (("Left", 1), ("Right", 2)):
        go(page, side)
        for _ in range(place):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        eventually(lambda side=side: differs(page.get_by_label(side, exact=True).input_value(), ""))
    go(page, "Show both sparse results")
    page.keyboard.press("Enter")
    eventually(lambda: same(page.locator(".tabitem:visible diffsieve-player video").count(), 2))
