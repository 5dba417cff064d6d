"""What the choices of a backend have in common: the form of the answer, and what every Triton kernel asks for."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_MAX_DIM = 256
_USE_TORCH = 'use backend="torch" or "auto"'
# Asked once: torch.compile of PyTorch 2.11 cannot trace the search.
HAS_TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class BackendChoice:
    """A backend and the reason for it.

    Args:
        name: a backend of the operation, but not "auto".
        reason: one line for a person.
        passed_over: why the backend that is the fastest on this GPU was not taken; None where it was.
    """

    name: str
    reason: str
    passed_over: str | None = None


def triton_obstacle(query: Tensor, block_obstacle: str | None) -> str | None:
    """Why Triton kernels cannot run these inputs, as "reason; what to do", or None.

    Args:
        query: `(B, H, L, D)`.
        block_obstacle: what is wrong with the block size for the kernels of the operation, "needs .., got ..", or None.
    """
    if query.device.type not in ("cuda", "cpu") or torch.version.hip is not None:
        device = "ROCm" if torch.version.hip is not None else query.device.type
        return f"needs an NVIDIA GPU, got {device} tensors; {_USE_TORCH}"
    if not HAS_TRITON:
        return f"needs the package triton, which is not installed; pip install triton, or {_USE_TORCH}"
    if query.dtype not in TRITON_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in TRITON_DTYPES)
        return f"needs dtype {names}, got {dtype_name(query.dtype)}; cast the inputs, or {_USE_TORCH}"
    if query.shape[-1] > TRITON_MAX_DIM:
        return f"needs a head dimension D <= {TRITON_MAX_DIM}, got {query.shape[-1]}; {_USE_TORCH}"
    if block_obstacle is not None:
        return f"{block_obstacle}; choose one, or {_USE_TORCH}"
    if query.is_cuda:
        capability = torch.cuda.get_device_capability(query.device)
        if capability < (8, 0):
            return f"needs a GPU of compute capability 8.0 or later, got {capability[0]}.{capability[1]}; {_USE_TORCH}"
        return None
    from .block_sparse.triton_backend import is_interpreted

    if not is_interpreted():
        return f"needs a CUDA GPU, got cpu tensors; move them, or {_USE_TORCH}"
    if query.dtype == torch.bfloat16:
        return f"has no bfloat16 products in the Triton interpreter; use float16 there, or {_USE_TORCH}"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
