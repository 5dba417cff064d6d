"""The transpose of lists of kept keys: for each key, the queries that keep it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import refuse
from ..backends import dtype_name
from ..checks import check_4d


class TransposedIndex(NamedTuple):
    """Queries by key, one list after the other.

    Attributes:
        offsets: `(B, H, num_keys + 1)` int32; the queries of key j stand at `offsets[j]` .. `offsets[j + 1] - 1`.
        queries: `(B, H, n * K)` int32, ascending under each key; -1 past the last offset.
    """

    offsets: Tensor
    queries: Tensor


def transpose_index(index: Tensor, num_keys: int) -> TransposedIndex:
    """Turn lists of keys per query into lists of queries per key.

    A stable sort of the key ids with the position as payload: O(n K log(n K)) work, O(n K) memory, and the same result
    in every run, on every device.

    Args:
        index: `(B, H, n, K)` int32 in [0, num_keys), -1 for an empty entry; the order inside a row does not matter.
        num_keys: keys that the lists choose from, >= 1. Elsewhere than on a CPU an entry beyond them counts as empty;
            on a CPU it is an error.

    Raises:
        UserInputError: an argument has a wrong type, shape, dtype or range.
    """
    check_4d(("index", index))
    if index.dtype != torch.int32:
        refuse("index", "int32", dtype_name(index.dtype))
    if not (type(num_keys) is int and 1 <= num_keys < 2**31 - 1):
        refuse("num_keys", f"an int in [1, {2**31 - 2}]", repr(num_keys))
    if index.device.type == "cpu" and int(index.max()) >= num_keys:
        refuse("index", f"less than num_keys, {num_keys}", int(index.max()))
    batch, heads, rows, width = index.shape
    flat = index.reshape(batch, heads, rows * width)
    keys = torch.where(flat < 0, num_keys, flat)
    keys, position = keys.sort(dim=-1, stable=True)
    bounds = torch.arange(num_keys + 1, device=index.device, dtype=keys.dtype)
    offsets = torch.searchsorted(keys, bounds.expand(batch, heads, -1).contiguous(), out_int32=True)
    queries = torch.where(keys >= num_keys, -1, position // width)
    return TransposedIndex(offsets, queries.int())
