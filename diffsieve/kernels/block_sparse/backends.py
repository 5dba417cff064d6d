"""Which backend runs a call of `block_sparse_attention`, and why."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import torch
from torch import Tensor

from ...errors import BackendUnavailableError, UserInputError
from ..backends import HAS_TRITON, TRITON_DTYPES, BackendChoice, dtype_name, triton_obstacle
from .fallbacks import failure
from .rates import by_rate

BACKENDS = ("auto", "reference", "torch", "triton", "hopper", "hopper-exact", "flash4")

_HOPPER_DTYPES = (torch.bfloat16, torch.float16)
_HOPPER_DIMS = (64, 128)


def _is_installed(package: str) -> bool:
    """Whether a package of this name is installed: the module of FlashAttention-4 is `flash_attn`, as that of 2 is."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


# Asked once, as for Triton.
_HAS_FLASH4 = _is_installed("flash-attn-4")


def choose_backend(query: Tensor, key: Tensor, *, block_size: int, backend: str = "auto") -> BackendChoice:
    """Which backend `block_sparse_attention` runs for such inputs, and why.

    Args:
        query, key: as in `block_sparse_attention`.
        block_size: tokens per block.
        backend: one of `BACKENDS`.

    Raises:
        UserInputError: `backend` is unknown.
        BackendUnavailableError: the named backend cannot run; the message says why and what to do.
    """
    if backend not in BACKENDS:
        raise UserInputError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        return _choose_for(query, key, block_size)
    if backend in ("reference", "torch"):
        return BackendChoice(backend, "asked for by name")
    obstacle = _obstacle(backend, query, key, block_size)
    if obstacle is not None:
        advice = "" if backend == "triton" else '; use backend="triton" or "auto"'
        raise BackendUnavailableError(f'backend="{backend}" {obstacle}{advice}')
    return BackendChoice(backend, "asked for by name")


def _choose_for(query: Tensor, key: Tensor, block_size: int) -> BackendChoice:
    """What "auto" takes: the fastest by measurements (see `rates`) of those that can run."""
    if query.device.type == "cpu":
        return BackendChoice("torch", "cpu tensors: triton needs a CUDA GPU")
    on_nvidia = query.is_cuda and torch.version.hip is None
    if on_nvidia and query.dtype == torch.float32:
        return BackendChoice(
            "torch", "fp32 has no tensor cores to gain from: triton runs it only when asked for by name"
        )
    if not on_nvidia or query.dtype not in TRITON_DTYPES:
        return BackendChoice("torch", f"triton {(_triton_obstacle(query, block_size) or '').split(';')[0]}")
    capability = torch.cuda.get_device_capability(query.device)
    passed_over = None
    for name in by_rate(capability, query.shape[-1], block_size):
        obstacle = failure(name, query.device) or _obstacle(name, query, key, block_size)
        if obstacle is None:
            gpu = f"CUDA GPU sm_{capability[0]}{capability[1]}, {dtype_name(query.dtype)}, D {query.shape[-1]}"
            return BackendChoice(name, gpu if passed_over is None else f"{gpu}; {passed_over}", passed_over)
        if passed_over is None:
            passed_over = f"{name} {obstacle.split(';')[0]}"
    return BackendChoice("torch", passed_over or "", passed_over)


def _obstacle(name: str, query: Tensor, key: Tensor, block_size: int) -> str | None:
    if name == "flash4":
        return _flash4_obstacle(query, key, block_size)
    return _triton_obstacle(query, block_size) if name == "triton" else _hopper_obstacle(query, block_size)


def _triton_obstacle(query: Tensor, block_size: int) -> str | None:
    """Why the Triton kernel cannot run these inputs, as "reason; what to do", or None."""
    wrong_block = None
    if block_size < 16 or block_size & (block_size - 1):
        wrong_block = f"needs a block_size that is a power of two, at least 16, got {block_size}"
    return triton_obstacle(query, wrong_block)


def _hopper_obstacle(query: Tensor, block_size: int) -> str | None:
    """Why the Hopper kernel cannot run these inputs, or None."""
    obstacle = _no_hopper(query)
    if obstacle is not None:
        return obstacle
    if block_size < 64 or block_size & (block_size - 1):
        return f"needs a block_size that is a power of two, at least 64, got {block_size}"
    if not HAS_TRITON:
        return "needs the package triton, which is not installed"
    from .hopper_backend import GLUON_OBSTACLE

    return GLUON_OBSTACLE


def _flash4_obstacle(query: Tensor, key: Tensor, block_size: int) -> str | None:
    """Why FlashAttention-4 cannot run these inputs, or None."""
    obstacle = _no_hopper(query)
    if obstacle is not None:
        return obstacle
    if block_size not in (64, 128):
        return f"needs a block_size of 64 or 128, got {block_size}"
    for x in (query, key):
        if x.numel() >= 2**31:
            return f"needs tensors of less than 2^31 elements, got {x.numel()}"
    # The import of a package cannot be traced. The op is no traced code: it asks again when it runs.
    if torch.compiler.is_compiling():
        return None if _HAS_FLASH4 else "needs the package flash-attn-4, which is not installed"
    from .flash4_backend import interface_obstacle

    return interface_obstacle()


def _no_hopper(query: Tensor) -> str | None:
    """Why inputs are not for the kernels that are written for Hopper GPUs, or None."""
    if not query.is_cuda or torch.version.hip is not None:
        device = "ROCm" if query.is_cuda else query.device.type
        return f"needs an NVIDIA Hopper GPU, got {device} tensors"
    capability = torch.cuda.get_device_capability(query.device)
    if capability != (9, 0):
        return f"needs a Hopper GPU, of compute capability 9.0, got {capability[0]}.{capability[1]}"
    if query.dtype not in _HOPPER_DTYPES:
        return f"needs dtype {' or '.join(map(dtype_name, _HOPPER_DTYPES))}, got {dtype_name(query.dtype)}"
    if query.shape[-1] not in _HOPPER_DIMS:
        return f"needs a head dimension D of {' or '.join(map(str, _HOPPER_DIMS))}, got {query.shape[-1]}"
    return None
