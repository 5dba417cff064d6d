"""What the operations on chosen blocks ask of queries, keys and values alike."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from ..errors import refuse
from .backends import dtype_name


def check_4d(*tensors: tuple[str, Any]) -> None:
    """Raise a `UserInputError` unless all, each after its name, are tensors of four axes, none of length 0."""
    for name, x in tensors:
        if not isinstance(x, Tensor):
            refuse(name, "a tensor", type(x).__name__)
        if x.ndim != 4:
            refuse(name, "4-dimensional", tuple(x.shape))
        if x.numel() == 0:
            refuse(name, "not empty", tuple(x.shape))


def check_options(scale: Any, backend: Any, backends: tuple[str, ...]) -> None:
    """Raise a `UserInputError` unless `scale` is None or a finite number > 0, and `backend` one of `backends`."""
    if backend not in backends:
        refuse("backend", f"one of {', '.join(backends)}", repr(backend))
    # `math.isfinite` cannot be traced where the compiler takes the number for a variable (`dynamic=True`).
    if scale is not None and not (isinstance(scale, (int, float)) and scale is not True and 0 < scale < math.inf):
        refuse("scale", "a finite number > 0 or None", scale)


def check_like_query(query: Tensor, key: Tensor, value: Tensor, *, self_attention: bool) -> None:
    """Raise a `UserInputError` unless shapes, dtypes and devices fit.

    Args:
        query: `(B, H, Lq, D)`, floating point.
        key, value: `(B, Hkv, Lk, D)`, `H % Hkv == 0`, in the dtype and on the device of `query`.
        self_attention: Lk must be Lq.
    """
    batch, heads, length, dim = query.shape
    shape, dtype, device = key.shape, query.dtype, query.device
    key_batch, key_heads, key_length, key_dim = shape
    if not dtype.is_floating_point:
        refuse("query", "floating point", dtype)
    if dtype.itemsize == 1:
        refuse("query", "floating point of 16 bits or more", dtype)
    if key_batch != batch:
        refuse("key", f"of batch size {batch} like query", key_batch)
    if self_attention and key_length != length:
        refuse("key", f"of {length} tokens like query (self-attention)", key_length)
    if key_dim != dim:
        refuse("key", f"of head dimension {dim} like query", key_dim)
    if heads % key_heads != 0:
        refuse("key", f"of a number of heads that divides {heads}", key_heads)
    if value.shape != shape:
        refuse("value", f"of shape {tuple(shape)} like key", tuple(value.shape))
    if key.dtype == value.dtype == dtype and key.device == value.device == device:
        return
    for name, x in (("key", key), ("value", value)):
        if x.dtype != dtype:
            refuse(name, f"{dtype_name(dtype)} like query", dtype_name(x.dtype))
        if x.device != device:
            refuse(name, f"on {device} like query", x.device)


def check_no_tangents(operation: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise a `UserInputError` where one of them has a tangent: PyTorch drops those at a custom op, without a word.

    Outside of `forward_ad.dual_level` and `torch.func.jvp` it compares two numbers. Compiled code sees the tangents of
    a `jvp` inside of it, not those of a dual tensor that it is called with.
    """
    if forward_ad._current_level < 0:
        return
    for name, x in (("query", query), ("key", key), ("value", value)):
        if forward_ad.unpack_dual(x).tangent is not None:
            refuse(name, f"without a tangent ({operation} has no forward-mode derivative)", "a dual tensor")
