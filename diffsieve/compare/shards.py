"""Long runs in parts: over several processes, and in legs of bounded time."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import UserInputError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard:
    """The share of one process: items `index`, `index + count`, ... of the list.

    Args:
        index: from 0.
        count: processes in all.
        device: GPU of this process where the launcher names one, else `None`.
    """

    index: int = 0
    count: int = 1
    device: str | None = None

    def of(self, items: Sequence[Item]) -> list[Item]:
        """Return the items of this process."""
        return list(items[self.index :: self.count])


def resolve_shard(text: str | None, environ: Mapping[str, str] | None = None) -> Shard:
    """Return the share from `--shard I/N` (from 0), or else from the variables that torchrun and accelerate set.

    Raises:
        UserInputError: not of that form, or the index is not below the count.
    """
    environ = os.environ if environ is None else environ
    if text is not None:
        found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if found is None or not int(found[1]) < int(found[2]):
            raise UserInputError(f"shard must be I/N with I from 0 to N - 1, such as 0/2, got {text!r}")
        return Shard(int(found[1]), int(found[2]))
    if "RANK" in environ and "WORLD_SIZE" in environ:
        local = environ.get("LOCAL_RANK", "0")
        return Shard(int(environ["RANK"]), int(environ["WORLD_SIZE"]), f"cuda:{local}")
    return Shard()


class Deadline:
    """Says when a leg has to stop: before a piece of work that would not end in time, judged by the longest so far."""

    def __init__(self, max_seconds: float | None, started: float | None = None) -> None:
        """Args: max_seconds: `None` for no limit; started: `time.monotonic()` of the start, default now.

        Raises:
            UserInputError: not above 0.
        """
        if max_seconds is not None and not max_seconds > 0:
            raise UserInputError(f"max_seconds must be above 0, got {max_seconds}")
        self._end = None if max_seconds is None else (time.monotonic() if started is None else started) + max_seconds
        self._longest = 0.0
        self._last: float | None = None

    def begin(self) -> None:
        """Note that a piece of work starts."""
        self._last = time.monotonic()

    def end(self) -> None:
        """Note that it is done."""
        assert self._last is not None
        self._longest = max(self._longest, time.monotonic() - self._last)

    @property
    def passed(self) -> bool:
        """Whether no further piece of work fits in."""
        return self._end is not None and time.monotonic() + self._longest > self._end
