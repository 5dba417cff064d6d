"""Eager calls of LLSA and CUDA graphs of them, on a CUDA GPU: what a short call waits for its host.

    PYTHONPATH=. python benchmarks/llsa_eager.py [--out FOLDER] [--seconds 40]

Writes `llsa_eager.json` (default folder `benchmarks/results/<gpu>`). First every length is checked: output and
gradients against the torch backend in fp32 on the same lists, two runs bit for bit, and calls repeated by their
launches (`diffsieve/kernels/replay.py`) against whole ones, on other inputs, bit for bit. What
fails gets no figure. Times are medians in ms, bf16, B 2, H 4, D 64, block 16, topk 8, two levels. `host_ms` is what the
host needs for a call, from 200 calls that wait for nothing. `memory` is the peak of a repeated forward and backward, as
`diffsieve bench llsa` has it, to 1,048,576 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor

from diffsieve.bench.config import BenchConfig
from diffsieve.bench.operations import llsa as operation
from diffsieve.bench.timer import Timer
from diffsieve.kernels import replay
from diffsieve.kernels.llsa import llsa_attention
from llsa_tiles import Problem
from tests.kernels.llsa_triton_cases import repeated_equals_whole

LENGTHS = (16_384, 65_536)
MEMORY_LENGTHS = (16_384, 65_536, 262_144, 1_048_576)


def host_ms(call: Callable[[], object]) -> float:
    """Median time of a call until it returns, in bursts of 10 so that no queue fills."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            call()
        times.append((time.perf_counter() - start) * 100)
    return median(times)


def measure(length: int, timer: Timer) -> dict[str, Any]:
    problem = Problem(length, 2)
    row: dict[str, Any] = {"tokens": length, "levels": 2, "check": problem.check()}
    row["repeated"] = repeated_equals_whole("cuda", length, all_kinds=False)
    row["ok"] = row["check"]["ok"] and all(
        found == {"same bits": True, "repeated": 3} for found in row["repeated"].values()
    )
    if not row["ok"]:
        return row
    leaves = [x.detach() for x in problem.leaves()]

    def forward() -> Tensor | tuple[Tensor, Tensor]:
        return llsa_attention(*leaves, **problem.options, backend="triton")

    for name, call in (("forward", forward), ("forward_backward", problem.both)):
        row[name] = {**timer.eager(call)[0], **timer.graph(call), "host_ms": host_ms(call)}
    return row


def memory(config: BenchConfig) -> dict[str, Any]:
    """By tokens; levels are those of "auto"."""
    found = {}
    for problem in operation.problems(replace(config, tokens=MEMORY_LENGTHS)):
        inputs, levels = problem.build(), problem.details["levels"]
        operation.memory(inputs, levels)  # a first call is not repeated, and keeps all its memory
        found[problem.name] = operation.memory(inputs, levels)["memory"]
        del inputs
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0, help="no further length is begun after this time")
    options = parser.parse_args()
    started = time.perf_counter()
    gpu = torch.cuda.get_device_name()
    folder = options.out or Path("benchmarks/results") / gpu.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/llsa_eager.py", *sys.argv[1:]]),
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": [],
    }
    config = BenchConfig(folder, device="cuda", budget_ms=300.0)
    timer = Timer(config)
    report["memory"] = memory(config)
    print(json.dumps(report["memory"]), flush=True)
    for length in LENGTHS:
        if time.perf_counter() - started > options.seconds:
            break
        report["rows"].append(measure(length, timer))
        report["remembered_calls"] = len(replay._CALLS)
        report["seconds"] = round(time.perf_counter() - started, 1)
        part = folder / "llsa_eager.json.part"
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        part.replace(folder / "llsa_eager.json")
        print(json.dumps(report["rows"][-1]), flush=True)


if __name__ == "__main__":
    main()
