"""Seconds until a comparison of the app is there: what `docs/app.md` promises for mini-wan, on the machine at hand.

    PYTHONPATH=. python benchmarks/app_speed.py --out FOLDER [--browser | --without-page] [--device cuda]

Starts the app's server in this process and asks it through gradio_client, as a program would: once with the settings
that the page begins with, then with others. The first sparse run holds the compilation of the kernels; the last one is
warm. `--without-page` needs neither gradio nor gradio_client: it calls the handler that the page calls, with the same
values, which leaves out HTTP, Gradio's queue and the transfer of files. `--browser` needs Chromium and Playwright:
it starts server and page several times, from the moment when the model is loaded until the page is ready, then presses
Compare once and waits until both clips play. Writes `app_speed.json`, which says which of the three it was, and of each
run how much was sparse.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from diffsieve.app.controls import model_controls
from diffsieve.app.handlers import Handlers
from diffsieve.app.limits import Limits, Request
from diffsieve.app.models import Shelf, offered_models
from diffsieve.app.store import Store
from diffsieve.compare.files import write_json
from diffsieve.compare.report import environment
from diffsieve.pipelines.defaults import MINI_WAN

# What the page begins with, beside what depends on the model (`model_controls`).
PAGE = {"negative_prompt": "", "preset": "default", "sparsity": 0.5, "warmup": 0.2, "seed": 0, "class_name": None}
# All with another seed, so that nothing is reused: neither the run nor its dense clip.
OTHERS = {
    "other settings": {"seed": 1, "sparsity": 0.75, "min_tokens": 0},
    "other settings, warm": {"seed": 2, "sparsity": 0.75, "min_tokens": 0},
}
GOAL = {"cuda": 15.0, "cpu": 240.0}
GOAL_READY = 3.0
OPENINGS = 5

Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes what differs from the values of the page, returns report.json."""


@contextmanager
def page(shelf: Shelf, folder: Path) -> Iterator[Ask]:
    from diffsieve.app.server import ServerConfig, serve

    with serve(ServerConfig(folder=folder / "store"), shelf=shelf, examples=folder / "no-examples") as server:
        from gradio_client import Client

        client = Client(server.url, verbose=False, download_files=str(folder / "downloads"))
        try:
            yield lambda changes: client.predict(**changes, api_name="/compare")[-1]["report"]
        finally:
            client.close()


@contextmanager
def handler(shelf: Shelf, folder: Path) -> Iterator[Ask]:
    store = Store(folder / "store", examples=folder / "no-examples")
    store.open()
    model = shelf.get(shelf.names[0])
    limits = Limits.for_device(environment(model.pipe)["device"])
    handlers = Handlers(shelf, store, limits)
    begun = {name: control["value"] for name, control in model_controls(model, limits).items() if "value" in control}
    values = {"model": model.name, "min_tokens": None} | PAGE | begun

    def ask(changes: dict[str, Any]) -> dict[str, Any]:
        run = handlers.compare(Request(**values | changes), owner="benchmark", tell=lambda share, text: None)
        return dict(run.report)

    try:
        yield ask
    finally:
        store.close()


def look(shelf: Shelf, *, openings: int = OPENINGS) -> dict[str, Any]:
    """Return what `app_speed.json` holds of the page in a browser, without the command."""
    import gradio

    from diffsieve.app.server import ServerConfig, serve
    from tests.app.browser import launched, opened

    started = time.monotonic()
    model = shelf.get(shelf.names[0])
    seconds_load = time.monotonic() - started
    ready, load = [], os.getloadavg()[0]
    with launched() as browser, tempfile.TemporaryDirectory(prefix="diffsieve-app-speed-") as folder:
        for number in range(openings):
            last, config = number == openings - 1, ServerConfig(folder=Path(folder) / str(number))
            begun = time.monotonic()
            with serve(config, shelf=shelf, examples=Path(folder) / "no-examples") as server:
                with opened(browser, server.url) as watched:
                    watched.page.get_by_text("Nothing compared yet").wait_for()
                    ready.append(round(time.monotonic() - begun, 3))
                    if last:
                        cpu = time.process_time()
                        seconds = press(watched.page)
                        cpu = time.process_time() - cpu
                runs = server.handlers.runs()
        version = browser.version
    place = environment(model.pipe)
    return {
        "measured": "the page in Chromium over HTTP: ready after the model is loaded; both clips playing after Compare",
        "goal_seconds": GOAL.get(place["device"]),
        "goal_seconds_ready": GOAL_READY,
        "environment": place | {"gradio": gradio.__version__, "chromium": version},
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "model": model.name,
        "seconds_load": round(seconds_load, 3),
        "seconds_ready": ready,
        "seconds_ready_median": median(ready),
        "runs": [
            # Of all threads of the server; where other work shares the cores, less than the time that passes.
            {"run": "page's first settings", "seconds": round(seconds, 3), "seconds_of_processor": round(cpu, 3)}
            | figures(dict(runs[0].report))
        ],
    }


def press(page: Any) -> float:
    """Press Compare; return the seconds until both clips play."""
    page.set_default_timeout(1_800_000)
    begun = time.monotonic()
    page.get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_function(
        """() => { const clips = [...document.querySelectorAll('diffsieve-player video')].filter((v) => v.offsetParent);
             return clips.length === 2 && clips.every((v) => v.readyState >= 2 && !v.paused && v.currentTime > 0) }"""
    )
    return time.monotonic() - begun


def measure(shelf: Shelf, *, without_page: bool) -> dict[str, Any]:
    """Return what `app_speed.json` holds, without the command."""
    started = time.monotonic()
    model = shelf.get(shelf.names[0])
    loaded = time.monotonic()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="diffsieve-app-speed-") as folder,
        (handler if without_page else page)(shelf, Path(folder)) as ask,
    ):
        ready = time.monotonic()
        for name, changes in {"page's first settings": {}, **OTHERS}.items():
            begun = time.monotonic()
            report = ask(changes)
            seconds = time.monotonic() - begun
            rows.append({"run": name, "seconds": round(seconds, 3)} | figures(report))
            sys.stdout.write(f"{name}: {seconds:.1f} s\n")
            sys.stdout.flush()
    place = environment(model.pipe)
    return {
        "measured": "the handler that the page calls, without the page" if without_page else "/compare of the server",
        "goal_seconds": GOAL.get(place["device"]),
        "environment": place,
        "processor": platform.processor() or platform.machine(),
        "model": model.name,
        "seconds_load": round(loaded - started, 3),
        "seconds_start": round(ready - loaded, 3),
        "runs": rows,
    }


def figures(report: dict[str, Any]) -> dict[str, Any]:
    clip, settings = report["clips"][0], report["settings"]
    asked = ("steps", "frames", "width", "height", "sparsity", "warmup", "min_tokens")
    measured = ("backend", "density_overall", "steps_dense", "steps_total")
    return {
        "settings": {name: settings[name] for name in asked} | {"seed": clip["seed"]},
        "sparsity": {name: clip["sparsity"][name] for name in measured},
        "seconds_dense": clip["seconds"]["dense"]["total"],
        "seconds_sparse": clip["seconds"]["sparse"]["total"],
        "psnr": clip["metrics"]["psnr"]["mean"],
        "not_computed": {name: value["reason"] for name, value in clip["metrics"].items() if value["mean"] is None},
        "notes": clip["notes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for app_speed.json")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--without-page", action="store_true", help="call the page's handler; needs no gradio")
    way.add_argument("--browser", action="store_true", help="use the page in Chromium")
    parser.add_argument("--device", help="default: a GPU when there is one")
    options = parser.parse_args()
    shelf = Shelf({MINI_WAN: offered_models()[MINI_WAN]}, device=options.device)
    report = look(shelf) if options.browser else measure(shelf, without_page=options.without_page)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "app_speed.json", {"command": " ".join(["python", *sys.argv])} | report)


if __name__ == "__main__":
    main()
