"""Which backend runs a call of LLSA."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ...errors import BackendUnavailableError, UserInputError
from ..block_sparse import BackendChoice
from .checks import BACKENDS, dtype_name

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRITON_MAX_DIM = 256
_TRITON_BLOCKS = (8, 16, 32, 64, 128)
_USE_TORCH = 'use backend="torch" or "auto"'
# Decided once: a compiled caller cannot trace the search.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def choose_backend(query: Tensor, *, block_size: int = 16, backend: str = "auto") -> BackendChoice:
    """Which backend `llsa_attention` runs for such inputs, and why.

    Args:
        query, block_size, backend: as in `llsa_attention`.

    Raises:
        UserInputError: `backend` is unknown.
        BackendUnavailableError: the named backend cannot run; the message says why and what to do.
    """
    if backend not in BACKENDS:
        raise UserInputError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend in ("reference", "torch"):
        return BackendChoice(backend, "asked for by name")
    if backend == "auto" and query.device.type == "cpu":
        return BackendChoice("torch", "cpu tensors: triton needs a CUDA GPU")
    obstacle = _triton_obstacle(query, block_size)
    if backend == "triton":
        if obstacle is not None:
            raise BackendUnavailableError(f'backend="triton" {obstacle}')
        return BackendChoice("triton", "asked for by name")
    if obstacle is not None:
        return BackendChoice("torch", f"triton {obstacle.split(';')[0]}")
    major, minor = torch.cuda.get_device_capability(query.device)
    return BackendChoice("triton", f"CUDA GPU sm_{major}{minor}, {dtype_name(query.dtype)}, D {query.shape[-1]}")


def _triton_obstacle(query: Tensor, block_size: int) -> str | None:
    """Why the Triton kernels cannot run these inputs, as "reason; what to do", or None."""
    if query.device.type not in ("cuda", "cpu") or torch.version.hip is not None:
        device = "ROCm" if torch.version.hip is not None else query.device.type
        return f"needs an NVIDIA GPU, got {device} tensors; {_USE_TORCH}"
    if not _HAS_TRITON:
        return f"needs the package triton, which is not installed; pip install triton, or {_USE_TORCH}"
    if query.dtype not in _TRITON_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in _TRITON_DTYPES)
        return f"needs dtype {names}, got {dtype_name(query.dtype)}; cast the inputs, or {_USE_TORCH}"
    if query.shape[-1] > _TRITON_MAX_DIM:
        return f"needs a head dimension D <= {_TRITON_MAX_DIM}, got {query.shape[-1]}; {_USE_TORCH}"
    if block_size not in _TRITON_BLOCKS:
        sizes = ", ".join(map(str, _TRITON_BLOCKS))
        return f"needs a block_size of {sizes}, got {block_size}; choose one, or {_USE_TORCH}"
    if query.is_cuda:
        capability = torch.cuda.get_device_capability(query.device)
        if capability < (8, 0):
            return f"needs a GPU of compute capability 8.0 or later, got {capability[0]}.{capability[1]}; {_USE_TORCH}"
        return None
    from ..block_sparse.triton_backend import is_interpreted

    if not is_interpreted():
        return f"needs a CUDA GPU, got cpu tensors; move them, or {_USE_TORCH}"
    if query.dtype == torch.bfloat16:
        return f"has no bfloat16 products in the Triton interpreter; use float16 there, or {_USE_TORCH}"
    return None
