"""Gradients of block-sparse attention on small problems: errors of the Triton kernels, and how large they may be."""

from dataclasses import replace

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention
from diffsieve.kernels.testing import AttentionCase, AttentionInputs
from tests.kernels.cases import BASE

BACKWARD_CASES = [
    replace(BASE, variable=True),
    replace(BASE, len_q=1, len_k=70, heads=1, kv_heads=1, block_size=64),
    replace(BASE, len_q=33, len_k=70, heads=4, kv_heads=2, variable=True, layout="blhd"),
    replace(BASE, layout="padded", dim=20, density=1.0),
    replace(BASE, dim=96, block_size=64, len_q=100, len_k=150, heads=1, kv_heads=1, layout="fused_qkv"),
    replace(BASE, dim=128, block_size=128, len_q=200, len_k=150, heads=1, kv_heads=1),
    replace(BASE, gain=4.0, heads=1, kv_heads=1),
]


def gradient_errors(case: AttentionCase, dtype: torch.dtype, device: str = "cpu") -> dict[str, dict[str, float]]:
    """Errors of the gradients of an output and a log-sum-exp, and twice those of PyTorch's attention, plus rounding.

    Weights come again from a log-sum-exp in fp32, whose rounding is a relative error of every weight.
    """
    inputs = testing.make_inputs(case, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(testing.SEED)
    grad_out = torch.randn(inputs.query.shape, generator=generator, device=device).to(dtype)
    weight = torch.randn(inputs.query.shape[:3], generator=generator, device=device)

    def gradients(problem: AttentionInputs, backend: str | None) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)]
        if backend is None:
            leaf_inputs = replace(problem, query=leaves[0], key=leaves[1], value=leaves[2])
            out = testing.masked_sdpa(leaf_inputs, block_size=case.block_size)
            return torch.autograd.grad(out, leaves, grad_out)
        out, lse = block_sparse_attention(
            *leaves, problem.block_index, problem.block_count,
            block_size=case.block_size, backend=backend, return_lse=True,
        )  # fmt: skip
        through_lse = (lse.masked_fill(lse == float("-inf"), 0.0) * weight).sum()
        return torch.autograd.grad([out, through_lse], leaves, [grad_out.to(out.dtype), None])

    with testing.poisoned_memory():
        ours = gradients(inputs, "triton")
    exact = gradients(inputs.floats_to(torch.float64), "reference")
    # PyTorch's attention has no log-sum-exp: its rounding is taken from the gradient through the output alone.
    weight = torch.zeros_like(weight)
    plain = gradients(inputs.floats_to(torch.float64), "reference")
    dense = gradients(inputs, None)
    names = ("dq", "dk", "dv")
    _, lse = testing.exact_attention(inputs, block_size=case.block_size)
    rounding = torch.finfo(torch.float32).eps * lse[lse.isfinite()].abs().max().item()
    return {
        "errors": {name: testing.error_ratio(o, e) for name, o, e in zip(names, ours, exact, strict=True)},
        "bounds": {name: testing.error_bound(d, p) + rounding for name, d, p in zip(names, dense, plain, strict=True)},
    }
