"""Finished runs: examples and the gallery, opened, kept, and two of them against each other."""

from __future__ import annotations

from typing import Any

import gradio as gr

from .. import figures, views
from ..components import Followed, Page
from ..errors import explain
from ..handlers import Handlers
from ..store import Run
from .calls import PRIVATE, told
from .settings import SettingsEvents
from .shown import Shown, published


class GalleryEvents:
    """The examples and the tab of finished runs.

    Args:
        page: laid out.
        handlers: know the runs.
        shown: shows the one that is opened.
        settings: sets the controls to what it was made with.
    """

    def __init__(self, page: Page, handlers: Handlers, shown: Shown, settings: SettingsEvents) -> None:
        self.page, self.handlers, self.shown, self.settings = page, handlers, shown, settings

    def attach(self) -> None:
        page, ask, gallery = self.page, self.page.ask, self.page.gallery
        hidden: dict[str, Any] = {"show_progress": "hidden", **PRIVATE}
        opened = [page.status, *self.shown.components(), *self.settings.components()]
        page.examples.click(self.on_example, [page.examples, ask.model, page.followed], opened, **hidden)
        listing = [gallery.none, gallery.pictures, gallery.ids, gallery.left, gallery.right]
        for trigger in (page.blocks.load, page.current.change):
            trigger(self.on_list_runs, [gallery.left, gallery.right], listing, **hidden)
        gallery.pictures.select(self.on_open, [gallery.ids, ask.model, page.followed], opened, **hidden)
        gallery.keep.click(self.on_keep, page.current, [gallery.told, gallery.keep], **hidden)
        gallery.keep.click(self.on_list_runs, [gallery.left, gallery.right], listing, **hidden)
        page.current.change(self.on_other_run, page.current, [gallery.told, gallery.keep], **hidden)
        gallery.both.click(self.on_pair, [gallery.left, gallery.right], [gallery.player, gallery.table],
                           show_progress="minimal", show_progress_on=gallery.player, **PRIVATE)  # fmt: skip

    def on_example(self, number: Any, chosen: Any, followed: Followed) -> dict[Any, Any]:
        examples = [run for run in self.handlers.runs() if run.example]
        if not isinstance(number, int) or not 0 <= number < len(examples):
            raise gr.Error("this example is not there", print_exception=False)
        return self._open(examples[number], chosen, followed)

    def on_open(self, ids: Any, chosen: Any, followed: Followed, event: gr.SelectData) -> dict[Any, Any]:
        with told():
            run = self.handlers.store.find(ids[event.index])
        return self._open(run, chosen, followed)

    def _open(self, run: Run, chosen: Any, followed: Followed) -> dict[Any, Any]:
        with told():
            settings, shown = self.settings.of_run(run, chosen, followed), self.shown.show(run)
        line = f"Shown: {views.run_title(run)}"
        if not settings:
            line += ". Its model is not offered any more, so the settings stay as they were."
        return {self.page.status: views.status(line, "good")} | shown | settings

    def on_list_runs(self, left: Any, right: Any) -> tuple[Any, ...]:
        with told():
            runs = self.handlers.runs()
            posters = [self.handlers.store.publish(run, "poster") for run in runs]
        titles = [views.run_title(run) for run in runs]
        ids = [run.id for run in runs]
        pictures = [(str(p), title) for p, title in zip(posters, titles, strict=True) if p is not None]
        shown = [run_id for run_id, p in zip(ids, posters, strict=True) if p is not None]
        choices = list(zip(titles, ids, strict=True))
        first = left if left in ids else next(iter(ids), None)
        second = right if right in ids and right != first else next((run_id for run_id in ids if run_id != first), None)
        # A value that stays is not sent: another one may have been chosen while the list was made.
        chosen = (
            gr.update(choices=choices) if value == before else gr.update(choices=choices, value=value)
            for value, before in ((first, left), (second, right))
        )
        return gr.update(visible=not pictures), gr.update(value=pictures, visible=bool(pictures)), shown, *chosen

    def on_keep(self, run_id: Any) -> tuple[Any, Any]:
        if run_id is None:
            return views.status("Nothing is shown yet that could be kept.", "bad"), gr.skip()
        try:
            run = self.handlers.store.find(run_id)
            run = self.handlers.store.keep(run_id, not run.kept)
        except Exception as error:
            return views.status(f"Not changed: {explain(error)}", "bad"), gr.skip()
        line = "Kept until it is given free." if run.kept else "Given free: it goes after a week."
        return views.status(line, "good"), self._button(run)

    def on_other_run(self, run_id: Any) -> tuple[str, Any]:
        """Say whether the run that is shown now is kept."""
        run = self.handlers.store.get(run_id)
        return views.keeping(run), self._button(run)

    @staticmethod
    def _button(run: Run | None) -> Any:
        free = run is not None and run.kept
        return gr.update(value="Give the run that is shown free" if free else "Keep the run that is shown")

    def on_pair(self, left: Any, right: Any) -> tuple[str, str]:
        with told():
            runs = self.handlers.pair(left, right)
            labels = [views.run_label(run) for run in runs]
            if labels[0] == labels[1]:
                labels = [f"{label}, seed {run.clip['seed']}" for label, run in zip(labels, runs, strict=True)]
            settings = runs[0].report["settings"]
            sides = [(label, published(self.handlers.store, run, "sparse"))
                     for label, run in zip(labels, runs, strict=True)]  # fmt: skip
        player = views.player(
            sides[0], sides[1], fps=settings["fps"], frames=settings["frames"], title=" and ".join(labels)
        )
        named = list(zip(labels, runs, strict=True))
        return player, figures.metrics_table(named) + figures.curves(named) + figures.cost_table(named)
