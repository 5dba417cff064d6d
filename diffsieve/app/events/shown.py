"""The run that is shown: its player, figures, downloads and Python lines, and where its attention looked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from .. import figures, views
from ..components import Page
from ..errors import AppError
from ..handlers import Handlers
from ..snippet import python_lines
from ..store import Run, Store
from .attention import AttentionEvents

_FILES = {
    "dense": "Dense {what}",
    "sparse": "Sparse {what}",
    "side_by_side": "Side by side",
    "difference_clip": "Difference",
    "difference_map": "Difference",
    "difference": "Difference picture",
    "mask": "Block mask",
    "masks": "All block masks",
    "selections": "All chosen keys",
    "report": "Report",
}


class Shown:
    """Fills the tabs with a run.

    Args:
        page: laid out.
        handlers: know the runs.
        attention: shows the block masks.
    """

    def __init__(self, page: Page, handlers: Handlers, attention: AttentionEvents) -> None:
        self.page, self.handlers, self.attention = page, handlers, attention

    def components(self) -> list[Any]:
        """Return what `show` sets."""
        page = self.page
        return [page.current, page.tabs, *vars(page.results).values(), *vars(page.attention).values()]

    def show(self, run: Run, tab: str | None = "compare") -> dict[Any, Any]:
        """Return the updates that show a run.

        Args:
            run: finished.
            tab: to open; `None` leaves the one that is open.

        Raises:
            AppError: a file of the run is gone.
        """
        page, results, store = self.page, self.page.results, self.handlers.store
        label, settings = views.run_label(run), run.report["settings"]
        difference = store.publish(run, "difference_map" if run.pictures else "difference_clip")
        end = run.clip.get("difference_scale_end")
        updates: dict[Any, Any] = {
            page.current: run.id,
            results.headline: figures.headline(run),
            results.player: views.player(
                ("dense", published(store, run, "dense")),
                (label, published(store, run, "sparse")),
                fps=settings["fps"],
                frames=settings["frames"],
                title=f"{run.clip['prompt']}: dense and {label}",
                difference=(difference, end) if difference is not None and end is not None else None,
                psnr=run.clip["metrics"]["psnr"]["per_frame"],
            ),
            results.metrics: figures.metrics_table([(label, run)]),
            results.curves: figures.curves([(label, run)]),
            results.cost: figures.cost_table([(label, run)]),
            results.facts: views.facts(run),
            results.files: self._downloads(run),
            results.code: python_lines(run.report),
            results.report: dict(run.report),
        }
        if tab is not None:
            updates[page.tabs] = gr.update(selected=tab)
        return updates | self.attention.show(run)

    def _downloads(self, run: Run) -> str:
        store = self.handlers.store
        found = [(label.format(what=run.what), store.publish(run, key)) for key, label in _FILES.items()]
        script = store.publish_text(run, "compare.py", python_lines(run.report))
        files = [(label, path) for label, path in found if path is not None]
        return views.downloads([*files, ("Python lines", script)])


def published(store: Store, run: Run, key: str) -> Path:
    """Return a published file that the page cannot do without.

    Raises:
        AppError: it is gone.
    """
    path = store.publish(run, key)
    if path is None:
        raise AppError(f"a {run.what} of this run is gone; run it again")
    return path
