"""Operations that `torch.compile` takes for one opaque node, with little of PyTorch's own time around an eager call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch._ops import OpOverload


def custom_op(name: str, *, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable[..., Any]], OpOverload]:
    """Like `torch.library.custom_op` of a function that changes no argument and returns none of them.

    That one looks for gradients and for results that are arguments in every call, in Python: twice the time of this.
    So an operation without `torch.library.register_autograd` must not get inputs that require a gradient: PyTorch warns
    in the backward pass then, instead of failing. `torch.library.register_fake` goes with both.

    Args:
        name: "diffsieve::name".
        tags: of the operation, for the compiler.
    """

    def define(function: Callable[..., Any]) -> OpOverload:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        torch.library.impl(name, "CompositeExplicitAutograd")(_untraced(function))
        namespace, _, short = name.partition("::")
        found: OpOverload = getattr(getattr(torch.ops, namespace), short).default
        return found

    return define


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which `torch.compile` must not look into when the operation is called in between compiled parts."""
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal disabled
        if disabled is None:  # not before: it imports the compiler
            disabled = torch.compiler.disable(function)
        return disabled(*args)

    return call
