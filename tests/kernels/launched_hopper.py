"""Not a test file: run by test_block_sparse_hopper.py in a process of its own, where it replaces Triton's driver.

Goes the whole way of a launch but the last step: arguments are bound and specialised by Triton, and the kernel is
compiled, for three lengths. Writes one JSON object to stdout.
"""

import json
import sys
from dataclasses import replace
from unittest import mock

import torch

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import hopper_backend
from tests.kernels.driver_stand_in import replace_driver
from tests.kernels.hopper_cases import BASE


def main() -> None:
    replace_driver()
    kernel, compiled = hopper_backend.block_sparse_fwd_hopper_kernel, []
    unlaunched = mock.MagicMock()
    unlaunched.__getitem__ = lambda _, grid: lambda *a, **k: compiled.append(kernel.warmup(*a, grid=grid, **k))
    with mock.patch.object(hopper_backend, "block_sparse_fwd_hopper_kernel", unlaunched):
        for length in (128, 300, 1024):
            case = replace(BASE, dim=128, len_q=length, len_k=length, density=1.0)
            inputs = testing.make_inputs(case, dtype=torch.bfloat16)
            hopper_backend.block_sparse_attention_hopper(*inputs.tensors(), block_size=128, scale=0.1, return_lse=False)
    report = {
        "boxes": [descriptor["block_size"] for descriptor in compiled[0].metadata.tensordesc_meta],
        "launches": len(compiled),
        "kernels": sum(len(cache[0]) for cache in kernel.device_caches.values()),
        "warps": compiled[0].metadata.num_warps,
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
