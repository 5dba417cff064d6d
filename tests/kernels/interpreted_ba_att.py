"""Not a test file: run by test_ba_att_triton.py in a process of its own, under the Triton interpreter.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before anything imports Triton, and must not leak
into other tests. Writes one JSON object to stdout: case name -> what the test asserts on.
"""

import json
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.ba_att import ba_attention, calibrate_orders, calibration, fused_selection
from diffsieve.kernels.ba_att.centroids import add_centroids
from diffsieve.kernels.ba_att.fused import gather_with_means, gather_with_statistics, scatter_tokens
from diffsieve.kernels.ba_att.reference import ba_attention_reference
from diffsieve.kernels.block_sparse import BackendChoice
from tests.kernels.ba_att_cases import CASES, BAAttCase, make_inputs, relative_error


def whole_call(case: BAAttCase) -> dict[str, object]:
    """The call with every Triton kernel in fp16 against the same call in PyTorch, and both against fp64."""
    inputs = make_inputs(case, torch.float16)
    options = case.options()
    with testing.poisoned_memory():
        out, info = ba_attention(*inputs, backend="triton", return_info=True, **options)
    plain, plain_info = ba_attention(*inputs, backend="torch", return_info=True, **options)
    exact, _ = ba_attention_reference(*(x.double() for x in inputs), **options)
    return {
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


def compensated_in_place(case: BAAttCase) -> float:
    """The centroid term with the order undone against doing both one after the other."""
    query, key, value = make_inputs(case, torch.float16)
    length, generator = query.shape[2], torch.Generator().manual_seed(1)
    perm = torch.randperm(length, generator=generator)
    per_head = torch.stack([torch.randperm(length, generator=generator) for _ in range(2 * case.heads)])
    (_, keys), (_, values) = (gather_with_statistics(x, None, case.block_size, fused=False) for x in (key, value))
    blocks = keys.size.shape[0]
    kept = torch.rand(2, case.heads, blocks, blocks, generator=generator) < 0.5
    lse = torch.randn(query.shape[:3], generator=generator)
    inputs = query, lse, query, keys.mean, values.mean, keys.size, kept
    options = {"block_size": case.block_size, "scale": 0.2}
    difference = 0.0
    for order in (None, perm, per_head.unflatten(0, (2, case.heads))):
        expected, expected_lse = add_centroids(*inputs, **options, perm=order)
        with testing.poisoned_memory():
            out, new_lse = add_centroids(*inputs, **options, fused=True, perm=order)
            plain, _ = add_centroids(*inputs, **options, fused=True)
        assert torch.equal(out, scatter_tokens(plain, order, fused=False))
        difference = max(difference, float((out - expected).abs().max()), float((new_lse - expected_lse).abs().max()))
    return difference


def calibration_difference(case: BAAttCase) -> float:
    """Recalls from the fused gather, which a GPU takes, against those from PyTorch's."""
    query, key, _ = make_inputs(case, torch.float16)
    options = {"grid_thw": case.grid, "density": case.density, "block_size": case.block_size}
    plain = calibrate_orders(query, key, **options)
    calibration.choose_backend = lambda *_, **__: BackendChoice("triton", "under test")
    return float((calibrate_orders(query, key, **options) - plain).abs().max())


def main() -> None:
    warnings.simplefilter("ignore")
    result = {"whole": {str(case): whole_call(case) for case in CASES}, "steps": {str(c): steps(c) for c in CASES[:3]}}
    result["compensated in place"] = {str(c): compensated_in_place(c) for c in CASES[:2]}
    fused_selection.LEAN = True
    # Windows are sorted by the kernel where the backend of a GPU runs.
    fused_selection.choose_backend = lambda *_, **__: BackendChoice("triton", "under test")
    result["lean"] = {str(case): whole_call(case) for case in CASES}
    result["lean steps"] = {str(c): steps(c) for c in CASES[:1]}
    result["calibration"] = calibration_difference(CASES[1])
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
