"""Progress of `generate` and `compare` on stderr: bars with the time left in a terminal, lines in a log file."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ..pipelines.defaults import EMBEDDED

if TYPE_CHECKING:
    from ..compare import Progress


class RunProgress:
    """Shows the reports of a run; used as a context manager, and called with each `Progress`.

    Args:
        model: what is loaded first; the bars start with the first report, and leave the terminal to the bars of a
            download until then.
        runs: what is generated for each prompt and seed, in order; by default one run.
        console: where to draw; default stderr.
    """

    def __init__(self, model: str, runs: tuple[str, ...] = ("",), console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._model = model
        self._runs = runs
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[stage]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._total: TaskID | None = None
        self._item = -1
        self._started = 0.0

    def __enter__(self) -> Self:
        self._console.print(f"loading {self._model}", highlight=False, markup=False)
        if self._model in EMBEDDED:
            _disable_loading_bars()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, report: Progress) -> None:
        if self._console.is_terminal:
            self._bars.start()
            self._draw(report)
        else:
            self._log(report)

    def _draw(self, report: Progress) -> None:
        if report.items > 1 and self._total is None:
            steps = report.items * report.steps * len(self._runs)
            self._total = self._bars.add_task("all", total=steps, stage="")
        if report.item != self._item:
            self._item = report.item
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._tasks.clear()
        if report.run not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, stage="")
            self._tasks[report.run] = self._bars.add_task(self._name(report), total=report.steps, stage="")
        stage = "" if report.stage in ("denoise", "done") else report.stage
        self._bars.update(self._tasks[report.run], completed=report.step, stage=stage)
        if self._total is not None:
            done = self._runs.index(report.run) if len(self._runs) > 1 else 0
            before = report.item * len(self._runs) + done
            self._bars.update(self._total, completed=before * report.steps + report.step)

    def _log(self, report: Progress) -> None:
        if report.stage == "denoise" and report.step == 0:
            self._started = time.perf_counter()
            self._console.print(f"{self._name(report)}: {report.steps} steps", highlight=False)
        elif report.stage == "decode":
            seconds = time.perf_counter() - self._started
            self._console.print(f"{self._name(report)}: done in {seconds:.1f} s, decoding", highlight=False)

    def _name(self, report: Progress) -> str:
        place = f"{report.item + 1}/{report.items} " if report.items > 1 else ""
        return f"{place}seed {report.seed} {report.run}"


def _disable_loading_bars() -> None:
    """Switch off the loading bars of diffusers and transformers: there is nothing to wait for with a small model."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
