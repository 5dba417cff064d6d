"""`llsa_attention` and its parts: validation, choice of the backend, and the custom ops with their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UserInputError
from ..autocast import no_autocast
from ..checks import check_no_tangents
from ..custom_ops import custom_op
from .backends import choose_backend
from .checks import check_choice, check_indices, check_lists, check_tensors, check_topk
from .levels import kept_per_level, level_lengths, resolve_levels
from .pyramid import pyramid


def llsa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int = 16,
    topk: int | Sequence[int] = 8,
    levels: int | str = "auto",
    enrich: bool = True,
    disjoint: bool = False,
    indices: Sequence[Tensor] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    is_causal: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-linear sparse self-attention (arXiv 2512.16615), forward and backward, for models trained with it.

    Keys are chosen from coarse to fine in a pyramid of block means; each query attends to the raw tokens of the blocks
    it keeps and to pooled tokens of every coarser level, each counted as often as it holds raw tokens, under one
    softmax. Neighbours in the sequence should be neighbours in the picture: reorder tokens first
    (`diffsieve.kernels.orders`). Fewer than `block_size` tokens are attended densely.

    Differentiable once in query, key and value, pooled tokens included; the choice of keys has no gradient. Works under
    `torch.compile(fullgraph=True)`, autocast (inputs are cast to its dtype) and activation checkpointing; the same bits
    in every run. NaN in query or key comes out as NaN; nothing outside the tensors is read for it.

    Args:
        query: `(B, H, L, D)`, floating point, any strides.
        key, value: `(B, Hkv, L, D)`, `H % Hkv == 0`; query head h reads key head `h // (H // Hkv)`.
        block_size: S, tokens pooled into one of the next level, >= 2. Smaller blocks choose better, larger run faster.
        topk: tokens kept per level by each pooled query, >= 1, or one int per level from fine to coarse. More than
            there are candidates means all of them.
        levels: M: pooled levels, in [1, 4]; "auto" (1 up to 16,384 tokens, 2 below 262,144, else 3) or "paper"
            (`floor(log_S L) - 1`).
        enrich: attend to the pooled tokens too. Without, far context is lost.
        disjoint: leave out pooled tokens whose children are attended. Not the published form: there a kept region is
            counted at every level. With it, keeping all is dense attention, which helps fine-tuning from dense weights.
        indices: the keys kept, instead of choosing them: M tensors `(B, H, n_l, K_l)` int32 from fine to coarse, rows
            ascending, -1 after the last entry, at least one entry in each row. `topk` is not used then. The
            entries are checked in eager calls on a CPU; elsewhere one out of range reads nothing outside.
        scale: factor of the dot products, > 0; `1 / sqrt(D)` by default.
        return_lse: also return the log of the weighted sum of exponentials.
        backend: "auto", "reference", "torch" or "triton". A named backend is never replaced.
        is_causal: must be False: a pooled token mixes past and future.

    Returns:
        `(B, H, L, D)` in the dtype and memory order of `query`; with `return_lse` also `(B, H, L)`, natural logarithm,
        in fp32 (fp64 for fp64 inputs).

    Raises:
        UserInputError: an argument has a wrong type, shape, dtype, device or range, or a tangent (forward mode).
        BackendUnavailableError: the named backend cannot run these inputs here.
    """
    if is_causal:
        raise UserInputError("is_causal must be False, got True: a pooled token mixes past and future tokens")
    query, key, value = _autocast(query, key, value)
    check_tensors(query, key, value, block_size, scale, backend)
    check_choice(topk, levels, enrich, disjoint)
    check_no_tangents("llsa_attention", query, key, value)
    if indices is not None:
        check_lists(indices)
    length = query.shape[2]
    if length < block_size:  # one block, all of it kept, nothing pooled
        enrich = disjoint = False
        depth = 1
    elif indices is not None and levels == "auto":
        depth = len(indices)
    else:
        depth = resolve_levels(levels, length, block_size)
    if indices is None:
        if length >= block_size:
            check_topk(topk, depth)
        wanted = [topk] * depth if isinstance(topk, int) else list(topk)[:depth]
        # With the lists come the pooled keys and values, where the backend can use them again.
        pooled_value = value.detach() if enrich else None
        result = _select_op(query.detach(), key.detach(), pooled_value, block_size, wanted, backend)
        chosen, pooled = result[:depth], result[depth:]
    else:
        chosen, pooled = list(indices), []
        check_indices(chosen, query, block_size, depth)
    arguments = block_size, _scale(scale, query), enrich, disjoint, indices is None, backend
    if torch.compiler.is_compiling():
        out, lse = _attention_op(query, key, value, chosen, pooled, *arguments)
    elif not torch.is_grad_enabled():
        out, lse = _without_autograd(query, key, value, chosen, pooled, *arguments)
    else:
        out, lse = _Attention.apply(query, key, value, arguments, depth, *chosen, *pooled)
    return (out, lse) if return_lse else out


def hierarchical_topk(
    query: Tensor,
    key: Tensor,
    *,
    block_size: int = 16,
    topk: int | Sequence[int] = 8,
    levels: int | str = "auto",
    backend: str = "auto",
) -> list[Tensor]:
    """Choose keys level by level, as `llsa_attention` does; no gradient.

    Args:
        query, key, block_size, topk, levels, backend: as in `llsa_attention`.

    Returns:
        M tensors `(B, H, n_l, K_l)` int32 from fine to coarse: tokens of level l kept by each pooled query of level l,
        rows ascending, -1 after the last entry. K_l is `topk`, or the number of candidates where that is less.
    """
    query, key, _ = _autocast(query, key, key)
    check_tensors(query, key, key, block_size, None, backend)
    check_choice(topk, levels, True, False)
    depth = resolve_levels(levels, query.shape[2], block_size)
    check_topk(topk, depth)
    wanted = [topk] * depth if isinstance(topk, int) else list(topk)
    chosen: list[Tensor] = _select_op(query.detach(), key.detach(), None, block_size, wanted, backend)
    return chosen


def enriched_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Sequence[Tensor],
    *,
    block_size: int = 16,
    enrich: bool = True,
    disjoint: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The second half of `llsa_attention`: attend with the keys already chosen, as `hierarchical_topk` returns them."""
    check_lists(indices)
    return llsa_attention(
        query,
        key,
        value,
        block_size=block_size,
        enrich=enrich,
        disjoint=disjoint,
        indices=indices,
        scale=scale,
        return_lse=return_lse,
        backend=backend,
    )


def _scale(scale: float | None, query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, all three in its dtype, as PyTorch's own attention has them."""
    tensors = all(isinstance(x, Tensor) and x.is_floating_point() for x in (query, key, value))
    # "meta" cannot be asked for.
    if not tensors or query.is_meta or not torch.is_autocast_enabled(query.device.type):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    return query.to(dtype), key.to(dtype), value.to(dtype)


@custom_op("diffsieve::llsa_select")
def _select_op(
    query: Tensor, key: Tensor, value: Tensor | None, block_size: int, topk: Sequence[int], backend: str
) -> list[Tensor]:
    """I_1 .. I_M; given `value`, and where `_keeps_pooled`, then levels 1..M of the keys and of the values."""
    name = choose_backend(query, block_size=block_size, backend=backend).name
    kept = kept_per_level(topk, level_lengths(query.shape[2], block_size, len(topk)), block_size)
    with no_autocast(query):
        if name == "triton":
            from .triton_calls import select

            return select(query, key, value, block_size, kept)
        q_pyramid, k_pyramid = (pyramid(x, block_size=block_size, levels=len(kept)) for x in (query, key))
        if name == "torch":
            from .torch_backend import hierarchical_topk_torch

            return hierarchical_topk_torch(q_pyramid, k_pyramid, topk=kept, block_size=block_size)
        from .reference import hierarchical_topk_reference

        return hierarchical_topk_reference(q_pyramid, k_pyramid, topk=kept, block_size=block_size)


def _keeps_pooled(backend: str) -> bool:
    """Whether pooled keys and values are handed on: pooling takes a third of a forward there, and nothing elsewhere."""
    return backend == "triton"


@torch.library.register_fake("diffsieve::llsa_select")
def _(
    query: Tensor, key: Tensor, value: Tensor | None, block_size: int, topk: Sequence[int], backend: str
) -> list[Tensor]:
    lengths = level_lengths(query.shape[2], block_size, len(topk))
    kept = kept_per_level(topk, lengths, block_size)
    result = [
        query.new_empty((*query.shape[:2], length, count), dtype=torch.int32)
        for length, count in zip(lengths[1:], kept, strict=True)
    ]
    if value is not None and _keeps_pooled(choose_backend(query, block_size=block_size, backend=backend).name):
        result += [x.new_empty((*x.shape[:2], n, x.shape[3])) for x in (key, value) for n in lengths[1:]]
    return result


@custom_op("diffsieve::llsa_attention")
def _attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Sequence[Tensor],
    pooled: Sequence[Tensor],
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
    nested: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`pooled`: what `llsa_select` returned behind the lists; `nested`: whether the lists are from there."""
    name = choose_backend(query, block_size=block_size, backend=backend).name
    options: dict[str, Any] = {"block_size": block_size, "scale": scale, "enrich": enrich, "disjoint": disjoint}
    with no_autocast(query):
        if name == "triton":
            from .triton_calls import attend

            return attend(query, key, value, indices, pooled, **options)
        keys, values = (pyramid(x, block_size=block_size, levels=len(indices)) for x in (key, value))
        if name == "torch":
            from .torch_backend import enriched_attention_torch

            return enriched_attention_torch(query, keys, values, indices, **options)
        from .reference import enriched_attention_reference

        out, lse = enriched_attention_reference(query, keys, values, indices, **options)
        return _like(out, query), lse


@torch.library.register_fake("diffsieve::llsa_attention")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Sequence[Tensor],
    pooled: Sequence[Tensor],
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
    nested: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=dtype)


@custom_op("diffsieve::llsa_attention_backward")
def _attention_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Sequence[Tensor],
    pooled: Sequence[Tensor],
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
    nested: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    name = choose_backend(query, block_size=block_size, backend=backend).name
    options: dict[str, Any] = {"block_size": block_size, "scale": scale, "enrich": enrich, "disjoint": disjoint}
    with no_autocast(query):
        if name == "triton":
            from .triton_calls import differentiate

            dq, dk, dv = differentiate(
                grad_out, grad_lse, query, key, value, out, lse, indices, pooled, **options, nested=nested
            )
            return _like(dq, query), _like(dk, key), _like(dv, value)
        keys, values = (pyramid(x, block_size=block_size, levels=len(indices)) for x in (key, value))
        saved = (query, keys, values, out, lse)
        if name == "torch":
            from .torch_backend import enriched_attention_backward_torch

            grads = enriched_attention_backward_torch(grad_out, grad_lse, *saved, indices, **options)
        else:
            from .reference import enriched_attention_backward_reference

            grads = enriched_attention_backward_reference(grad_out, grad_lse, query, keys, values, indices, **options)
    return _like(grads[0], query), _like(grads[1], key), _like(grads[2], value)


@torch.library.register_fake("diffsieve::llsa_attention_backward")
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Sequence[Tensor],
    pooled: Sequence[Tensor],
    block_size: int,
    scale: float,
    enrich: bool,
    disjoint: bool,
    nested: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _like(result: Tensor, x: Tensor) -> Tensor:
    """A result in the dtype and memory order of `x`."""
    # An input with gaps has other strides than its gradient, which costs more to find out.
    same = result.stride() == x.stride() or result.stride() == torch.empty_like(x, device="meta").stride()
    return result if same and result.dtype == x.dtype else torch.empty_like(x).copy_(result)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, indices, pooled, *ctx.options = inputs
    ctx.levels, ctx.pooled = len(indices), len(pooled)
    # The log-sum-exp is saved as well, so autograd must not fill its missing gradient with zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, *indices, *pooled)


def _gradients(
    ctx: Any, saved: Sequence[Tensor], grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, lse, *others = saved
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients: tuple[Tensor, Tensor, Tensor] = _attention_backward_op(
        grad_out, grad_lse, query, key, value, out, lse, others[: ctx.levels], others[ctx.levels :], *ctx.options
    )
    return gradients


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    gradients = _gradients(ctx, ctx.saved_tensors, grad_out, grad_lse)
    return (*gradients, [None] * ctx.levels, [None] * ctx.pooled, *[None] * len(ctx.options))


torch.library.register_autograd("diffsieve::llsa_attention", _backward, setup_context=_setup_context)


def _without_autograd(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The op, past the wrapper that PyTorch generates for its gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        output: tuple[Tensor, Tensor] = _attention_op(*arguments)
    return output


class _Attention(torch.autograd.Function):
    """The same outside of compiled code: PyTorch's generated wrapper of a custom op takes several times as long."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...], levels: int, *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        lists = list(others[:levels]), list(others[levels:])
        output = _without_autograd(query, key, value, *lists, *options)
        _setup_context(ctx, (query, key, value, *lists, *options), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = _gradients(ctx, saved, grads[0], grads[1])
        if torch.is_grad_enabled():  # `create_graph`
            gradients = _Undifferentiable.apply(*saved[:3], *gradients)
        return (*gradients, None, None, *[None] * (ctx.levels + ctx.pooled))


class _Undifferentiable(torch.autograd.Function):
    """Gradients that depend on query, key and value, in a way that has no derivative here.

    `once_differentiable` takes them for constants where the gradient of the output is one, as that of its sum is.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise NotImplementedError("llsa_attention has no second derivative")
