"""Not a test file: run by test_block_sparse_triton_backward.py in a process of its own, under the Triton interpreter.

Writes one JSON object to stdout: case name -> errors of the gradients and the bound of each.
"""

import json
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.kernels.backward_cases import BACKWARD_CASES, gradient_errors

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    report = {
        f"{case}-{name}": gradient_errors(case, dtype) for case in BACKWARD_CASES for name, dtype in dtypes.items()
    }
    json.dump(report, sys.stdout)
