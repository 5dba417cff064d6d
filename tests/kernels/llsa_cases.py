"""Problems of LLSA for the tests of all its backends, and their exact and low-precision solutions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import testing
from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention, pyramid
from diffsieve.kernels.llsa.reference import token_weights


@dataclass(frozen=True)
class LLSACase:
    """One problem: sizes, settings of `llsa_attention`, memory layout and gain of the inputs (`testing.LAYOUTS`)."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    length: int = 100
    dim: int = 32
    block_size: int = 8
    topk: int | tuple[int, ...] = 3
    levels: int = 1
    enrich: bool = True
    disjoint: bool = False
    layout: str = "contiguous"
    gain: float = 1.0

    def __str__(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}of{self.kv_heads}"
        topk = str(self.topk) if isinstance(self.topk, int) else ",".join(map(str, self.topk))
        parts = [f"B{self.batch}-{heads}-L{self.length}-D{self.dim}-b{self.block_size}-k{topk}-M{self.levels}"]
        parts += [] if self.enrich else ["fine"]
        parts += ["disjoint"] if self.disjoint else []
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += [f"x{self.gain:g}"] if self.gain != 1 else []
        return "-".join(parts)

    @property
    def selection(self) -> dict[str, object]:
        """Arguments of `hierarchical_topk`."""
        return {"block_size": self.block_size, "topk": self.topk, "levels": self.levels}

    @property
    def form(self) -> dict[str, object]:
        """Arguments of `enriched_attention`."""
        return {"block_size": self.block_size, "enrich": self.enrich, "disjoint": self.disjoint}


BASE = LLSACase()
# Lengths with 1, 2, 15, 63, 64 and 65 tokens at the coarsest level, none of them a multiple of the block.
COARSE_CASES = [replace(BASE, length=8 * n - 3, heads=1, kv_heads=1) for n in (2, 15, 63, 64, 65)] + [
    replace(BASE, length=16 * n - 5, block_size=4, levels=2, heads=1, kv_heads=1) for n in (1, 2, 15, 63, 64, 65)
]
TOPK_CASES = [replace(BASE, topk=k, length=157) for k in (1, 5, 6, 7, 20, 99)] + [
    replace(BASE, topk=k, length=203, block_size=4, levels=2) for k in (1, 6, 20, 99)
]
BLOCK_CASES = [
    replace(BASE, block_size=block, length=3 * block + 7, topk=2, heads=1, kv_heads=1) for block in (8, 16, 32, 64, 128)
]
SHAPE_CASES = [
    replace(BASE, length=1),
    replace(BASE, length=7),  # less than one block: dense
    replace(BASE, length=8),
    replace(BASE, length=17, block_size=16, topk=8),
    replace(BASE, batch=2, heads=3, kv_heads=3, length=97, block_size=4, levels=2),
    replace(BASE, length=203, block_size=4, levels=3),
    replace(BASE, length=150, block_size=4, levels=4, topk=2),
    replace(BASE, batch=2, heads=4, kv_heads=2, length=97, block_size=4, levels=2),
    replace(BASE, heads=4, kv_heads=1, length=203, block_size=4, levels=3, disjoint=True),
    replace(BASE, dim=96),
    replace(BASE, dim=20),
    replace(BASE, dim=128),
    replace(BASE, enrich=False),
    replace(BASE, enrich=False, length=97, block_size=4, levels=2),
    replace(BASE, disjoint=True),
    replace(BASE, disjoint=True, length=97, block_size=4, levels=2),
    replace(BASE, disjoint=True, length=203, block_size=4, levels=3, topk=20),
]
LAYOUT_CASES = [
    replace(BASE, layout=layout, length=97, block_size=4, levels=2) for layout in ("blhd", "fused_qkv", "padded")
]
GAIN_CASES = [replace(BASE, gain=gain, dim=dim, heads=1, kv_heads=1) for gain in (4.0, 16.0) for dim in (32, 64, 128)]
CASES = [BASE, *COARSE_CASES, *TOPK_CASES, *BLOCK_CASES, *SHAPE_CASES, *LAYOUT_CASES, *GAIN_CASES]


def make_inputs(case: LLSACase, *, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value of a case, in its memory layout; leaves of autograd."""
    problem = testing.AttentionCase(
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        len_q=case.length,
        len_k=case.length,
        dim=case.dim,
        block_size=case.block_size,
        layout=case.layout,
        gain=case.gain,
    )
    inputs = testing.make_inputs(problem, dtype=dtype, device=device)
    query, key, value = (x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    return query, key, value


def choose_keys(case: LLSACase, query: Tensor, key: Tensor, backend: str = "reference") -> list[Tensor]:
    """The keys that a backend chooses for a case."""
    return hierarchical_topk(query, key, **case.selection, backend=backend)


def exact(case: LLSACase, inputs: tuple[Tensor, ...], indices: list[Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients of the reference in fp64, of the inputs as they are rounded, by name."""
    inputs = tuple(x.detach().double().requires_grad_() for x in inputs)
    return solve(case, inputs, indices, grad_out, "reference")


def solve(
    case: LLSACase, inputs: tuple[Tensor, ...], indices: list[Tensor], grad_out: Tensor, backend: str
) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients of a backend with given keys, by name."""
    out, lse = llsa_attention(*inputs, **case.form, indices=indices, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out, inputs, grad_out.to(out.dtype))
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def dense_low_precision(
    case: LLSACase, inputs: tuple[Tensor, ...], indices: list[Tensor], grad_out: Tensor
) -> dict[str, Tensor]:
    """Output and gradients of PyTorch's attention in the dtype of the inputs, all levels in one masked sequence.

    What an eager user would write; the yardstick for errors of kernels.
    """
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    query, key, value = inputs
    form = dict(case.form)
    if case.length < case.block_size:
        form |= {"enrich": False, "disjoint": False}
    depth = len(indices) + 1 if form["enrich"] else 1
    weights = token_weights(indices, length=case.length, **form)
    mask = torch.cat(weights, dim=-1).to(query.dtype).log()
    group = query.shape[1] // key.shape[1]
    levels = [pyramid(x, block_size=case.block_size, levels=len(indices))[:depth] for x in (key, value)]
    k, v = (torch.cat([x.to(query.dtype) for x in parts], dim=2).repeat_interleave(group, dim=1) for parts in levels)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask)
    grads = torch.autograd.grad(out, inputs, grad_out.to(out.dtype))
    return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
