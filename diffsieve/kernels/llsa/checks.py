"""What the calls of LLSA refuse, and how they say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UserInputError
from ..backends import dtype_name
from .levels import level_lengths, most_levels

BACKENDS = ("auto", "reference", "torch", "triton")


def check_tensors(query: Any, key: Any, value: Any, block_size: Any, scale: Any, backend: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(isinstance(x, Tensor), name, "a tensor", type(x).__name__)
        require(x.ndim == 4, name, "4-dimensional", tuple(x.shape))
        require(x.numel() > 0, name, "not empty", tuple(x.shape))
    require(type(block_size) is int and block_size >= 2, "block_size", "an int >= 2", block_size)
    require(backend in BACKENDS, "backend", f"one of {', '.join(BACKENDS)}", repr(backend))
    if scale is not None:
        number = isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0
        require(number, "scale", "a finite number > 0 or None", scale)
    batch, heads, length, dim = query.shape
    require(query.dtype.is_floating_point, "query", "floating point", query.dtype)
    require(key.shape[0] == batch, "key", f"of batch size {batch} like query", key.shape[0])
    require(key.shape[2] == length, "key", f"of {length} tokens like query (self-attention)", key.shape[2])
    require(key.shape[3] == dim, "key", f"of head dimension {dim} like query", key.shape[3])
    require(heads % key.shape[1] == 0, "key", f"of a number of heads that divides {heads}", key.shape[1])
    require(value.shape == key.shape, "value", f"of shape {tuple(key.shape)} like key", tuple(value.shape))
    for name, x in (("key", key), ("value", value)):
        require(x.dtype == query.dtype, name, f"{dtype_name(query.dtype)} like query", dtype_name(x.dtype))
        require(x.device == query.device, name, f"on {query.device} like query", x.device)


def check_choice(topk: Any, levels: Any, enrich: Any, disjoint: Any) -> None:
    whole = type(topk) is int or (isinstance(topk, Sequence) and all(type(k) is int for k in topk) and len(topk) > 0)
    require(whole, "topk", "an int >= 1, or one per level", repr(topk))
    require(min([topk] if isinstance(topk, int) else topk) >= 1, "topk", "at least 1", topk)
    require(type(levels) is int or levels in ("auto", "paper"), "levels", 'an int, "auto" or "paper"', repr(levels))
    for name, flag in (("enrich", enrich), ("disjoint", disjoint)):
        require(isinstance(flag, bool), name, "True or False", repr(flag))
    require(enrich or not disjoint, "disjoint", "False without enrich (there is nothing to leave out)", disjoint)


def check_topk(topk: int | Sequence[int], levels: int) -> None:
    require(isinstance(topk, int) or len(topk) == levels, "topk", f"an int or {levels} ints, one per level", topk)


def check_indices(indices: list[Any], query: Tensor, block_size: int, levels: int) -> None:
    batch, heads, length, _ = query.shape
    most = most_levels(length, block_size)
    require(1 <= len(indices) <= most, "indices", f"1 to {most} tensors", f"{len(indices)}")
    require(len(indices) == levels, "indices", f"{levels} tensors, one per level", f"{len(indices)}")
    lengths = level_lengths(length, block_size, levels)
    for level, index in enumerate(indices, start=1):
        name, shape = f"indices[{level - 1}]", (batch, heads, lengths[level])
        require(isinstance(index, Tensor), name, "a tensor", type(index).__name__)
        fits = index.ndim == 4 and index.shape[:3] == shape and index.shape[3] >= 1
        require(fits, name, f"of shape ({batch}, {heads}, {lengths[level]}, K)", tuple(index.shape))
        require(index.dtype == torch.int32, name, "int32", dtype_name(index.dtype))
        require(index.device == query.device, name, f"on {query.device} like query", index.device)
        if index.device.type == "cpu":  # elsewhere that would stall the stream: ids are clamped there
            low, high = int(index.min()), int(index.max())
            in_range = low >= -1 and high < lengths[level] and int(index[..., 0].min()) >= 0
            expected = f"in [0, {lengths[level] - 1}], -1 only after the last entry of a row"
            require(in_range, name, expected, f"values from {low} to {high}")
            ascending = (index[..., 1:] > index[..., :-1]) | (index[..., 1:] == -1)
            gap = (index[..., :-1] == -1) & (index[..., 1:] != -1)
            require(bool((ascending & ~gap).all()), name, "ascending in each row", "a row that is not")


def require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise UserInputError(f"{name} must be {expected}, got {got}")
