"""What the calls of LLSA refuse, and how they say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import refuse
from ..backends import dtype_name
from .levels import level_lengths, most_levels

BACKENDS = ("auto", "reference", "torch", "triton")


def check_tensors(query: Any, key: Any, value: Any, block_size: Any, scale: Any, backend: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            refuse(name, "a tensor", type(x).__name__)
        if x.ndim != 4:
            refuse(name, "4-dimensional", tuple(x.shape))
        if x.numel() == 0:
            refuse(name, "not empty", tuple(x.shape))
    if not (type(block_size) is int and block_size >= 2):
        refuse("block_size", "an int >= 2", block_size)
    if backend not in BACKENDS:
        refuse("backend", f"one of {', '.join(BACKENDS)}", repr(backend))
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        refuse("scale", "a finite number > 0 or None", scale)
    batch, heads, length, dim = query.shape
    shape, dtype, device = key.shape, query.dtype, query.device
    if not dtype.is_floating_point:
        refuse("query", "floating point", dtype)
    if shape[0] != batch:
        refuse("key", f"of batch size {batch} like query", shape[0])
    if shape[2] != length:
        refuse("key", f"of {length} tokens like query (self-attention)", shape[2])
    if shape[3] != dim:
        refuse("key", f"of head dimension {dim} like query", shape[3])
    if heads % shape[1] != 0:
        refuse("key", f"of a number of heads that divides {heads}", shape[1])
    if value.shape != shape:
        refuse("value", f"of shape {tuple(shape)} like key", tuple(value.shape))
    for name, x in (("key", key), ("value", value)):
        if x.dtype != dtype:
            refuse(name, f"{dtype_name(dtype)} like query", dtype_name(x.dtype))
        if x.device != device:
            refuse(name, f"on {device} like query", x.device)


def check_choice(topk: Any, levels: Any, enrich: Any, disjoint: Any) -> None:
    if type(topk) is int:
        least = topk
    elif isinstance(topk, Sequence) and all(type(k) is int for k in topk) and len(topk) > 0:
        least = min(topk)
    else:
        refuse("topk", "an int >= 1, or one per level", repr(topk))
    if least < 1:
        refuse("topk", "at least 1", topk)
    if not (type(levels) is int or levels in ("auto", "paper")):
        refuse("levels", 'an int, "auto" or "paper"', repr(levels))
    for name, flag in (("enrich", enrich), ("disjoint", disjoint)):
        if not isinstance(flag, bool):
            refuse(name, "True or False", repr(flag))
    if disjoint and not enrich:
        refuse("disjoint", "False without enrich (there is nothing to leave out)", disjoint)


def check_topk(topk: int | Sequence[int], levels: int) -> None:
    if not isinstance(topk, int) and len(topk) != levels:
        refuse("topk", f"an int or {levels} ints, one per level", topk)


def check_indices(indices: list[Any], query: Tensor, block_size: int, levels: int) -> None:
    batch, heads, length, _ = query.shape
    most = most_levels(length, block_size)
    if not 1 <= len(indices) <= most:
        refuse("indices", f"1 to {most} tensors", f"{len(indices)}")
    if len(indices) != levels:
        refuse("indices", f"{levels} tensors, one per level", f"{len(indices)}")
    lengths = level_lengths(length, block_size, levels)
    for level, index in enumerate(indices, start=1):
        name, shape = f"indices[{level - 1}]", (batch, heads, lengths[level])
        if not isinstance(index, Tensor):
            refuse(name, "a tensor", type(index).__name__)
        if not (index.ndim == 4 and index.shape[:3] == shape and index.shape[3] >= 1):
            refuse(name, f"of shape ({batch}, {heads}, {lengths[level]}, K)", tuple(index.shape))
        if index.dtype != torch.int32:
            refuse(name, "int32", dtype_name(index.dtype))
        if index.device != query.device:
            refuse(name, f"on {query.device} like query", index.device)
        if index.device.type == "cpu":  # elsewhere that would stall the stream: ids are clamped there
            low, high = int(index.min()), int(index.max())
            if not (low >= -1 and high < lengths[level] and int(index[..., 0].min()) >= 0):
                expected = f"in [0, {lengths[level] - 1}], -1 only after the last entry of a row"
                refuse(name, expected, f"values from {low} to {high}")
            ascending = (index[..., 1:] > index[..., :-1]) | (index[..., 1:] == -1)
            gap = (index[..., :-1] == -1) & (index[..., 1:] != -1)
            if not bool((ascending & ~gap).all()):
                refuse(name, "ascending in each row", "a row that is not")
