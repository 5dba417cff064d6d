"""Dense attention by the kernels for lists, where that is measured to be faster than every backend of PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import choose_backend
from .op import block_sparse_attention

# (head dimension, tokens) -> ms on an H200, 12 heads, bf16, as a CUDA graph and, up to 32,768 tokens, eager: "sdpa" is
# the fastest backend of PyTorch's scaled_dot_product_attention, ours list all blocks
# (benchmarks/results/h200/dense_full_lists.json).
MEASURED_SM90: dict[tuple[int, int], dict[str, tuple[float, ...]]] = {
    (128, 4_096): {"sdpa": (0.159, 0.159), "hopper": (0.145, 0.314), "hopper-exact": (0.154, 0.308)},
    (128, 8_192): {"sdpa": (0.613, 0.655), "hopper": (0.527, 0.741), "hopper-exact": (0.611, 0.771)},
    (128, 16_384): {"sdpa": (2.452, 2.702), "hopper": (2.065, 2.464), "hopper-exact": (2.514, 2.69)},
    (128, 32_768): {"sdpa": (9.594, 10.92), "hopper": (8.58, 9.585), "hopper-exact": (10.083, 10.489)},
    (128, 75_648): {"sdpa": (57.258,), "hopper": (48.462,), "hopper-exact": (54.513,)},
    (128, 131_072): {"sdpa": (174.088,), "hopper": (146.322,), "hopper-exact": (160.363,)},
    (64, 4_096): {"sdpa": (0.115, 0.114), "hopper": (0.119, 0.278), "hopper-exact": (0.126, 0.285)},
    (64, 8_192): {"sdpa": (0.428, 0.432), "hopper": (0.432, 0.593), "hopper-exact": (0.455, 0.616)},
    (64, 16_384): {"sdpa": (1.688, 1.777), "hopper": (1.634, 1.844), "hopper-exact": (1.756, 1.941)},
    (64, 32_768): {"sdpa": (6.911, 7.235), "hopper": (6.408, 6.934), "hopper-exact": (7.072, 7.288)},
    (64, 75_648): {"sdpa": (37.831,), "hopper": (33.624,), "hopper-exact": (37.129,)},
    (64, 131_072): {"sdpa": (114.095,), "hopper": (105.954,), "hopper-exact": (117.532,)},
}
_BLOCK = 128


def _fewest_blocks() -> dict[tuple[str, int], int]:
    """(backend, head dimension) -> blocks of the shortest sequence from which on every measurement is won."""
    fewest: dict[tuple[str, int], int] = {}
    for backend in ("hopper", "hopper-exact"):
        for dim in sorted({dim for dim, _ in MEASURED_SM90}):
            for tokens in sorted((length for d, length in MEASURED_SM90 if d == dim), reverse=True):
                ms = MEASURED_SM90[dim, tokens]
                if not all(ours < theirs for ours, theirs in zip(ms[backend], ms["sdpa"], strict=True)):
                    break
                fewest[backend, dim] = -(-tokens // _BLOCK)
    return fewest


_FEWEST_BLOCKS = _fewest_blocks()


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
