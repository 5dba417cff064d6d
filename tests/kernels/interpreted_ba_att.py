"""Not a test file: run by test_ba_att_triton.py in a process of its own, under the Triton interpreter.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before anything imports Triton, and must not leak
into other tests. Writes one JSON object to stdout: case name -> what the test asserts on.
"""

import json
import os
import sys
import warnings
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.ba_att import ba_attention, block_mask, calibrate_budgets, calibrate_orders, forms
from diffsieve.kernels.ba_att.centroids import _add_skipped_op, add_centroids, add_skipped_fused
from diffsieve.kernels.ba_att.fused import (
    _gather_moments_op,
    _scatter_tokens_op,
    gather_with_means,
    gather_with_statistics,
    scatter_tokens,
)
from diffsieve.kernels.ba_att.ordering import _window_order_op
from diffsieve.kernels.ba_att.reference import ba_attention_reference
from diffsieve.kernels.ba_att.selection import skipped_blocks
from tests.kernels.ba_att_cases import CASES, BAAttCase, make_inputs, relative_error


def whole_call(case: BAAttCase) -> dict[str, object]:
    """The call with every Triton kernel in fp16 against the same call in PyTorch, and both against fp64."""
    inputs = make_inputs(case, torch.float16)
    options = case.options()
    with testing.poisoned_memory():
        out, info = ba_attention(*inputs, backend="triton", return_info=True, **options)
        again = ba_attention(*inputs, backend="triton", **options)
    plain, plain_info = ba_attention(*inputs, backend="torch", return_info=True, **options)
    exact, _ = ba_attention_reference(*(x.double() for x in inputs), **options)
    return {
        "same again": torch.equal(out, again),
        "same blocks": torch.equal(info.block_index, plain_info.block_index),
        "error": relative_error(out, exact),
        "plain error": relative_error(plain, exact),
    }


def steps(case: BAAttCase) -> dict[str, float]:
    """Each fused step against PyTorch's in fp32."""
    query, _, value = make_inputs(case, torch.float32)
    length = query.shape[2]
    generator = torch.Generator().manual_seed(1)
    perms = {
        "none": None,
        "shared": torch.randperm(length, generator=generator),
        "per head": torch.stack([torch.randperm(length, generator=generator) for _ in range(2 * case.heads)])
        .unflatten(0, (2, case.heads)),
    }  # fmt: skip
    differences = {}
    for name, perm in perms.items():
        for label, tokens in (("query", query), ("value", value)):
            with testing.poisoned_memory():
                got, moments = gather_with_statistics(tokens, perm, case.block_size, fused=True)
                only, mean = gather_with_means(tokens, perm, case.block_size, fused=True)
            expected, reference = gather_with_statistics(tokens, perm, case.block_size, fused=False)
            differences[f"{label}, {name}"] = max(
                float((a - b).abs().max())
                for a, b in (
                    (got, expected),
                    (only, expected),
                    (mean, reference.mean),
                    *zip(moments, reference, strict=True),
                )
            )
            if perm is not None:
                with testing.poisoned_memory():
                    back = scatter_tokens(got, perm, fused=True)
                    strided = scatter_tokens(got.transpose(1, 2).contiguous().transpose(1, 2), perm, fused=True)
                assert torch.equal(back, scatter_tokens(got, perm, fused=False))
                assert torch.equal(back, strided)
    return differences


def skipped_blocks_added(case: BAAttCase, boost: float, query_gain: float, apart: float) -> dict[str, float]:
    """The centroid term over lists, the order undone, against PyTorch's over a mask in fp64, and PyTorch's in fp16.

    `boost` is added to the log-sum-exp over the kept keys: far below the skipped blocks' logits weights overflow fp16.
    `apart` is the distance of queries and keys from 0, in opposite directions: it takes logits far below 0.
    """
    query, key, value = make_inputs(case, torch.float16)
    query, key = query * query_gain + apart, key - apart
    length, generator = query.shape[2], torch.Generator().manual_seed(1)
    perm = torch.randperm(length, generator=generator)
    per_head = torch.stack([torch.randperm(length, generator=generator) for _ in range(2 * case.heads)])
    (_, keys), (_, values) = (gather_with_statistics(x, None, case.block_size, fused=False) for x in (key, value))
    blocks = keys.size.shape[0]
    lse = torch.randn(query.shape[:3], generator=generator) + boost
    if boost == -torch.inf:
        lse[:, :, 3] = 0.0
    out = value.repeat_interleave(case.heads // case.kv_heads, dim=1) * lse.isfinite()[..., None]
    means = [x.mean.half().float() for x in (keys, values)]  # the kernel takes them in the dtype of the tokens
    width = blocks // 2
    lists = torch.rand(2, case.heads, blocks, blocks, generator=generator).argsort(-1)[..., :width].sort(-1).values
    count = torch.randint(0, width + 1, lists.shape[:3], generator=generator).int()
    count[0, 0, 0] = 0
    options = {"block_size": case.block_size, "scale": 0.2}
    found = {"error": 0.0, "plain error": 0.0, "log-sum-exp": 0.0}
    for order, counts in ((None, None), (perm, count), (per_head.unflatten(0, (2, case.heads)), None)):
        kept, number = skipped_blocks(lists.int(), counts, blocks)  # the others, so that they vary in number
        mask = ~block_mask(kept, number, blocks)
        inputs = (out, lse, query, *means, keys.size, mask)
        exact, exact_lse = add_centroids(*(x.double() if x.is_floating_point() else x for x in inputs), **options)
        plain, _ = add_centroids(*inputs, **options)
        with testing.poisoned_memory():
            args = (out, lse, query, *means, kept, number, order)
            got, got_lse = add_skipped_fused(*args, **options)
            again, _ = add_skipped_fused(*args, **options)
        assert torch.equal(got, again)
        exact = scatter_tokens(exact, order, fused=False)
        found["error"] = max(found["error"], relative_error(got, exact))
        found["plain error"] = max(
            found["plain error"], relative_error(scatter_tokens(plain, order, fused=False), exact)
        )
        same_infinity = torch.equal(got_lse.isinf(), exact_lse.isinf())
        finite = ~exact_lse.isinf()
        difference = (got_lse - exact_lse)[finite].abs() / exact_lse[finite].abs().clamp(min=1)
        found["log-sum-exp"] = max(found["log-sum-exp"], float(difference.max()) if same_infinity else float("inf"))
    return found


def skipped_blocks_found() -> dict[str, dict[str, float]]:
    return {
        f"{case}, {boost}, {gain}, {apart}": skipped_blocks_added(case, boost, gain, apart)
        for case in (CASES[0], CASES[1], CASES[3])
        for boost, gain, apart in (
            (0.0, 1.0, 0.0),
            (-30.0, 1.0, 0.0),
            (-300.0, 1.0, 0.0),
            (-float("inf"), 1.0, 0.0),
            (300.0, 1.0, 0.0),
            (0.0, 16.0, 0.0),
            # No kept key and weights below what fp16 holds, then fp32.
            (-float("inf"), 1.0, 2.0),
            (-float("inf"), 1.0, 6.0),
        )
    }


def calibration_difference(case: BAAttCase, orders: tuple[int, ...] | None) -> float:
    """Errors of all orders, or of budgets in these, from the kernels of a GPU, against those from PyTorch's."""
    inputs = make_inputs(case, torch.float16)
    options = {"grid_thw": case.grid, "density": case.density, "block_size": case.block_size}
    options |= {"compensate": "centroid", "score": "residual"}
    calibrate = calibrate_orders if orders is None else partial(calibrate_budgets, orders=torch.tensor(orders))
    plain = calibrate(*inputs, **options)
    return float(((calibrate(*inputs, backend="triton", **options) - plain).abs() / plain).max())


def compiled_difference(case: BAAttCase) -> float:
    """The compiled call, its operations opaque, against the eager one."""
    torch._dynamo.reset()
    inputs = make_inputs(case, torch.float16)
    options = {**case.options(), "backend": "triton"}
    compiled = torch.compile(ba_attention, fullgraph=True, backend="aot_eager")
    return relative_error(compiled(*inputs, **options), ba_attention(*inputs, **options).double())


def check_operations() -> None:
    """Schemas and shapes of the operations, by PyTorch's own checks."""
    tokens = torch.randn(2, 40, 4, 24).transpose(1, 2).half()
    shared, per_head = torch.randperm(40), torch.stack([torch.randperm(40) for _ in range(8)]).unflatten(0, (2, 4))
    means, lse, lists = torch.randn(2, 2, 3, 24), torch.randn(2, 4, 40), torch.zeros(2, 4, 3, 2).int()
    attended, count = (tokens.contiguous(), lse, tokens.contiguous(), means, means), torch.ones(2, 4, 3).int()
    for check in ("test_schema", "test_faketensor"):
        run = partial(torch.library.opcheck, test_utils=check)
        for perm in (None, shared, per_head):
            for variance in (True, False):
                run(_gather_moments_op, (tokens, perm, 16, variance))
            for counts in (None, count):
                run(_add_skipped_op, (*attended, lists, counts, perm, 16, 0.2))
            if perm is not None:
                run(_scatter_tokens_op, (tokens, perm))
        run(_window_order_op, (tokens, torch.randn(2, 4, 1, 24), shared, 16, True))


def main() -> None:
    warnings.simplefilter("ignore")
    check_operations()
    result: dict[str, object] = {"whole call": {str(case): whole_call(case) for case in CASES}}
    result["steps"] = {str(case): steps(case) for case in CASES[:3]}
    result["compiled"] = max(compiled_difference(case) for case in (CASES[0], CASES[11]))
    result["skipped"] = {}
    for where in ("centroids", "centroids_elsewhere"):  # what Hopper takes, too
        forms.FORMS = forms.Forms(centroids_elsewhere=getattr(forms.Forms(), where))
        result["skipped"] |= {f"{name}, {where}": found for name, found in skipped_blocks_found().items()}
    forms.FORMS = forms.Forms()
    result["calibration"] = max(calibration_difference(CASES[1], None), calibration_difference(CASES[0], (3, 4)))
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
