"""Arithmetic in the dtypes of the arguments, also where autocast is on around a call.

Autocast does products of fp32 matrices in 16 bits, inside custom ops too. Scores, statistics and log-sum-exps are fp32
because they need it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["no_autocast", "without_autocast"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NOTHING = nullcontext()


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Context without autocast on the device of `x`."""
    # Asked first, since it takes a quarter of the time of asking for one device. "meta" cannot be asked for.
    if not torch._C._is_any_autocast_enabled() or x.is_meta:
        return _NOTHING
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, in `no_autocast` of the first tensor that it gets, alone or at the start of a tuple."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        for argument in (*args, *kwargs.values()):
            first = argument[0] if isinstance(argument, tuple) and argument else argument
            if isinstance(first, Tensor):
                with no_autocast(first):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call
