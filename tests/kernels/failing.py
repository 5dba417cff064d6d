"""Errors as they come out of a package that builds kernels."""

from typing import Any, NoReturn


def raise_in(package: str, error: Exception) -> NoReturn:
    """Raise from a function that belongs to a module of `package`."""
    namespace: dict[str, Any] = {"__name__": f"{package}.compiler"}
    exec("def build(error):\n    raise error\n", namespace)
    namespace["build"](error)
    raise AssertionError("unreachable")
