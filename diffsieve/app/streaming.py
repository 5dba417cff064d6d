"""A handler at work, told step by step to whoever listens."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import DiffsieveError
from .errors import explain
from .jobs import Tell

Result = TypeVar("Result")


@dataclass(frozen=True)
class Step:
    """Progress: the share that is done, in [0, 1], and a line for people."""

    share: float
    text: str


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The end: a result, or an error in words for the page."""

    result: Result | None = None
    error: DiffsieveError | None = None


def stream(work: Callable[[Tell], Result], cancel: Callable[[], object]) -> Iterator[Step | Done[Result]]:
    """Run `work` in a thread and yield its progress as it comes, at last its result.

    Args:
        work: told where its progress goes.
        cancel: called when the listener goes away before the end.
    """
    messages: queue.SimpleQueue[Step | Done[Result]] = queue.SimpleQueue()

    def run() -> None:
        try:
            messages.put(Done(result=work(lambda share, text: messages.put(Step(share, text)))))
        except BaseException as error:
            messages.put(Done(error=explain(error)))

    threading.Thread(target=run, daemon=True, name="diffsieve-run").start()
    finished = False
    try:
        while not finished:
            message = messages.get()
            while isinstance(message, Step) and not messages.empty():  # a slow listener gets the newest
                message = messages.get()
            finished = isinstance(message, Done)
            yield message
    finally:
        if not finished:
            cancel()
