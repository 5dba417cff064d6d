"""Progress of `train` on stderr: a bar for each stage in a terminal, a line every few seconds in a log file."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from ..pipelines.training.loop import LogEntry

_LINE_EVERY = 5.0  # seconds
_TITLES = {
    "data": "pictures",
    "vae": "autoencoder",
    "decoder": "decoder",
    "dit": "transformer",
    "finish": "export and measure",
}


class TrainProgress:
    """Shows the log entries of a run; used as a context manager.

    Args:
        console: where to draw; default stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._last_line = 0.0

    def __enter__(self) -> Self:
        for name in ("diffusers", "transformers", "httpx"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def announce(self, name: str) -> None:
        """A part of the plan begins."""
        if self._console.is_terminal:
            self._task = self._bars.add_task(
                _TITLES[name], total=1.0 if name not in ("data", "finish") else None, detail=""
            )
        else:
            self._console.print(f"{_TITLES[name]}: begins", highlight=False)

    def report(self, entry: LogEntry) -> None:
        """A line of the stage log."""
        losses = " ".join(f"{name} {value:.4f}" for name, value in entry.losses.items())
        details = " ".join(f"{name} {value:.0f}" for name, value in entry.details.items())
        speed = f"{entry.samples_per_second:.0f}/s, {details + ', ' if details else ''}{entry.memory_gib:.1f} GiB"
        if self._console.is_terminal:
            if self._task is not None:
                detail = f"step {entry.step} loss {entry.losses['loss']:.4f} {speed}"
                self._bars.update(self._task, completed=entry.progress, detail=detail)
        elif entry.progress >= 1 or time.monotonic() - self._last_line > _LINE_EVERY:
            self._last_line = time.monotonic()
            self._console.print(
                f"{entry.stage} step {entry.step} ({entry.progress:.0%}, {entry.seconds:.0f} s) {losses} | {speed}",
                highlight=False,
                soft_wrap=True,
            )
