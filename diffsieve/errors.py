"""Exceptions of diffsieve.

Everything that diffsieve raises on purpose derives from `DiffsieveError`, so a caller can catch it alone. The two
subclasses also derive from the builtin that a caller without knowledge of diffsieve would expect.
"""

from typing import NoReturn


class DiffsieveError(Exception):
    """Base of all errors that diffsieve raises on purpose."""


class UserInputError(DiffsieveError, ValueError):
    """An argument, option or file is wrong. The message names it, what was expected and what came."""


class BackendUnavailableError(DiffsieveError, RuntimeError):
    """A backend that was asked for by name cannot run here. The message says why and what to do."""


def refuse(name: str, expected: str, got: object) -> NoReturn:
    """Raise a `UserInputError` about an argument. Words are put together here or by the caller, after it failed."""
    raise UserInputError(f"{name} must be {expected}, got {got}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, NumPy or PyTorch says that the memory of the CPU or of a GPU is used up."""
    # PyTorch has a class for its own allocators of GPUs alone; the others raise a RuntimeError.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def os_reason(error: OSError) -> str:
    """Return why a file operation failed, without the path: not every error has the words of the system."""
    return error.strerror or str(error) or type(error).__name__
