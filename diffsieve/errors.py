"""Exceptions of diffsieve.

Everything that diffsieve raises on purpose derives from `DiffsieveError`, so a caller can catch it alone. The two
subclasses also derive from the builtin that a caller without knowledge of diffsieve would expect.
"""


class DiffsieveError(Exception):
    """Base of all errors that diffsieve raises on purpose."""


class UserInputError(DiffsieveError, ValueError):
    """An argument, option or file is wrong. The message names it, what was expected and what came."""


class BackendUnavailableError(DiffsieveError, RuntimeError):
    """A backend that was asked for by name cannot run here. The message says why and what to do."""
