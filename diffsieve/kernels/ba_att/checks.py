"""What `ba_attention` refuses, and how it says so. Orders and windows that do not fit are refused by `token_orders`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from diffsieve.errors import UserInputError

from ..block_sparse import BACKENDS, MAX_BLOCK_SIZE
from .custom import CustomSelection
from .ordering import TokenOrders
from .scores import SCORES

_FLAGS = ("center_keys", "log_count", "descending", "second_order", "return_info")
_COMPENSATIONS = ("none", "centroid")
_NOT_OF_CALIBRATION = {
    "orders": "raster",
    "top_p": None,
    "min_density": 0.0,
    "return_info": False,
    "timer": None,
    "custom": None,
    "budgets": None,
}


def check_arguments(query: Any, key: Any, value: Any, **options: Any) -> None:
    """Raise a `UserInputError` that names the argument, what was expected and what came.

    Takes all arguments of `ba_attention`, or those of `calibrate_orders` that the two share.
    """
    options = {**_NOT_OF_CALIBRATION, **options}
    _check_tensors(query, key, value)
    _check_types(options)
    _check_ranges(options, query.shape[2])
    _check_budgets(options, query.shape[1])


def check_custom_order(order: TokenOrders, query: Tensor, key: Tensor) -> None:
    """Raise a `UserInputError` unless an order from outside fits. Its values are read in eager calls on a CPU."""
    for name, perm, tokens in (("query", order.query, query), ("key", order.key, key)):
        if perm is None:
            continue
        length, shapes = tokens.shape[2], ((tokens.shape[2],), tuple(query.shape[:3]))
        if perm.dtype != torch.int64 or tuple(perm.shape) not in shapes:
            expected = f"must be int64 of shape {shapes[0]} or {shapes[1]}"
            raise UserInputError(f"custom.order: {name} {expected}, got {perm.dtype} of shape {tuple(perm.shape)}")
        if perm.device.type != "cpu" or torch.compiler.is_compiling():
            continue  # elsewhere that would stall the stream
        if not bool((perm.sort(dim=-1).values == torch.arange(length)).all()):
            raise UserInputError(f"custom.order: {name} must hold each of 0 to {length - 1} once")


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise UserInputError(f"{name} must be a tensor (B, H, L, D), got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise UserInputError(f"{name} must have 4 dimensions (B, H, L, D), got shape {tuple(tensor.shape)}")
        if 0 in tensor.shape:
            raise UserInputError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
        if not tensor.dtype.is_floating_point:
            raise UserInputError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.dtype.itemsize == 1:
            raise UserInputError(f"{name} must be floating point of 16 bits or more, got {tensor.dtype}")
        if tensor.device != query.device or tensor.dtype != query.dtype:
            expected, got = (f"{x.dtype} on {x.device}" for x in (query, tensor))
            raise UserInputError(f"{name} must be {expected} like query, got {got}")
    if key.shape != value.shape:
        raise UserInputError(f"value must have the shape of key {tuple(key.shape)}, got {tuple(value.shape)}")
    if key.shape[0] != query.shape[0] or query.shape[1] % key.shape[1] or key.shape[2:] != query.shape[2:]:
        expected = f"({query.shape[0]}, a divisor of {query.shape[1]}, {query.shape[2]}, {query.shape[3]})"
        raise UserInputError(f"key must have shape {expected}, got {tuple(key.shape)}")


def _check_types(options: Mapping[str, Any]) -> None:
    for name in ("density", "beta", "min_density"):
        _require(_is_number(options[name]), name, "a number", options[name])
    for name in ("top_p", "scale"):
        _require(options[name] is None or _is_number(options[name]), name, "a number or None", options[name])
    for name in ("text_prefix", "text_suffix"):
        _require(_is_whole(options[name]), name, "a whole number", options[name])
    window, grid, orders = options["window"], options["grid_thw"], options["orders"]
    _require(window is None or _is_whole(window), "window", "a whole number of tokens or None", window)
    for name in _FLAGS:
        _require(isinstance(options[name], bool), name, "True or False", options[name])
    if grid is not None:
        whole = isinstance(grid, Sequence) and len(grid) == 3 and all(_is_whole(size) and size > 0 for size in grid)
        _require(whole, "grid_thw", "three positive integers (frames, height, width) or None", grid)
    if not isinstance(orders, str | Tensor):
        entries = isinstance(orders, Sequence) and all(isinstance(x, str) or _is_whole(x) for x in orders)
        _require(
            entries, "orders", "a name, a tensor of ids, or a sequence of names or ids, one per query head", orders
        )
    for name, known in (("backend", BACKENDS), ("score", SCORES)):
        choice = options[name]
        _require(isinstance(choice, str) and choice in known, name, f"one of {', '.join(known)}", choice)
    _require(options["timer"] is None or callable(options["timer"]), "timer", "callable or None", options["timer"])
    custom = options["custom"]
    _require(custom is None or isinstance(custom, CustomSelection), "custom", "a CustomSelection or None", custom)


# `math.isfinite` cannot be traced where the compiler takes a number for a variable (`dynamic=True`).
def _check_ranges(options: Mapping[str, Any], tokens: int) -> None:
    density, block_size, compensate = options["density"], options["block_size"], options["compensate"]
    score, top_p, scale = options["score"], options["top_p"], options["scale"]
    _require(0 < density <= 1, "density", "in (0, 1]", density)
    allowed = _is_whole(block_size) and 1 <= block_size <= MAX_BLOCK_SIZE
    _require(allowed, "block_size", f"a whole number in [1, {MAX_BLOCK_SIZE}]", block_size)
    _require(-math.inf < options["beta"] < math.inf, "beta", "finite", options["beta"])
    _require(top_p is None or 0 < top_p <= 1, "top_p", "in (0, 1]", top_p)
    if not 0 <= options["min_density"] <= density:
        raise UserInputError(f"min_density must be in [0, density={density}], got {options['min_density']!r}")
    known = isinstance(compensate, str) and compensate in _COMPENSATIONS
    _require(known, "compensate", '"none" or "centroid"', compensate)
    if score == "residual" and top_p is not None:
        raise UserInputError(f'top_p needs a score that predicts mass, "moments" or "halfk", got score={score!r}')
    custom = options["custom"]
    if custom is not None and custom.select is not None and top_p is not None:
        raise UserInputError(f"top_p must be None beside a custom selection, which would replace it, got {top_p}")
    _require(scale is None or 0 < scale < math.inf, "scale", "finite and above 0, or None", scale)
    prefix, suffix = options["text_prefix"], options["text_suffix"]
    for name, count in (("text_prefix", prefix), ("text_suffix", suffix)):
        _require(count >= 0, name, "at least 0", count)
    if prefix + suffix >= tokens:
        raise UserInputError(
            f"text_prefix + text_suffix must be below the number of tokens ({tokens}), got {prefix} + {suffix}"
        )


# Values are read where blocks are listed: that is too early for compiled code.
def _check_budgets(options: Mapping[str, Any], heads: int) -> None:
    budgets = options["budgets"]
    if budgets is None:
        return
    if not isinstance(budgets, Tensor):
        raise UserInputError(f"budgets must be a tensor or None, got {type(budgets).__name__}")
    if budgets.dtype not in (torch.int64, torch.int32) or budgets.shape != (heads,) or budgets.device.type != "cpu":
        raise UserInputError(
            f"budgets must be int64 or int32 of shape ({heads},) on the CPU, one number per query head, got "
            f"{budgets.dtype} of shape {tuple(budgets.shape)} on {budgets.device}"
        )
    if options["top_p"] is not None:
        raise UserInputError(f"budgets must be None with top_p, which sets them by row, got top_p={options['top_p']}")
    custom = options["custom"]
    if custom is not None and custom.select is not None:
        raise UserInputError("budgets must be None beside a custom selection, which sets its own")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        shown = f"a tensor of shape {tuple(got.shape)}" if isinstance(got, Tensor) else repr(got)
        raise UserInputError(f"{name} must be {expected}, got {shown}")
