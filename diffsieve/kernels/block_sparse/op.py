"""`block_sparse_attention`: validation, and the custom op with its gradient."""

from typing import Any

import torch
from torch import Tensor

from ...errors import refuse
from ..autocast import without_autocast
from ..checks import check_4d, check_like_query, check_no_tangents, check_options
from ..custom_ops import custom_op
from .backends import BACKENDS, choose_backend, dtype_name
from .fallbacks import failure, give_up, is_build_failure, say_once

# Inputs are padded to whole blocks: this bounds what a slip of the pen can ask for.
MAX_BLOCK_SIZE = 2**16
# The kernels of gradients, among those that could not be built.
_BACKWARD = "triton backward"


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None = None,
    *,
    block_size: int,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each block of queries over its list of key blocks, renormalised over what is kept.

    Differentiable once in query, key and value, through the output and the log-sum-exp. Works inside
    `torch.compile(fullgraph=True)`; autocast changes nothing. Eager calls on a CPU check the lists entry by entry; on
    other devices that would stall the stream and compiled code has no values to look at, so out-of-range entries are
    clamped there (nothing outside the tensors is read) and lists that are not ascending give undefined values.

    Args:
        query: `(B, H, Lq, D)`, floating point, any strides.
        key, value: `(B, Hkv, Lk, D)`, `H % Hkv == 0`; query head h reads key head `h // (H // Hkv)`.
        block_index: `(B, H, Nq, K)` int32 with `Nq = ceil(Lq / block_size)`: key blocks kept by each query block,
            strictly ascending, in [0, ceil(Lk / block_size)).
        block_count: `(B, H, Nq)` int32 in [0, K], entries past it are ignored; None for all K. A query block with
            count 0 gives output 0 and log-sum-exp -inf.
        block_size: tokens per block, of queries and keys alike; the last block may be short.
        scale: factor of the logits, > 0; `1 / sqrt(D)` by default.
        backend: one of `BACKENDS`; "auto" is what `choose_backend` says. A named backend is never replaced.
        return_lse: also return the log-sum-exp of the logits.

    Returns:
        `(B, H, Lq, D)` in the dtype and memory order of `query`; with `return_lse` also `(B, H, Lq)`, natural
        logarithm, in fp32 (fp64 for fp64 inputs).

    Raises:
        UserInputError: an argument has a wrong type, shape, dtype, device or range, or a tangent (forward mode).
        BackendUnavailableError: the named backend cannot run these inputs here.
    """
    _validate(query, key, value, block_index, block_count, block_size, scale, backend)
    check_no_tangents("block_sparse_attention", query, key, value)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    out, lse = _attention_op(query, key, value, block_index, block_count, block_size, float(scale), backend, return_lse)
    return (out, lse) if return_lse else out


def _validate(
    query: Any,
    key: Any,
    value: Any,
    block_index: Any,
    block_count: Any,
    block_size: Any,
    scale: Any,
    backend: Any,
) -> None:
    """Raise a `UserInputError` that names the argument, what was expected and what came."""
    check_4d(("query", query), ("key", key), ("value", value), ("block_index", block_index))
    if not (type(block_size) is int and 1 <= block_size <= MAX_BLOCK_SIZE):
        refuse("block_size", f"an int in [1, {MAX_BLOCK_SIZE}]", block_size)
    check_options(scale, backend, BACKENDS)
    check_like_query(query, key, value, self_attention=False)

    batch, heads, len_q, _ = query.shape
    device = query.device
    n_q, n_k = -(-len_q // block_size), -(-key.shape[2] // block_size)
    index_batch, index_heads, index_rows, _ = block_index.shape  # quicker than a slice
    if (index_batch, index_heads, index_rows) != (batch, heads, n_q):
        refuse("block_index", f"of shape ({batch}, {heads}, {n_q}, K)", tuple(block_index.shape))
    if block_count is not None:
        if not isinstance(block_count, Tensor):
            refuse("block_count", "a tensor or None", type(block_count).__name__)
        if block_count.shape != (batch, heads, n_q):
            refuse("block_count", f"of shape {(batch, heads, n_q)}", tuple(block_count.shape))
    for name, x in (("block_index", block_index), ("block_count", block_count)):
        if x is None:
            continue
        if x.dtype != torch.int32:
            refuse(name, "int32", dtype_name(x.dtype))
        if x.device != device:
            refuse(name, f"on {device} like query", x.device)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        _validate_lists(block_index, block_count, n_k)


def _validate_lists(block_index: Tensor, block_count: Tensor | None, n_k: int) -> None:
    width = block_index.shape[-1]
    index = block_index
    if block_count is not None:
        low, high = int(block_count.min()), int(block_count.max())
        if low < 0 or high > width:
            refuse("block_count", f"in [0, {width}]", f"values from {low} to {high}")
        # Entries past the count are ignored: let them continue the ascent, out of the way of both checks.
        listed = torch.arange(width) < block_count[..., None]
        first, index = index[listed], torch.where(listed, index, n_k + torch.arange(width, dtype=torch.int32))
    else:
        first = index
    if first.numel():
        low, high = int(first.min()), int(first.max())
        if low < 0 or high >= n_k:
            refuse("block_index", f"in [0, {n_k - 1}]", f"values from {low} to {high}")
    if not bool((index[..., 1:] > index[..., :-1]).all()):
        refuse("block_index", "strictly ascending in each list", "a list that is not")


@custom_op("diffsieve::block_sparse_attention")
@without_autocast
def _attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    block_size: int,
    scale: float,
    backend: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the latter is an empty tensor unless asked for."""
    inputs = (query, key, value, block_index, block_count)
    options = {"block_size": block_size, "scale": scale, "return_lse": return_lse}
    while True:
        choice = choose_backend(query, key, block_size=block_size, backend=backend)
        if choice.passed_over is not None:
            say_once(f"block_sparse_attention takes {choice.name}: {choice.passed_over}")
        try:
            out, lse = run_backend(choice.name, inputs, options)
            break
        except Exception as error:
            if choice.name in ("torch", "reference") or not is_build_failure(error):
                raise
            give_up(choice.name, query.device, error, asked=backend)
    if lse is None or not return_lse:
        lse = query.new_empty((0,), dtype=_lse_dtype(query))
    return out, lse


def run_backend(name: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp (which may be None unless asked for) of one backend."""
    if name == "triton":
        from .triton_backend import block_sparse_attention_triton

        return block_sparse_attention_triton(*inputs, **options)
    if name in ("hopper", "hopper-exact"):
        from .hopper_backend import block_sparse_attention_hopper

        fixed = name == "hopper" and inputs[0].dtype == torch.bfloat16
        return block_sparse_attention_hopper(*inputs, **options, fixed_stabiliser=fixed)
    if name == "flash4":
        from .flash4_backend import block_sparse_attention_flash4

        return block_sparse_attention_flash4(*inputs, **options)
    if name == "torch":
        from .torch_backend import block_sparse_attention_torch

        return block_sparse_attention_torch(*inputs, **options)
    from .reference import block_sparse_attention_reference

    result, lse = block_sparse_attention_reference(*inputs, block_size=options["block_size"], scale=options["scale"])
    return torch.empty_like(inputs[0]).copy_(result), lse


@torch.library.register_fake("diffsieve::block_sparse_attention")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    block_size: int,
    scale: float,
    backend: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    shape = query.shape[:3] if return_lse else (0,)
    return torch.empty_like(query), query.new_empty(shape, dtype=_lse_dtype(query))


@torch.library.custom_op("diffsieve::block_sparse_attention_backward", mutates_args=())
@without_autocast
def _attention_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """All but "torch" and "reference" share the gradients of "triton", these two the exact ones of "torch"."""
    inputs = (grad_out, grad_lse, query, key, value, block_index, block_count)
    name = choose_backend(query, key, block_size=block_size, backend=backend).name
    if name not in ("torch", "reference") and (backend != "auto" or failure(_BACKWARD, query.device) is None):
        from .triton_backward import block_sparse_attention_triton_backward

        try:
            return block_sparse_attention_triton_backward(*inputs, block_size=block_size, scale=scale, out=out, lse=lse)
        except Exception as error:
            if not is_build_failure(error):
                raise
            give_up(_BACKWARD, query.device, error, asked=backend)
            reason = failure(_BACKWARD, query.device)
            say_once(f"block_sparse_attention takes torch for gradients: triton {reason}")
    from .torch_backend import block_sparse_attention_torch_backward

    return block_sparse_attention_torch_backward(*inputs, block_size=block_size, scale=scale)


@_attention_backward_op.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_index: Tensor,
    block_count: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, block_index, block_count, ctx.block_size, ctx.scale, ctx.backend, ctx.return_lse = inputs
    # Without a log-sum-exp to go with it the output is of no use to the backward: it computes both again.
    out, lse = output if ctx.return_lse else (None, None)
    ctx.save_for_backward(query, key, value, block_index, block_count, out, lse)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.diffsieve.block_sparse_attention_backward(
        grad_out, grad_lse if ctx.return_lse else None, *ctx.saved_tensors, ctx.block_size, ctx.scale, ctx.backend
    )
    return (*grads, None, None, None, None, None, None)


torch.library.register_autograd("diffsieve::block_sparse_attention", _backward, setup_context=_setup_context)


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
