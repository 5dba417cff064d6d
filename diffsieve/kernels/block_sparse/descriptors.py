"""Which tensors the copy engine (TMA) of NVIDIA GPUs can read and write as they lie in memory."""

from __future__ import annotations

from torch import Tensor


def allows_descriptor(x: Tensor) -> bool:
    """Whether `x`, `(B, H, L, D)`, has a power-of-two unit-stride last axis of at least 16, and all else aligned to 16
    bytes, as the copy engine wants it."""
    dim = x.shape[3]
    strides = descriptor_strides(x)
    return (
        dim >= 16
        and dim & (dim - 1) == 0
        and strides[3] == 1
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides[:3])
    )


def descriptor_strides(x: Tensor) -> list[int]:
    """Strides of `x` in elements. That of an axis of length 1 has no meaning in PyTorch, but must be aligned here."""
    return [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape, x.stride(), strict=True)]
