"""Not a test file: run by test_ba_att_fused_selection.py in a process of its own, under the Triton interpreter.

Writes one JSON object to stdout: name of the check -> largest difference, or whether what was found is equal.
"""

import json
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch

from diffsieve.kernels.ba_att.fused_selection import _list_blocks_by_head_op, _list_blocks_op, _score_blocks_op
from tests.kernels.ba_att_selection_cases import checks

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    moments, size, centre = torch.randn(2, 2, 5, 8).abs(), torch.full((5,), 16.0), torch.zeros(2, 2, 1, 8)
    for check in ("test_schema", "test_faketensor"):
        options = (0.5, True, True, False, 0.3)
        torch.library.opcheck(_score_blocks_op, (*[moments] * 4, size, centre, *options), test_utils=check)
        for return_skipped in (True, False):
            torch.library.opcheck(_list_blocks_op, (torch.randn(2, 3, 7), 4, return_skipped), test_utils=check)
            lists = torch.randn(2, 3, 5, 7), torch.tensor([1, 7, 4]), return_skipped, True
            torch.library.opcheck(_list_blocks_by_head_op, lists, test_utils=check)
    json.dump({name: check("cpu") for name, check in checks().items()}, sys.stdout)
