"""Block-sparse attention of the torch backend against dense SDPA on a CPU, fp32, block 128.

    PYTHONPATH=. python benchmarks/block_sparse_cpu.py [--out FOLDER] [--repeats 15] [--threads N]

Every variant is first compared with the fp64 reference. Then dense and sparse calls take turns, so that a disturbance
hits all of them; the table shows medians and minima in ms, and the speed-up as the ratio of medians of one run.
Writes `block_sparse.json` (default folder `benchmarks/results/cpu`).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention
from diffsieve.kernels.testing import AttentionCase, AttentionInputs

DENSITIES = (1.0, 0.5, 0.25, 0.1)


def cases() -> list[AttentionCase]:
    base = AttentionCase(heads=4, kv_heads=4, dim=64, block_size=128)
    return [
        replace(base, len_q=2048, len_k=2048),
        replace(base, len_q=4096, len_k=4096),
        replace(base, len_q=4032, len_k=4032, heads=6, kv_heads=6),
        replace(base, len_q=4032, len_k=4032, heads=6, kv_heads=6, layout="blhd"),
        replace(base, len_q=9216, len_k=9216, heads=6, kv_heads=6),
    ]


def check(inputs: AttentionInputs, block_size: int) -> dict[str, Any]:
    """Error of the torch backend against fp64, and its bound, on sampled query blocks."""
    with testing.poisoned_memory():
        out = block_sparse_attention(*inputs.tensors(), block_size=block_size, backend="torch")
    row: dict[str, Any] = testing.sampled_errors(inputs, out, block_size, samples=12)
    return row | {"ok": row["error"] <= row["bound"]}


def interleave(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times in turns after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(case: AttentionCase, repeats: int) -> dict[str, Any]:
    inputs = testing.make_inputs(replace(case, density=1.0), dtype=torch.float32)
    tensors = inputs.query, inputs.key, inputs.value
    calls: dict[str, Callable[[], object]] = {"dense": partial(scaled_dot_product_attention, *tensors)}
    rows: dict[str, Any] = {"dense": {"ok": True}}
    for density in DENSITIES:
        blocks = testing.make_inputs(replace(case, density=density, dim=1), dtype=torch.float32).block_index
        part = replace(inputs, block_index=blocks)
        name = f"{density:.0%} kept"
        rows[name] = check(part, case.block_size)
        if rows[name]["ok"]:
            calls[name] = partial(block_sparse_attention, *part.tensors(), block_size=case.block_size, backend="torch")
    for name, seconds in interleave(calls, repeats).items():
        rows[name] |= {"ms_median": statistics.median(seconds) * 1e3, "ms_min": min(seconds) * 1e3}
    for name in calls:
        rows[name]["speedup"] = rows["dense"]["ms_median"] / rows[name]["ms_median"]
        rows[name]["speedup_of_minima"] = rows["dense"]["ms_min"] / rows[name]["ms_min"]
    return rows


def cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {
        "cpu": cpu_model(), "capability": torch.backends.cpu.get_cpu_capability(), "threads": arguments.threads,
        "torch": torch.__version__, "python": platform.python_version(), "system": platform.system(),
        "command": " ".join(["python", *sys.argv]), "dtype": "float32", "repeats": arguments.repeats, "cases": {},
    }  # fmt: skip
    ok = True
    with torch.inference_mode():
        for case in cases():
            name = str(replace(case, density=1.0)).replace("-d1", "")
            rows = report["cases"][name] = measure(case, arguments.repeats)
            for variant, row in rows.items():
                ok &= row["ok"]
                figures = (
                    f"median {row['ms_median']:7.1f} ms  min {row['ms_min']:7.1f} ms  speed-up {row['speedup']:5.2f}"
                    if row["ok"]
                    else f"FAILED: error {row['error']:.1e}, bound {row['bound']:.1e}"
                )
                print(f"{name:32s} {variant:10s} {figures}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "block_sparse.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
