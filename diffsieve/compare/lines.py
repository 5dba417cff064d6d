"""Results that grow line by line: one JSON object a line, whole or absent, one file for each process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserInputError


def read_lines(folder: Path, stem: str) -> list[dict[str, Any]]:
    """Return the objects of all files `<stem>-*.jsonl`; a line that a killed process left unfinished does not count.

    Raises:
        UserInputError: a finished line is no JSON object.
    """
    found = []
    for path in sorted(folder.glob(f"{stem}-*.jsonl")):
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise UserInputError(f"{path} must hold one JSON object on each line, got something else in {number}")
            found.append(value)
    return found


class LineWriter:
    """Appends objects to a file, each in one write."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def append(self, value: Mapping[str, Any]) -> None:
        """Add a line; NaN and infinity are refused, because they are not JSON."""
        line = (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode()
        written = os.write(self._handle, line)
        if written != len(line):  # a full disk: take the torn line back, nothing is half there
            os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
            raise OSError("no space left to write a result")
        os.fsync(self._handle)


@contextmanager
def line_writer(path: Path) -> Iterator[LineWriter]:
    """Open a file of lines for one process; a torn last line is cut off.

    Raises:
        UserInputError: another process writes to it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError as error:
            raise UserInputError(f"{path} must not be in use by another run; give each process a shard") from error
        text = path.read_bytes()
        os.ftruncate(handle, text.rfind(b"\n") + 1)
        yield LineWriter(handle)
    finally:
        os.close(handle)
