"""One generation at a time, whoever asks; cancelling; and how long it will take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..compare import Progress
from .errors import CancelledError

Tell = Callable[[float, str], None]
"""Told the share that is done, in [0, 1], and a line for people."""


@dataclass(eq=False)
class Job:
    """Work of one owner.

    Args:
        owner: session that asked for it.
    """

    owner: str
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self._cancelled.set()

    def check(self) -> None:
        """Raise `CancelledError` when the job was cancelled; called after every step."""
        if self._cancelled.is_set():
            raise CancelledError("cancelled; nothing of this run was kept")


class Jobs:
    """Lets one job run; the others wait for it.

    Gradio's queue does the same for its events, but a cancelled event whose thread still works, or a handler called
    from Python, must not share the model either.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._known: list[Job] = []
        self._guard = threading.Lock()

    @contextmanager
    def run(self, owner: str) -> Iterator[Job]:
        """Wait for the turn, then hold it inside the `with` block.

        Raises:
            CancelledError: cancelled while waiting.
        """
        job = Job(owner)
        with self._guard:
            self._known.append(job)
        try:
            while not self._turn.acquire(timeout=0.1):
                job.check()
            try:
                job.check()
                yield job
            finally:
                self._turn.release()
        finally:
            with self._guard:
                self._known.remove(job)

    def cancel(self, owner: str) -> int:
        """Cancel all jobs of an owner, running or waiting; return how many."""
        with self._guard:
            jobs = [job for job in self._known if job.owner == owner]
        for job in jobs:
            job.cancel()
        return len(jobs)

    def cancel_all(self) -> None:
        """Cancel every job; for the end of the server."""
        with self._guard:
            jobs = list(self._known)
        for job in jobs:
            job.cancel()

    @property
    def busy(self) -> bool:
        """Whether a job holds the turn."""
        return self._turn.locked()


class Follow:
    """Progress of a comparison as a share and a line with the time left; checks for cancelling at every step.

    Args:
        job: the job at work.
        tell: where the progress goes.
        number: of this comparison, from 0.
        count: comparisons in all.
        clock: seconds.
        what: is made, "clip" or "picture".
    """

    def __init__(
        self,
        job: Job,
        tell: Tell,
        number: int = 0,
        count: int = 1,
        clock: Callable[[], float] = time.monotonic,
        what: str = "clip",
    ) -> None:
        self._job, self._tell, self._number, self._count, self._clock = job, tell, number, count, clock
        self._what = what
        self._started: float | None = None
        self._had_dense = False

    def __call__(self, report: Progress) -> None:
        self._job.check()
        now = self._clock()
        if self._started is None:
            self._started = now
        self._had_dense |= report.run == "dense"
        # A dense clip that an earlier run left is not counted.
        all_steps = report.steps * (2 if self._had_dense else 1)
        done = report.step + (report.steps if self._had_dense and report.run == "sparse" else 0)
        share = min(done / max(all_steps, 1), 1.0)
        self._tell((self._number + 0.97 * share) / self._count, self._line(report, share, now - self._started))

    def _line(self, report: Progress, share: float, elapsed: float) -> str:
        place = f"run {self._number + 1} of {self._count}, " if self._count > 1 else ""
        if report.stage == "write":
            return f"{place}measuring and writing {self._what}s"
        if report.stage == "done":
            return f"{place}done"
        what = f"{place}{report.run} {self._what}, "
        if report.stage == "decode":
            return f"{what}decoding{self._left(share, elapsed)}"
        return f"{what}step {min(report.step + 1, report.steps)} of {report.steps}{self._left(share, elapsed)}"

    def _left(self, share: float, elapsed: float) -> str:
        if share <= 0.0 or share >= 1.0:
            return ""
        seconds = elapsed * (1.0 - share) / share
        return f", about {duration(seconds)} left" + (" of this run" if self._count > 1 else "")


def duration(seconds: float) -> str:
    """Return seconds for people: "8 s", "2 min 5 s", "1 h 10 min"."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
