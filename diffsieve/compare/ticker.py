"""Lines of progress with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable


class Ticker:
    """Counts pieces of work and tells a line for each.

    Args:
        total: pieces that this process has to do.
        tell: where the lines go, or `None`.
    """

    def __init__(self, total: int, tell: Callable[[str], None] | None) -> None:
        self._total, self._tell = total, tell
        self._done, self._started = 0, time.monotonic()

    def tick(self, text: str) -> None:
        """Note that a piece is done."""
        self._done += 1
        if self._tell is not None:
            left = (time.monotonic() - self._started) / self._done * (self._total - self._done)
            self._tell(f"[{self._done}/{self._total}, {_clock(left)} left] {text}")


def _clock(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}:{minutes % 60:02d}:{int(seconds) % 60:02d}"
