"""Take the picture of the page for the documentation: `python -m tests.app.shoot docs/images/app.png [EXAMPLES]`."""

import sys
import tempfile
from pathlib import Path

from diffsieve.app.server import ServerConfig, serve
from tests.app.browser import launched, opened

WIDTH, HEIGHT = 1366, 800


def shoot(target: Path, examples: Path | None = None) -> None:
    """Open the page with the first example of clips, stopped at its middle frame, and save what the window shows."""
    with (
        tempfile.TemporaryDirectory() as folder,
        launched() as browser,
        serve(ServerConfig(folder=Path(folder) / "store"), examples=examples) as server,
        opened(browser, server.url, width=WIDTH, height=HEIGHT) as watched,
    ):
        page = watched.page
        page.locator("#ds-examples button", has_text="BA-Att").first.click()
        page.locator("diffsieve-player video").first.wait_for()
        page.get_by_role("button", name="Pause").click()
        page.get_by_label("Frame", exact=True).fill("12")
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(800)
        page.mouse.move(5, HEIGHT - 5)
        target.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=target)


if __name__ == "__main__":
    shoot(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
