"""Dense attention by the kernels for lists, where that is measured to be faster than every backend of PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...errors import UserInputError
from ..autocast import without_autocast
from ..checks import check_no_tangents
from ..custom_ops import custom_op
from .backends import choose_backend
from .fallbacks import failure, give_up, is_build_failure, say_once
from .op import run_backend

_BLOCK = 128
# (backend, head dimension) -> blocks of the shortest sequence on an H200 from which on it was faster than the fastest
# backend of PyTorch's scaled_dot_product_attention at every measured length, as a CUDA graph and, up to 32,768 tokens,
# eager, in two runs: 16,384, 32,768 and 75,648 tokens (the later one: benchmarks/results/h200/dense_full_lists.json).
_FEWEST_BLOCKS = {("hopper", 128): 128, ("hopper", 64): 256, ("hopper-exact", 128): 591}


def dense_backend(probe: Tensor, tokens: int, *, backend: str = "auto") -> str | None:
    """The backend that attends to all keys faster than PyTorch does on an H200, or None where none is measured to.

    Other GPUs of compute capability 9.0, an H100 or a GH200, go by the same measurements.

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


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, backend: str, fall_back: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention to all keys, by the kernel for lists; without gradients.

    Args:
        query: `(B, H, Lq, D)`, any strides.
        key, value: `(B, Hkv, Lk, D)`, `H % Hkv == 0`.
        backend: one that can run these inputs, as `dense_backend` names it. Not "auto": no second choice is made here.
        fall_back: let PyTorch's attention do the call where the kernel cannot be built, with a warning, once.

    Returns:
        `(B, H, Lq, D)` in the dtype and memory order of `query`, and int64 `()` on its device: 1, or 0 where
        PyTorch did the call.

    Raises:
        UserInputError: a gradient is wanted, or a tangent (forward mode).
        BackendUnavailableError: the kernel cannot be built, and `fall_back` is not set.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise UserInputError("dense_attention has no gradient: call it under torch.no_grad()")
    check_no_tangents("dense_attention", query, key, value)
    return _dense_op(query, key, value, backend, fall_back)


# An operation, as compiled code has to fall back, too.
@custom_op("diffsieve::dense_attention")
@without_autocast
def _dense_op(query: Tensor, key: Tensor, value: Tensor, backend: str, fall_back: bool) -> tuple[Tensor, Tensor]:
    batch, heads, len_q, dim = query.shape
    if not (fall_back and failure(backend, query.device)):
        every = torch.arange(-(-key.shape[2] // _BLOCK), dtype=torch.int32, device=query.device)
        every = every.expand(batch, heads, -(-len_q // _BLOCK), -1)
        options = {"block_size": _BLOCK, "scale": dim**-0.5, "return_lse": False}
        try:
            out, _ = run_backend(backend, (query, key, value, every, None), options)
        except Exception as error:
            if not is_build_failure(error):
                raise
            give_up(backend, query.device, error, asked="auto" if fall_back else backend)
        else:
            return out, torch.ones((), dtype=torch.int64, device=query.device)
    say_once(f"dense calls go to PyTorch's attention: {backend} {failure(backend, query.device)}")
    out = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return torch.empty_like(query).copy_(out), torch.zeros((), dtype=torch.int64, device=query.device)


@torch.library.register_fake("diffsieve::dense_attention")
def _(query: Tensor, key: Tensor, value: Tensor, backend: str, fall_back: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((), dtype=torch.int64)
