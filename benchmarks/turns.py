"""Several processes on one GPU: they prepare side by side, and have the GPU one at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """Wait until no other process is inside a turn of the same file; `None` does not wait.

    The system ends the turn of a process that is killed.
    """
    if file is None:
        yield
        return
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
