"""Comparisons and sweeps on the page: started, followed step by step, cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from .. import figures, views
from ..components import Page
from ..errors import CancelledError
from ..handlers import Handlers
from ..jobs import Tell
from ..limits import Request, parse_sweep
from ..streaming import Done, stream
from .calls import MODEL_QUEUE, PRIVATE, owner_of
from .shown import Shown


class RunEvents:
    """Compare, Run the sweep, Cancel, and leaving the page.

    Args:
        page: laid out.
        handlers: make the runs.
        shown: shows the results.
    """

    def __init__(self, page: Page, handlers: Handlers, shown: Shown) -> None:
        self.page, self.handlers, self.shown = page, handlers, shown

    def attach(self) -> None:
        page, ask = self.page, self.page.ask
        outputs = [page.status, page.run, page.cancel, page.sweep_run, *self.shown.components()]
        # Without Gradio's own checks of the values: ours name the field, and are there for programs too.
        raw: dict[str, Any] = {"preprocess": False, **PRIVATE}
        started = [
            gr.on([page.run.click, ask.prompt.submit], self.on_compare, ask.list(), outputs, **MODEL_QUEUE, **raw,
                  show_progress="minimal", show_progress_on=page.status, trigger_mode="once"),
            page.sweep_run.click(self.on_sweep, [*ask.list(), page.sweep_values], [*outputs, page.sweep],
                                 **MODEL_QUEUE, **raw, show_progress="minimal", show_progress_on=page.status),
        ]  # fmt: skip
        page.cancel.click(self.on_cancel, None, [page.status, page.run, page.cancel, page.sweep_run], queue=False,
                          cancels=started, **PRIVATE)  # fmt: skip
        page.blocks.unload(self.on_leave)

    def on_compare(self, request: gr.Request, *values: Any) -> Iterator[dict[Any, Any]]:
        owner, started = owner_of(request), time.monotonic()

        def work(tell: Tell) -> dict[Any, Any]:
            run = self.handlers.compare(Request(*values), owner=owner, tell=tell)
            shown = self.shown.show(run)
            return self._idle(views.done_line(run, time.monotonic() - started)) | shown

        yield from self._stream(work, owner)

    def on_sweep(self, request: gr.Request, *values: Any) -> Iterator[dict[Any, Any]]:
        owner = owner_of(request)

        def work(tell: Tell) -> dict[Any, Any]:
            asked = Request(*values[:-1])
            runs = self.handlers.sweep(asked, parse_sweep(values[-1], asked.method), owner=owner, tell=tell)
            shown = self.shown.show(runs[-1], tab=None) | {self.page.sweep: figures.sweep_charts(runs)}
            return self._idle(views.status(f"Sweep done: {len(runs)} runs, all in the gallery.", "good")) | shown

        yield from self._stream(work, owner)

    def _stream(self, work: Callable[[Tell], dict[Any, Any]], owner: str) -> Iterator[dict[Any, Any]]:
        """Yield updates of the page while `work` runs, then those it returns; a failure ends as a line and a toast.

        Making what is shown is part of the work: when a file cannot be published, the buttons come back too.
        """
        page = self.page
        yield {
            page.status: views.progress(0.0, "starting"),
            page.run: gr.update(interactive=False),
            page.sweep_run: gr.update(interactive=False),
            page.cancel: gr.update(interactive=True),
        }
        for message in stream(work, lambda: self.handlers.cancel(owner)):
            if not isinstance(message, Done):
                yield {page.status: views.progress(message.share, message.text)}
            elif message.result is not None:
                yield message.result
            else:
                text = str(message.error)
                if not isinstance(message.error, CancelledError):
                    gr.Warning(views.plain(text), title="Not compared", duration=12)
                yield self._idle(views.status(f"Not done: {text}", "bad"))

    def _idle(self, line: str) -> dict[Any, Any]:
        page = self.page
        return {
            page.status: line,
            page.run: gr.update(interactive=True),
            page.sweep_run: gr.update(interactive=True),
            page.cancel: gr.update(interactive=False),
        }

    def on_cancel(self, request: gr.Request) -> tuple[Any, ...]:
        self.handlers.cancel(owner_of(request))
        line = views.status("Cancelled: the step at work ends first, nothing of the run is kept.")
        return line, gr.update(interactive=True), gr.update(interactive=False), gr.update(interactive=True)

    def on_leave(self, request: gr.Request) -> None:
        self.handlers.cancel(owner_of(request))
