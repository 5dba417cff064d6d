"""Which backend runs a call of LLSA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import BackendUnavailableError, UserInputError
from ..backends import BackendChoice, dtype_name, triton_obstacle
from .checks import BACKENDS

_TRITON_BLOCKS = (8, 16, 32, 64, 128)


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
    dim = query.shape[-1]
    wrong_block = None
    if block_size not in _TRITON_BLOCKS:
        wrong_block = f"needs a block_size of {', '.join(map(str, _TRITON_BLOCKS))}, got {block_size}"
    obstacle = triton_obstacle(query, wrong_block)
    if backend == "triton":
        if obstacle is not None:
            raise BackendUnavailableError(f'backend="triton" {obstacle}')
        return BackendChoice("triton", "asked for by name")
    if obstacle is not None:
        return BackendChoice("torch", f"triton {obstacle.split(';')[0]}")
    # fp32 too, unlike block-sparse attention: the torch backend gathers the keys of every query into memory.
    major, minor = torch.cuda.get_device_capability(query.device)
    return BackendChoice("triton", f"CUDA GPU sm_{major}{minor}, {dtype_name(query.dtype)}, D {dim}")
