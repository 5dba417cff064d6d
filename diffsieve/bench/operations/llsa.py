"""LLSA, forward and with the backward, from 64 x 64 to 1,024 x 1,024 tokens, against dense attention."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ...errors import UserInputError
from ...kernels import testing
from ...kernels.llsa import hierarchical_topk, llsa_attention, resolve_levels
from ..config import BenchConfig
from ..peers import sdpa
from ..problem import Operation, Prepared, Problem, Variant

BLOCK, TOPK = 16, 8
# (tokens, levels): 64 squared to 1,024 squared, each with the levels of "auto" and those next to them.
GPU_PROBLEMS = (
    (4_096, 1), (4_096, 2), (16_384, 1), (16_384, 2), (65_536, 1), (65_536, 2), (65_536, 3), (262_144, 2),
    (262_144, 3), (1_048_576, 2), (1_048_576, 3), (1_048_576, 4),
)  # fmt: skip
CPU_PROBLEMS = ((1_024, 1), (4_096, 1), (4_096, 2), (16_384, 2))
# Dense attention takes minutes beyond these.
_DENSE_FORWARD, _DENSE_BACKWARD = 262_144, 65_536
# Largest relative error of outputs and of gradients at full size, which has no written-out reference in low precision.
_BOUNDS = {torch.bfloat16: (5e-3, 1e-2), torch.float16: (1e-3, 2e-3), torch.float32: (1e-5, 1e-5)}
# Tokens of the check against the reference in fp64.
_SMALL = 600

_FORWARD, _BOTH = "forward", "forward and backward"


def settings(config: BenchConfig) -> dict[str, Any]:
    batch, heads, dim = _sizes(config)
    return {"batch": batch, "heads": heads, "dim": dim, "block_size": BLOCK, "topk": TOPK}


def problems(config: BenchConfig) -> list[Problem]:
    if config.tokens is not None:
        wanted = [(tokens, resolve_levels("auto", tokens, BLOCK)) for tokens in config.tokens]
    else:
        wanted = list(GPU_PROBLEMS if config.on_gpu else CPU_PROBLEMS)
    if any(tokens < BLOCK for tokens, _ in wanted):
        raise UserInputError(f"tokens must be at least {BLOCK} for llsa, got {min(wanted)[0]}")
    return [_problem(config, tokens, levels) for tokens, levels in wanted]


def absent(config: BenchConfig) -> dict[str, str]:
    if config.on_gpu:
        return {
            f"dense, {_FORWARD}": f"beyond {_DENSE_FORWARD:,} tokens: takes too long",
            f"dense, {_BOTH}": f"beyond {_DENSE_BACKWARD:,} tokens: takes too long",
        }
    return {}


def _sizes(config: BenchConfig) -> tuple[int, int, int]:
    return 2 if config.on_gpu else 1, config.heads or 4, config.dim or 64


def _dense_kernels(config: BenchConfig) -> dict[str, SDPBackend | None]:
    if not config.on_gpu:
        return {"dense, SDPA": None}
    return {"dense, cuDNN": SDPBackend.CUDNN_ATTENTION, "dense, FlashAttention-2": SDPBackend.FLASH_ATTENTION}


@dataclass
class Inputs:
    """Query, key, value and the gradient of the output, (B, H, L, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def _problem(config: BenchConfig, tokens: int, levels: int) -> Problem:
    def build() -> Inputs:
        generator = torch.Generator(str(config.device)).manual_seed(testing.SEED)
        batch, heads, dim = _sizes(config)
        shape = (4, batch, heads, tokens, dim)
        parts = torch.randn(shape, generator=generator, device=config.device).to(config.torch_dtype).unbind(0)
        query, key, value = (x.clone().requires_grad_() for x in parts[:3])
        return Inputs(query, key, value, parts[3].clone())

    variants = []
    for direction, longest in ((_FORWARD, _DENSE_FORWARD), (_BOTH, _DENSE_BACKWARD)):
        if tokens <= longest:
            variants += [_dense(config, name, kernel, direction) for name, kernel in _dense_kernels(config).items()]
    variants += [_ours(config, levels, direction) for direction in (_FORWARD, _BOTH)]
    name = f"{tokens:,} tokens, {levels} level{'s' * (levels > 1)}"
    return Problem(name, build, tuple(variants), {"tokens": tokens, "levels": levels})


def _dense(config: BenchConfig, name: str, kernel: SDPBackend | None, direction: str) -> Variant:
    def prepare(inputs: Inputs) -> Prepared:
        attend = partial(sdpa, kernel)
        return Prepared(_call(attend, inputs, direction), partial(_check_dense, attend, inputs, direction))

    details = {"method": name, "direction": direction}
    return Variant(f"{name}, {direction}", prepare, details, baseline=True, peer=True)


def _ours(config: BenchConfig, levels: int, direction: str) -> Variant:
    def prepare(inputs: Inputs) -> Prepared:
        attend = partial(llsa_attention, block_size=BLOCK, topk=TOPK, levels=levels)
        call = _call(attend, inputs, direction)
        extra = partial(memory, inputs, levels) if config.on_gpu and direction == _BOTH else None
        return Prepared(call, partial(_check, inputs, levels, direction), extra=extra)

    details = {"method": "LLSA", "direction": direction}
    return Variant(f"LLSA, {direction}", prepare, details)


def _call(attend: Callable[..., Any], inputs: Inputs, direction: str) -> Callable[[], object]:
    if direction == _BOTH:
        return lambda: torch.autograd.grad(attend(*inputs.leaves()), inputs.leaves(), inputs.grad_out)

    def forward() -> object:
        with torch.no_grad():
            return attend(*inputs.leaves())

    return forward


def _solve(
    attend: Callable[..., Any], leaves: tuple[Tensor, ...], grad_out: Tensor, direction: str
) -> dict[str, Tensor]:
    if direction == _FORWARD:
        with torch.no_grad():
            return {"out": attend(*leaves)}
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    out = attend(*leaves)
    return {"out": out.detach()} | dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, grad_out.to(out.dtype)), strict=True)
    )


def _bounds(dtype: torch.dtype, names: Any) -> dict[str, float]:
    of_output, of_gradient = _BOUNDS[dtype]
    return {name: of_output if name == "out" else of_gradient for name in names}


def _check(inputs: Inputs, levels: int, direction: str) -> dict[str, Any]:
    """Last head of the last clip against the torch backend in fp64 on the same lists; two runs give the same bits.

    The torch backend is what can compute these lengths in fp64; the gate compares both with the reference.
    """
    attend = partial(llsa_attention, block_size=BLOCK, topk=TOPK, levels=levels)
    with testing.poisoned_memory():
        ours = _solve(attend, inputs.leaves(), inputs.grad_out, direction)
        again = _solve(attend, inputs.leaves(), inputs.grad_out, direction)
    same = all(torch.equal(ours[name], again[name]) for name in ours)
    finite = all(bool(x.isfinite().all()) for x in ours.values())
    del again
    with torch.no_grad():
        lists = hierarchical_topk(inputs.query, inputs.key, block_size=BLOCK, topk=TOPK, levels=levels)
    last = [x.detach()[-1:, -1:] for x in (*inputs.leaves(), inputs.grad_out)]
    trusted = partial(
        llsa_attention, block_size=BLOCK, indices=[x[-1:, -1:].contiguous() for x in lists], backend="torch"
    )  # fmt: skip
    exact = _solve(trusted, tuple(x.double() for x in last[:3]), last[3].double(), direction)
    errors = {name: testing.error_ratio(ours[name][-1:, -1:], exact[name]) for name in exact}
    return {"error": errors, "bound": _bounds(inputs.query.dtype, errors), "ok": same and finite}


def _check_dense(attend: Callable[..., Any], inputs: Inputs, direction: str) -> dict[str, Any]:
    """Sampled rows of the last head of the last clip against fp64: the output, and the gradient of the queries."""
    ours = _solve(attend, inputs.leaves(), inputs.grad_out, direction)
    rows = torch.linspace(0, inputs.query.shape[2] - 1, 64, device=inputs.query.device).long()
    query, key, value, grad = (x.detach()[-1, -1].double() for x in (*inputs.leaves(), inputs.grad_out))
    query = query[rows].requires_grad_()
    out = (query @ key.T * query.shape[-1] ** -0.5).softmax(-1) @ value
    exact = {"out": out.detach()}
    if direction == _BOTH:
        exact["dq"] = torch.autograd.grad(out, query, grad[rows])[0]
    errors = {name: testing.error_ratio(ours[name][-1, -1, rows], exact[name]) for name in exact}
    return {"error": errors, "bound": _bounds(inputs.query.dtype, errors)}


def memory(inputs: Inputs, levels: int) -> dict[str, Any]:
    """Peak of forward and backward, inputs and results included, over what these and the lists take."""
    lists = hierarchical_topk(inputs.query.detach(), inputs.key.detach(), block_size=BLOCK, topk=TOPK, levels=levels)
    list_bytes = sum(x.numel() * x.element_size() for x in lists)
    del lists
    one = inputs.query.numel() * inputs.query.element_size()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = _call(partial(llsa_attention, block_size=BLOCK, topk=TOPK, levels=levels), inputs, _BOTH)()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before + 4 * one
    del grads
    needed = 8 * one + list_bytes  # q, k, v, o and their gradients
    return {"memory": {"peak_bytes": peak, "tensors_and_lists_bytes": needed, "ratio": peak / needed}}


def gate(config: BenchConfig) -> dict[str, Any]:
    """Output and gradients against the reference in fp64 on the same lists, one to three levels, a ragged length.

    Bounds are those of full size; the torch backend in fp64, which full sizes are compared with, is held to 1e-9.
    """
    generator = torch.Generator(str(config.device)).manual_seed(testing.SEED)
    errors, bounds = {}, {}
    for levels, block in ((1, BLOCK), (2, BLOCK), (3, 8)):
        shape = (4, 1, 2, _SMALL, 64)
        parts = torch.randn(shape, generator=generator, device=config.device).to(config.torch_dtype).unbind(0)
        choice = {"block_size": block, "topk": 3, "levels": levels}
        lists = hierarchical_topk(*parts[:2], **choice)  # type: ignore[arg-type]
        attend = partial(llsa_attention, block_size=block, indices=lists)
        exact, trusted = (
            _solve(partial(attend, backend=backend), tuple(x.double() for x in parts[:3]), parts[3].double(), _BOTH)
            for backend in ("reference", "torch")
        )
        ours = _solve(partial(llsa_attention, **choice), tuple(parts[:3]), parts[3], _BOTH)  # type: ignore[arg-type]
        for name, bound in _bounds(config.torch_dtype, exact).items():
            errors[f"{name}, {levels} levels"] = testing.error_ratio(ours[name], exact[name])
            bounds[f"{name}, {levels} levels"] = bound
            errors[f"{name}, {levels} levels, torch backend"] = testing.error_ratio(trusted[name], exact[name])
            bounds[f"{name}, {levels} levels, torch backend"] = 1e-9
    return {"error": errors, "bound": bounds}


OPERATION = Operation(
    "llsa", "LLSA forward and backward over 64² to 1024² tokens", settings, problems, absent, gate
)  # fmt: skip
