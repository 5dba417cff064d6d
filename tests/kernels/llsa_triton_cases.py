"""Problems of LLSA that are small enough for the Triton interpreter, and what the tests measure on each."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention
from diffsieve.kernels.llsa.levels import level_lengths
from tests.kernels import llsa_cases
from tests.kernels.compiling import launches_of
from tests.kernels.llsa_cases import LLSACase

BASE = LLSACase(heads=1, kv_heads=1, length=100, dim=16, block_size=8)
CASES = [
    BASE,
    replace(BASE, length=1),
    replace(BASE, length=7),  # less than one block: dense
    replace(BASE, length=17, block_size=16, topk=8),
    # 1, 2, 15, 63 and 65 tokens at the coarsest level; lists of 1, 5, 6, 7 and all.
    replace(BASE, length=8),
    replace(BASE, length=13),
    replace(BASE, length=117, topk=20),
    replace(BASE, length=502, topk=5),
    replace(BASE, length=515, topk=1),
    replace(BASE, length=203, topk=20),  # lists of more than 16
    replace(BASE, batch=2, heads=4, kv_heads=2, length=67, levels=2, topk=6),
    replace(BASE, length=203, levels=3),
    replace(BASE, length=520, topk=1, levels=4),
    replace(BASE, length=150, block_size=16, levels=2, topk=7),
    replace(BASE, length=100, block_size=32, dim=96, topk=2),
    replace(BASE, heads=2, kv_heads=1, length=80, block_size=64, dim=128, topk=1),
    replace(BASE, length=150, block_size=128, dim=20, topk=1),
    replace(BASE, length=20, dim=256),
    replace(BASE, length=97, levels=2, enrich=False),
    replace(BASE, length=60, disjoint=True),
    replace(BASE, length=203, levels=3, disjoint=True),
    replace(BASE, length=67, levels=2, layout="blhd"),
    replace(BASE, heads=2, kv_heads=2, length=67, layout="fused_qkv"),
    replace(BASE, length=67, levels=2, layout="padded"),
    *(replace(BASE, gain=gain, dim=dim, length=33) for gain in (4.0, 16.0) for dim in (32, 128)),
]


def measure(case: LLSACase, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Errors of output, log-sum-exp and gradients on the keys that the kernels chose, and the bound of each.

    On a GPU also whether a call that chooses the same keys itself gives the same gradients, bit for bit ("nested").

    The bound is twice the error of PyTorch's attention over the same tokens in the same dtype, plus rounding.
    """
    inputs = llsa_cases.make_inputs(case, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(testing.SEED)
    grad_out = torch.randn(inputs[0].shape, generator=generator, device=device).to(dtype)
    with testing.poisoned_memory():
        indices = llsa_cases.choose_keys(case, inputs[0], inputs[1], "triton")
        ours = llsa_cases.solve(case, inputs, indices, grad_out, "triton")
    exact = llsa_cases.exact(case, inputs, indices, grad_out)
    eager = llsa_cases.dense_low_precision(case, inputs, indices, grad_out)
    single = llsa_cases.exact(case, tuple(x.detach().float() for x in inputs), indices, grad_out)
    errors = {name: testing.error_ratio(ours[name], exact[name]) for name in eager}
    bounds = {name: testing.error_bound(eager[name], exact[name]) for name in eager}
    errors["lse"] = testing.lse_error(ours["lse"], exact["lse"])
    # Pooled keys are rounded to the dtype, which moves their logits by at most half a unit of |q| |k| / sqrt(D).
    longest = [x.detach().double().norm(dim=-1).max().item() for x in inputs[:2]]
    pooled = longest[0] * longest[1] * case.dim**-0.5 * torch.finfo(dtype).eps / 2
    bounds["lse"] = testing.lse_bound(single["lse"], exact["lse"]) + (pooled if dtype != torch.float32 else 0.0)
    if device == "cpu":
        return {"errors": errors, "bounds": bounds}
    with testing.poisoned_memory():
        out = llsa_attention(*inputs, **case.form, topk=case.topk, levels=case.levels, backend="triton")
        grads = torch.autograd.grad(out, inputs, grad_out)
    same = all(torch.equal(grad, ours[name]) for name, grad in zip(("dq", "dk", "dv"), grads, strict=True))
    return {"errors": errors, "bounds": bounds, "nested": same}


def not_a_number(device: str = "cpu") -> dict[str, bool]:
    """NaN and infinity in the inputs: lists stay in range, and what comes out is NaN where it must be."""
    from diffsieve.kernels.llsa import triton_backend

    generator = torch.Generator(device).manual_seed(testing.SEED)
    q, k, v = (torch.randn(1, 1, 100, 16, generator=generator, device=device) for _ in range(3))
    q[0, 0, 3, 5] = float("nan")
    k[0, 0, 50, 2] = float("inf")
    pyramids = [triton_backend.pyramid_triton(x, 8, 2) for x in (q, k, v)]
    lists = triton_backend.hierarchical_topk_triton(*pyramids[:2], 3, 8)
    out, _ = triton_backend.enriched_attention_fwd_triton(
        q, *pyramids[1:], lists, block_size=8, scale=0.25, enrich=True, disjoint=False
    )
    in_range = [bool(((i >= -1) & (i < n)).all()) for i, n in zip(lists, level_lengths(100, 8, 2)[1:], strict=True)]
    return {"in range": all(in_range), "reported": bool(out[0, 0, 3].isnan().all())}


def out_of_range(device: str = "cpu") -> dict[str, bool]:
    """Lists with entries that do not exist: nothing outside the tensors may be read, so nothing may be NaN."""
    from diffsieve.kernels.llsa import triton_backend

    generator = torch.Generator(device).manual_seed(testing.SEED)
    q, k, v = (torch.randn(1, 1, 100, 16, generator=generator, device=device) for _ in range(3))
    pyramids = [triton_backend.pyramid_triton(x, 8, 2) for x in (k, v)]
    entries = [[-7, 0, 500], [2**31 - 1, 13, -1], [2**28, 2**29, 1]]
    options = {"block_size": 8, "scale": 0.25, "enrich": True, "disjoint": False}
    finite = {}
    for row in entries:
        lists = [
            torch.tensor(row, dtype=torch.int32, device=device).expand(1, 1, n, 3) for n in level_lengths(100, 8, 2)[1:]
        ]
        out, lse = triton_backend.enriched_attention_fwd_triton(q, *pyramids, lists, **options)
        finite[str(row)] = bool(out.isfinite().all() and lse.isfinite().all())
    return finite


def op_contract(device: str = "cpu") -> dict[str, bool]:
    """`opcheck` of both operations with this backend, and whether a compiled call gives the bits of an eager one."""
    generator = torch.Generator(device).manual_seed(testing.SEED)
    leaves = [
        torch.randn(1, heads, 70, 16, generator=generator, device=device).requires_grad_() for heads in (2, 1, 1)
    ]  # fmt: skip
    call = partial(llsa_attention, block_size=8, topk=3, levels=2, backend="triton")
    chosen = hierarchical_topk(*leaves[:2], block_size=8, topk=3, levels=2, backend="triton")
    arguments = (*leaves, chosen, [], 8, 0.25, True, False, False, "triton")
    checks = torch.library.opcheck(torch.ops.diffsieve.llsa_attention, arguments)
    selected = (*(x.detach() for x in leaves), 8, [3, 9], "triton")
    select_checks = torch.library.opcheck(torch.ops.diffsieve.llsa_select, selected)
    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    return {
        "attention": set(checks.values()) == {"SUCCESS"},
        "selection": set(select_checks.values()) == {"SUCCESS"},
        "compiled": all(map(torch.equal, *results)),
    }


def launches(dtype: torch.dtype, dim: int, block_size: int, levels: int, disjoint: bool) -> list:
    """All launches of a forward and backward, arguments and all, without running a kernel."""
    from diffsieve.kernels.llsa import triton_backend

    length = 2 * block_size**levels
    q, k, v = (torch.zeros(1, 2, length, dim, dtype=dtype) for _ in range(3))

    def run() -> None:
        pyramids = triton_backend.pyramids_triton((q, k, v), block_size, levels)
        triton_backend.hierarchical_topk_triton(*pyramids[:2], 8, block_size)
        lists = [
            torch.zeros(1, 2, n, 8, dtype=torch.int32) for n in level_lengths(length, block_size, levels)[1:]
        ]  # fmt: skip
        options = {"block_size": block_size, "scale": 0.1, "enrich": True, "disjoint": disjoint}
        out, lse = triton_backend.enriched_attention_fwd_triton(q, *pyramids[1:], lists, **options)
        triton_backend.enriched_attention_bwd_triton(
            out, None, q, *pyramids[1:], out, lse, lists, nested=True, merge=True, **options
        )  # fmt: skip

    return launches_of(triton_backend, run)


def repeated_equals_whole(device: str, length: int = 1030, all_kinds: bool = True) -> dict[str, dict[str, Any]]:
    """Whether calls repeated by their launches give the bits of whole ones: output, log-sum-exp and gradients.

    "repeated" counts the calls that were repeated, of three: selection, forward and backward. All must be.

    Each kind of inputs comes three times with other values, then once more with nothing remembered. Without `all_kinds`
    one kind alone: the others have more kernels to compile.
    """
    from diffsieve.kernels import replay

    generator = torch.Generator(device).manual_seed(testing.SEED)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    def aligned() -> tuple[torch.Tensor, ...]:
        return random(2, 4, length, 64), random(2, 2, length, 64), random(2, 2, length, 64)

    def misaligned() -> tuple[torch.Tensor, ...]:
        return tuple(random(x.numel() + 1)[1:].view(x.shape) for x in aligned())

    def fused() -> tuple[torch.Tensor, ...]:
        return random(2, length, 8, 64).transpose(1, 2).split((4, 2, 2), 1)

    def solve(inputs: tuple[torch.Tensor, ...], weight: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse = llsa_attention(*leaves, **options, levels=2, return_lse=True, backend="triton")
        return [out, lse, *torch.autograd.grad(((out * weight).sum(), (lse * weight[..., 0]).sum()), leaves)]

    same = {}
    kinds = (aligned, False), (aligned, True), (misaligned, False), (fused, False)
    for make, disjoint in kinds if all_kinds else kinds[:1]:
        replay._CALLS.clear()
        runs = [(make(), random(2, 4, length, 64), {"disjoint": disjoint}) for _ in range(3)]
        with testing.poisoned_memory():
            remembered = [solve(*run) for run in runs]
            n_calls = sum(call is not None for call in replay._CALLS.values())
            whole = []
            for run in runs:
                replay._CALLS.clear()
                whole.append(solve(*run))
        equal = all(
            torch.equal(a, b) for one, two in zip(remembered, whole, strict=True) for a, b in zip(one, two, strict=True)
        )
        same[f"{make.__name__}, disjoint {disjoint}"] = {"same bits": equal, "repeated": n_calls}
    return same
