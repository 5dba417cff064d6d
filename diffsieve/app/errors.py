"""What a user of the page is told when something fails: one sentence, without paths and without a trace."""

from __future__ import annotations

import errno
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any

from ..errors import DiffsieveError, is_out_of_memory

logger = logging.getLogger(__name__)

_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+=-]+){2,}[/\\]?")
_MOST = 600


class CancelledError(DiffsieveError):
    """The run was cancelled by the user who started it, or that user has gone."""


class AppError(DiffsieveError):
    """A failure in words for the page."""


def without_paths(text: str) -> str:
    """Replace file paths by the words "a path on the server"."""
    return _PATH.sub("a path on the server", text)


def public_report(report: Any, *, said: bool = False) -> Any:
    """Return JSON values with `without_paths` applied to reasons and notes, which may name a folder of the server.

    Args:
        report: what report.json holds, or a part of it.
        said: whether texts of this part are reasons or notes.
    """
    if isinstance(report, str):
        return without_paths(report) if said else report
    if isinstance(report, Mapping):
        return {key: public_report(value, said=said or key in ("reason", "notes")) for key, value in report.items()}
    return [public_report(value, said=said) for value in report] if isinstance(report, list) else report


def explain(error: BaseException) -> DiffsieveError:
    """Return what to show for an error; what is not expected goes to the log under a number that is shown.

    Args:
        error: anything that a handler raised.
    """
    if isinstance(error, CancelledError):
        return error
    if isinstance(error, DiffsieveError):
        return AppError(without_paths(" ".join(str(error).split()))[:_MOST])
    number = secrets.token_hex(4)
    logger.error("request %s failed", number, exc_info=error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return AppError(f"the disk of the server is full; finished runs are still there (entry {number} of the log)")
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return AppError(
            f"the server may not write a file of this size; finished runs are still there (entry {number} of the log)"
        )
    if is_out_of_memory(error):
        return AppError(
            f"the memory does not hold this run: take fewer frames or a smaller size (entry {number} of the log)"
        )
    return AppError(f"the run failed with {type(error).__name__}; entry {number} of the log says more")
