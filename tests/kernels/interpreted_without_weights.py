"""Not a test file: run by test_without_weights.py in a process of its own, under the Triton interpreter.

The study of pixel DiT changes kernels for a whole process: the ablation without the weights of pooled tokens.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch

import llsa_without_weights as ablation

LENGTH = 150  # ten blocks, the last of 6 tokens: 8 are kept

if __name__ == "__main__":
    torch.set_num_threads(1)

    def errors(weighted: bool) -> dict[str, float]:
        return {
            f"{levels} levels": ablation.error_of_kernels(levels, weighted=weighted, device="cpu", length=LENGTH)
            for levels in (1, 2)
        }

    report = {"as they are": errors(weighted=True)}
    try:
        ablation.check_without_weights("cpu", LENGTH)
    except SystemExit as refusal:
        report["refusal"] = str(refusal)
    ablation.drop_weights()
    report["without"] = errors(weighted=False)
    report["check"] = ablation.check_without_weights("cpu", LENGTH)
    json.dump(report, sys.stdout)
