"""The transpose of lists of kept keys: for each key, the queries that keep it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        num_keys: keys that the lists choose from.
    """
    batch, heads, rows, width = index.shape
    flat = index.reshape(batch, heads, rows * width)
    keys = torch.where(flat < 0, num_keys, flat)
    keys, position = keys.sort(dim=-1, stable=True)
    bounds = torch.arange(num_keys + 1, device=index.device, dtype=keys.dtype)
    offsets = torch.searchsorted(keys, bounds.expand(batch, heads, -1).contiguous(), out_int32=True)
    queries = torch.where(keys == num_keys, -1, position // width)
    return TransposedIndex(offsets, queries.int())
