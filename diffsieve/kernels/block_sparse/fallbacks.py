"""What becomes of a backend whose kernel cannot be built: "auto" leaves it out from then on, and says so once.

A kernel is built anew for each kind of GPU, so a failure speaks for the GPUs of one compute capability alone.
"""

from __future__ import annotations

import logging
import traceback

import torch

from ...errors import BackendUnavailableError, DiffsieveError, is_out_of_memory

logger = logging.getLogger(__name__)

# Backend and compute capability (None: not a CUDA GPU) -> why its kernel could not be built in this process.
FAILED: dict[tuple[str, tuple[int, int] | None], str] = {}
# Packages that compile and launch kernels.
_BUILDERS = ("triton", "flash_attn")
_said: set[str] = set()


def is_build_failure(error: Exception) -> bool:
    """Whether a launch failed before the GPU had a part in it: in Triton's front end, its compiler or its loader.

    Args:
        error: as it was caught, with its traceback. One that passed through none of the packages that build kernels
            is a fault of the code around the launch, which no other backend mends.
    """
    if isinstance(error, DiffsieveError) or is_out_of_memory(error):
        return False
    # Of the driver or the runtime of CUDA: another kernel would fail as well.
    if "[CUDA]" in str(error) or "CUDA error" in str(error):
        return False
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module.partition(".")[0] in _BUILDERS for module in modules)


def failure(backend: str, device: torch.device) -> str | None:
    """Why the kernel of a backend could not be built for such a GPU in this process, or None."""
    return FAILED.get((backend, _capability(device))) if FAILED else None


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def give_up(backend: str, device: torch.device, error: Exception, *, asked: str) -> None:
    """Leave a backend out of "auto" from now on, on GPUs like this one.

    Args:
        backend: whose kernel failed.
        device: the GPU that it was built for.
        error: what it failed with (see `is_build_failure`).
        asked: what the caller asked for.

    Raises:
        BackendUnavailableError: `asked` is not "auto".
    """
    lines = str(error).strip().splitlines()
    reason = f"could not be built ({': '.join([type(error).__name__, *lines[-1:]])})"
    if asked != "auto":
        raise BackendUnavailableError(f'backend="{asked}" {reason}; use backend="auto" or "torch"') from error
    FAILED[backend, _capability(device)] = reason


def say_once(message: str) -> None:
    """Log a warning, the first time that it comes up."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)
