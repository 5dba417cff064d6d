"""Not a test file: run by test_block_mass.py in a process of its own, under the Triton interpreter.

Writes one JSON object to stdout: name of the check -> largest error.
"""

import json
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels.block_mass_cases import checks

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump({name: check("cpu") for name, check in checks().items()}, sys.stdout)
