"""Dense attention by the kernels for lists, where that is measured to be faster than every backend of PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import choose_backend
from .op import block_sparse_attention

_BLOCK = 128
# (backend, head dimension) -> blocks of the shortest sequence on an H200 from which on it was faster than the fastest
# backend of PyTorch's scaled_dot_product_attention at every measured length, as a CUDA graph and, up to 32,768 tokens,
# eager: 16,384, 32,768 and 75,648 tokens (benchmarks/results/h200/dense_full_lists.json).
_FEWEST_BLOCKS = {("hopper", 128): 128, ("hopper", 64): 256, ("hopper-exact", 128): 591}


def dense_backend(probe: Tensor, tokens: int, *, backend: str = "auto") -> str | None:
    """The backend that attends to all keys faster than PyTorch does, or None where none is measured to.

    Args:
        probe: tensor of four axes, the last one of the head dimension, with the device and dtype of the queries.
        tokens: number of queries, and of keys.
        backend: "auto", or the name of a backend, which is not replaced by another.
    """
    if probe.dtype != torch.bfloat16 or not probe.is_cuda or torch.version.hip is not None:
        return None
    if backend != "auto" and (backend, probe.shape[3]) not in _FEWEST_BLOCKS:
        return None
    if torch.cuda.get_device_capability(probe.device) != (9, 0):
        return None
    name = choose_backend(probe, probe, block_size=_BLOCK, backend=backend).name
    fewest = _FEWEST_BLOCKS.get((name, probe.shape[3]))
    return name if fewest is not None and -(-tokens // _BLOCK) >= fewest else None


def dense_attention(query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> Tensor:
    """Attention to all keys, by the kernel for lists; for calls that `dense_backend` found one for.

    Args:
        query: `(B, H, Lq, D)`, any strides.
        key, value: `(B, Hkv, Lk, D)`, `H % Hkv == 0`.
        backend: as in `block_sparse_attention`.

    Returns:
        `(B, H, Lq, D)` in the dtype and memory order of `query`.
    """
    batch, heads, len_q = query.shape[:3]
    every = torch.arange(-(-key.shape[2] // _BLOCK), dtype=torch.int32, device=query.device)
    every = every.expand(batch, heads, -(-len_q // _BLOCK), -1)
    out = block_sparse_attention(query, key, value, every, block_size=_BLOCK, backend=backend)
    assert isinstance(out, Tensor)
    return out
