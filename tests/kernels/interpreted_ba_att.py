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
from diffsieve.kernels.ba_att import ba_attention
from diffsieve.kernels.ba_att.fused import gather_with_means, gather_with_statistics, scatter_tokens
from diffsieve.kernels.ba_att.reference import ba_attention_reference
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


def main() -> None:
    warnings.simplefilter("ignore")
    result = {"whole": {str(case): whole_call(case) for case in CASES}, "steps": {str(c): steps(c) for c in CASES[:3]}}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
