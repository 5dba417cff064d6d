"""Not a test file: run by test_block_sparse_tiles.py in a process of its own, where it replaces Triton's driver.

Goes the whole way of a launch but the last step: arguments are bound and specialised by Triton, and the kernels are
compiled, for several lengths. Writes one JSON object to stdout: kernel and kind of launch -> launches, kernels built.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import triton_backend, triton_backward
from tests.kernels.driver_stand_in import replace_driver

LENGTHS = (1, 128, 129, 450, 1024, 2000)


def attend(length: int, layout: str, dim: int, use_descriptors: bool) -> None:
    case = testing.AttentionCase(
        heads=4, kv_heads=2, len_q=length, len_k=length, dim=dim, variable=True, layout=layout
    )  # fmt: skip
    inputs = testing.make_inputs(case, dtype=torch.bfloat16)
    options = {"block_size": case.block_size, "scale": 0.1}
    out, lse = triton_backend.block_sparse_attention_triton(
        *inputs.tensors(), **options, return_lse=True, use_descriptors=use_descriptors
    )
    if layout == "blhd":
        triton_backward.block_sparse_attention_triton_backward(
            out, lse, *inputs.tensors(), **options, out=out, lse=lse
        )  # fmt: skip


class Counted:
    """A kernel that is built for each launch but not launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0
        kernel.device_caches.clear()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            self.kernel.warmup(*args, grid=grid, **kwargs)

        return run

    def built(self) -> int:
        return sum(len(cache[0]) for cache in self.kernel.device_caches.values())


def main() -> None:
    replace_driver()
    names = [(m, name) for m in (triton_backend, triton_backward) for name in vars(m) if name.endswith("_kernel")]
    report = {}
    for layout, dim, use_descriptors in (("contiguous", 64, True), ("blhd", 64, False), ("contiguous", 40, False)):
        with ExitStack() as stack:
            counted = {name: Counted(getattr(module, name)) for module, name in names}
            for module, name in names:
                stack.enter_context(mock.patch.object(module, name, counted[name]))
            for length in LENGTHS:
                attend(length, layout, dim, use_descriptors)
        for name, kernel in counted.items():
            report[f"{name} {layout} D{dim}"] = [kernel.launches, kernel.built()]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
