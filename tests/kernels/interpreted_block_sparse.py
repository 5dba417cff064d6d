"""Not a test file: run by test_block_sparse_triton.py in a process of its own, under the Triton interpreter.

TRITON_INTERPRET is read when a kernel is defined, so it must be set before anything imports Triton, and must not leak
into other tests. Writes one JSON object to stdout: case name -> what the test asserts on.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention, choose_backend, triton_backend
from diffsieve.kernels.block_sparse.triton_backend import block_sparse_attention_triton
from tests.kernels.cases import ONE_KEY_CASES, TRITON_CASES
from tests.kernels.interpreted_contraction import contract_products

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def measure(case: testing.AttentionCase, dtype: torch.dtype) -> dict[str, object]:
    inputs = testing.make_inputs(case, dtype=dtype)
    options = {"block_size": case.block_size, "return_lse": True}
    exact, exact_lse = testing.exact_attention(inputs, block_size=case.block_size)
    _, single_lse = block_sparse_attention(*inputs.floats_to(torch.float32).tensors(), backend="reference", **options)
    result: dict[str, object] = {
        "bound": testing.error_bound(testing.masked_sdpa(inputs, block_size=case.block_size), exact),
        "lse_bound": testing.lse_bound(single_lse, exact_lse),
    }
    for name, choice in (("op", None), ("pointers", False)):
        with testing.poisoned_memory():
            if choice is None:
                out, lse = block_sparse_attention(*inputs.tensors(), backend="triton", **options)
            else:
                out, lse = block_sparse_attention_triton(
                    *inputs.tensors(), scale=case.dim**-0.5, use_descriptors=choice, **options
                )
        result[name] = {
            "error": testing.error_ratio(out, exact),
            "lse_error": testing.lse_error(lse, exact_lse),
            "layout": out.stride() == torch.empty_like(inputs.query).stride(),
        }
    return result


def measure_one_key(case: testing.AttentionCase, dtype: torch.dtype) -> dict[str, float]:
    """`same` is the share of numbers that equal the exact ones, rounded; the error of the log-sum-exp is relative."""
    inputs = testing.make_inputs(case, dtype=dtype)
    exact, exact_lse = testing.exact_attention(inputs, block_size=case.block_size)
    with testing.poisoned_memory():
        out, lse = block_sparse_attention(
            *inputs.tensors(), block_size=case.block_size, backend="triton", return_lse=True
        )
    if not torch.equal(lse.isfinite(), exact_lse.isfinite()):
        return {"error": float("inf")}
    return {
        "error": testing.error_ratio(out, exact),
        "bound": testing.one_key_bound(dtype),
        "same": (out == exact.to(dtype)).double().mean().item(),
        "lse_error": (lse / exact_lse - 1)[lse.isfinite()].abs().max().item(),
    }


def flags() -> dict[str, list[int]]:
    """Flags of three programs of 16 rows and one key block each, of which the second meets so large a logit."""
    query = torch.zeros(1, 1, 48, 16, dtype=torch.float16)
    query[:, :, 16:32, 0] = 64.0
    index = torch.arange(3, dtype=torch.int32).view(1, 1, 3, 1)
    kernel, seen = triton_backend.block_sparse_fwd_kernel, []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                kernel[grid](*args, **options)
                seen.append(args[kernel.arg_names.index("flags")].flatten().tolist())

            return launch

    for largest in (8188, 8300, -8188, -8300):
        key = torch.zeros_like(query)
        key[:, :, 16:32, 0] = largest / 64
        with mock.patch.object(triton_backend, "block_sparse_fwd_kernel", Recorder()):
            block_sparse_attention_triton(
                query, key, key, index, None, block_size=16, scale=math.log(2), return_lse=False, use_descriptors=False
            )
    return dict(zip(("8188", "8300", "-8188", "-8300"), seen[1::2], strict=True))


def out_of_range() -> dict[str, bool]:
    """Lists that only a GPU would let through: nothing outside the tensors may be read, so nothing may be NaN."""
    case = testing.AttentionCase(heads=1, kv_heads=1, len_q=40, len_k=40, dim=16, block_size=16, layout="padded")
    inputs = testing.make_inputs(case, dtype=torch.float32)
    lists = {"negative": [-5, -1, 0], "beyond": [0, 1, 900], "far": [700, 800, 900], "tail twice": [1, 2, 2]}
    finite = {}
    for name, entries in lists.items():
        index = torch.tensor(entries, dtype=torch.int32).expand(1, 1, 3, 3)
        for use_descriptors in (True, False):
            out, _ = block_sparse_attention_triton(
                inputs.query, inputs.key, inputs.value, index, None,
                block_size=16, scale=0.25, return_lse=False, use_descriptors=use_descriptors,
            )  # fmt: skip
            finite[f"{name} {use_descriptors}"] = bool(out.isfinite().all())
    return finite


def choices() -> dict[str, str]:
    query = torch.zeros(1, 1, 32, 32)
    return {
        "auto": choose_backend(query, query, block_size=16).name,
        "triton": choose_backend(query, query, block_size=16, backend="triton").name,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report = {f"{case}-{name}": measure(case, dtype) for case in TRITON_CASES for name, dtype in DTYPES.items()}
    report = {"cases": report, "out_of_range": out_of_range(), "choices": choices(), "flags": flags()}
    contract_products()
    report["one_key"] = {
        f"{case}-{name}": measure_one_key(case, dtype) for case in ONE_KEY_CASES for name, dtype in DTYPES.items()
    }
    json.dump(report, sys.stdout)
