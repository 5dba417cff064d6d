"""Which tensors the copy engine (TMA) of NVIDIA GPUs can read and write as they lie in memory."""

from __future__ import annotations

from torch import Tensor


def allows_descriptor(x: Tensor) -> bool:
    """Whether `x`, `(B, H, L, D)`, has a power-of-two unit-stride last axis of at least 16, and all else aligned to 16
    bytes, as the copy engine wants it."""
    dim, bytes_each = x.shape[3], x.element_size()
    if dim < 16 or dim & (dim - 1) or x.stride(3) != 1 or x.data_ptr() % 16:
        return False
    batch, head, row, _ = descriptor_strides(x)
    aligned = (batch | head | row) * bytes_each % 16 == 0  # as all three, since 16 is a power of two
    return aligned and batch > 0 and head > 0 and row > 0


def descriptor_strides(x: Tensor) -> list[int]:
    """Strides of `x` in elements. That of an axis of length 1 has no meaning in PyTorch, but must be aligned here."""
    shape, strides = x.shape, list(x.stride())
    if 1 in shape:
        strides = [stride if size > 1 else shape[3] for size, stride in zip(shape, strides, strict=True)]
    return strides
