"""What the calls of LLSA refuse, and how they say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import refuse
from ..backends import dtype_name
from ..checks import check_4d, check_like_query, check_options
from .levels import level_lengths, most_levels

BACKENDS = ("auto", "reference", "torch", "triton")


def check_tensors(query: Any, key: Any, value: Any, block_size: Any, scale: Any, backend: Any) -> None:
    check_4d(("query", query), ("key", key), ("value", value))
    check_block_size(block_size)
    check_options(scale, backend, BACKENDS)
    check_like_query(query, key, value, self_attention=True)


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


def check_lists(indices: Any) -> None:
    if not (isinstance(indices, list | tuple) and len(indices) > 0):
        got = "none" if isinstance(indices, list | tuple) else type(indices).__name__
        refuse("indices", "a list of tensors, one per level", got)


def check_block_size(block_size: Any) -> None:
    if not (type(block_size) is int and block_size >= 2):
        refuse("block_size", "an int >= 2", block_size)


def check_indices(indices: list[Any], query: Tensor, block_size: int, levels: int) -> None:
    """Lists for a query; their values only in eager calls on a CPU: elsewhere that would stall the stream."""
    batch, heads, length, _ = query.shape
    values = query.device.type == "cpu" and not torch.compiler.is_compiling()
    check_indices_of((batch, heads, length), indices, block_size, levels, query.device, values=values)


def check_indices_of(
    shape: tuple[int, int, int],
    indices: list[Any],
    block_size: int,
    levels: int,
    device: torch.device,
    *,
    values: bool,
) -> None:
    """Lists of `levels` levels for `(batch, heads, tokens)`; `values`: whether to read their entries."""
    batch, heads, length = shape
    most = most_levels(length, block_size)
    if not 1 <= len(indices) <= most:
        refuse("indices", f"1 to {most} tensors", f"{len(indices)}")
    if len(indices) != levels:
        refuse("indices", f"{levels} tensors, one per level", f"{len(indices)}")
    lengths = level_lengths(length, block_size, levels)
    for level, index in enumerate(indices, start=1):
        name, lists = f"indices[{level - 1}]", (batch, heads, lengths[level])
        if not isinstance(index, Tensor):
            refuse(name, "a tensor", type(index).__name__)
        if not (index.ndim == 4 and index.shape[:3] == lists and index.shape[3] >= 1):
            refuse(name, f"of shape ({batch}, {heads}, {lengths[level]}, K)", tuple(index.shape))
        if index.dtype != torch.int32:
            refuse(name, "int32", dtype_name(index.dtype))
        if index.device != device:
            refuse(name, f"on {device} like query", index.device)
        if values:
            low, high = int(index.min()), int(index.max())
            if not (low >= -1 and high < lengths[level] and int(index[..., 0].min()) >= 0):
                expected = f"in [0, {lengths[level] - 1}], -1 only after the last entry of a row"
                refuse(name, expected, f"values from {low} to {high}")
            ascending = (index[..., 1:] > index[..., :-1]) | (index[..., 1:] == -1)
            gap = (index[..., :-1] == -1) & (index[..., 1:] != -1)
            if not bool((ascending & ~gap).all()):
                refuse(name, "ascending in each row", "a row that is not")
