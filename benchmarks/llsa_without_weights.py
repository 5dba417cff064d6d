"""The ablation of LLSA without the weights of pooled tokens, where a mean of 16 tokens counts like one token.

The package has no such switch, since nobody should want it: here the kernels of a whole process are changed, and held
against a definition by one masked dense attention, which `llsa_forms.py` uses for all forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, TOPK = 16, 8


@triton.jit
def unweighted(length, n_l, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    b_zero = tl.full([1], 0.0, dtype=tl.float32)
    return b_zero, b_zero


def drop_weights() -> None:
    """Let pooled tokens count once, whatever they stand for: the ablation without weights, for this process alone.

    Call it before any attention. The backward kernels read the weight through a function; the forward kernel gets it
    from its launch: LOG2_BLOCK a level, and for the last token of a level what that is short of it.
    """
    from diffsieve.kernels.llsa import backward_kernels, triton_backend

    launch_as_it_is = triton_backend.launch

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launch_as_it_is(kernel, grid, *args, **options | ({"LOG2_BLOCK": 0} if "LOG2_BLOCK" in options else {}))

    backward_kernels.log2_weights = unweighted  # type: ignore[assignment]
    triton_backend.launch = launch
    triton_backend._shortfalls = lambda length, block_size, levels, scale_log2: (0.0,) * levels


def definition(q: Tensor, k: Tensor, v: Tensor, lists: Sequence[Tensor], *, weighted: bool) -> Tensor:
    """LLSA of 1 or more levels by one masked dense attention, with or without the weights of pooled tokens."""
    length, levels = q.shape[2], len(lists)
    query = torch.arange(length, device=q.device)
    keys, values, biases = [], [], []
    for level in range(levels + 1):
        span = BLOCK**level
        tokens = math.ceil(length / span)
        counts = torch.full((tokens,), float(span), device=q.device)
        counts[-1] = length - (tokens - 1) * span
        for means, x in ((keys, k), (values, v)):
            padded = torch.nn.functional.pad(x, (0, 0, 0, tokens * span - length))
            means.append(padded.unflatten(2, (tokens, span)).sum(3) / counts[:, None])
        bias = (counts.log() if weighted else torch.zeros_like(counts)).expand(*q.shape[:2], length, tokens)
        if level < levels:
            blocks = math.ceil(tokens / BLOCK)
            kept = torch.zeros(*q.shape[:2], blocks, blocks + 1, dtype=torch.bool, device=q.device)
            kept.scatter_(-1, torch.where(lists[level] < 0, blocks, lists[level]).long(), True)
            own = kept[:, :, query // (span * BLOCK)]
            bias = bias.where(own[..., torch.arange(tokens, device=q.device) // BLOCK], -torch.inf)
        biases.append(bias)
    keys, values, mask = (torch.cat(x, dim=dim) for x, dim in ((keys, 2), (values, 2), (biases, 3)))
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def error_of_kernels(levels: int, *, weighted: bool, device: str, length: int) -> float:
    """Relative error of the Triton kernels in float32, the largest of output and gradients, against `definition`."""
    from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention

    generator = torch.Generator(device).manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, length, 64, device=device, generator=generator) for _ in range(4))
    lists = hierarchical_topk(q, k, block_size=BLOCK, topk=TOPK, levels=levels)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = llsa_attention(*inputs, block_size=BLOCK, levels=levels, indices=lists, backend="triton")
    assert isinstance(out, Tensor)
    expected = definition(q, k, v, lists, weighted=weighted)
    ours, theirs = ([x, *torch.autograd.grad(x, inputs, g)] for x in (out, expected))
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in zip(ours, theirs, strict=True))


def check_without_weights(device: str = "cuda", length: int = 1000) -> float:
    """The larger error of the kernels without weights with one and two levels.

    Raises:
        SystemExit: it is too large.
    """
    error = max(error_of_kernels(levels, weighted=False, device=device, length=length) for levels in (1, 2))
    if not error < 5e-3:
        raise SystemExit(f"the kernels without weights must agree with the definition, got a relative error of {error}")
    return error
