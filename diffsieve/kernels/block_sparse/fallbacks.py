"""What becomes of a backend whose kernel cannot be built: "auto" leaves it out from then on, and says so once."""

from __future__ import annotations

import logging

from ...errors import BackendUnavailableError, DiffsieveError, is_out_of_memory

logger = logging.getLogger(__name__)

# Backend -> why its kernel could not be built in this process.
FAILED: dict[str, str] = {}
_said: set[str] = set()


def is_build_failure(error: Exception) -> bool:
    """Whether a launch failed before the GPU had a part in it: in Triton's front end, its compiler or its loader."""
    if isinstance(error, DiffsieveError) or is_out_of_memory(error):
        return False
    # Of the driver or the runtime of CUDA: another kernel would fail as well.
    return "[CUDA]" not in str(error) and "CUDA error" not in str(error)


def give_up(backend: str, error: Exception, *, asked: str) -> None:
    """Leave a backend out of "auto" from now on.

    Args:
        backend: whose kernel failed.
        error: what it failed with (see `is_build_failure`).
        asked: what the caller asked for.

    Raises:
        BackendUnavailableError: `asked` is not "auto".
    """
    lines = str(error).strip().splitlines()
    reason = f"could not be built ({': '.join([type(error).__name__, *lines[-1:]])})"
    if asked != "auto":
        raise BackendUnavailableError(f'backend="{asked}" {reason}; use backend="auto" or "torch"') from error
    FAILED[backend] = reason


def say_once(message: str) -> None:
    """Log a warning, the first time that it comes up."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)
