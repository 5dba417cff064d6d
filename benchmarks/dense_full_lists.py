"""Dense attention by the `hopper` backend with all blocks listed, beside PyTorch's own: from which length on it wins.

    PYTHONPATH=. python benchmarks/dense_full_lists.py --out FOLDER

12 heads of 128 and of 64, bf16, 4K to 128K tokens, and rows of text (512 queries over a clip's keys). Every result is
compared with fp64 on sampled rows before it is timed, and a second run with the first, bit for bit; activations times
200 come first. Times are medians in ms with the L2 cache flushed, of CUDA graphs and (up to 32K tokens) of eager calls.
Writes `dense_full_lists.json` after every row, from which `_FEWEST_BLOCKS` of `kernels/block_sparse/dense.py` follows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse.dense import dense_attention
from diffsieve.kernels.testing import AttentionInputs

LENGTHS = (4_096, 8_192, 16_384, 32_768, 75_648, 131_072)
OURS = ("hopper", "hopper-exact")
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
BUDGET_MS = 60.0


def problem(dim: int, len_q: int, len_k: int, gain: float = 1.0) -> AttentionInputs:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, 12, length, dim, generator=generator, device="cuda").mul_(gain).bfloat16()
        for length in (len_q, len_k, len_k)
    )
    every = torch.arange(-(-len_k // 128), dtype=torch.int32, device="cuda").expand(1, 12, -(-len_q // 128), -1)
    return AttentionInputs(query, key, value, every, None)


def warm_up(dim: int, name: str) -> None:
    """Compile into Triton's cache on disk, in a process of its own."""
    inputs = problem(dim, 256, 256)
    ours(inputs, name)
    torch.cuda.synchronize()


def ours(inputs: AttentionInputs, name: str) -> Tensor:
    return dense_attention(inputs.query, inputs.key, inputs.value, backend=name)[0]


def theirs(inputs: AttentionInputs, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(inputs.query, inputs.key, inputs.value)


def timed(function: Any) -> float:
    """Median ms; few repeats of what is slow."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    times: list[float] = []
    while len(times) < 3 or (sum(times) < BUDGET_MS and len(times) < 100):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_of(function: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def checked(inputs: AttentionInputs, name: str) -> dict[str, Any]:
    run = partial(ours, inputs, name)
    with testing.poisoned_memory():
        out, again = run(), run()
    row: dict[str, Any] = testing.sampled_errors(inputs, out, 128, samples=12)
    row["ok"] = row["error"] <= row["bound"] and torch.equal(out, again)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    path = parser.parse_args().out / "dense_full_lists.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "triton": triton.__version__,
        "command": "python benchmarks/dense_full_lists.py", "rows": [],
    }  # fmt: skip

    def save() -> None:
        partial_path = path.with_suffix(".partial")
        partial_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        partial_path.replace(path)

    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(warm_up, [(dim, name) for dim in (128, 64) for name in OURS], chunksize=1)
    failed = 0
    large = [(dim, 4_096, 4_000, 200.0) for dim in (128, 64)]
    texts = [(128, 512, 32_768, 1.0), (128, 512, 75_648, 1.0)]
    usual = [(dim, length, length, 1.0) for length in LENGTHS for dim in (128, 64)]
    for dim, len_q, len_k, gain in [*large, *usual, *texts]:
        inputs = problem(dim, len_q, len_k, gain)
        row: dict[str, Any] = {"dim": dim, "len_q": len_q, "len_k": len_k, "gain": gain, "graph_ms": {}, "eager_ms": {}}
        row["checks"] = {name: checked(inputs, name) for name in OURS}
        report["rows"].append(row)
        runs: dict[str, Any] = {
            name: partial(ours, inputs, name)
            for name in OURS if row["checks"][name]["ok"]
        }  # fmt: skip
        failed += len(OURS) - len(runs)
        if gain == 1.0:
            runs |= {name: partial(theirs, inputs, backend) for name, backend in PEERS.items()}
            for name, run in runs.items():
                run()  # not under the capture: what is made at the first call
                torch.cuda.synchronize()
                row["graph_ms"][name] = timed(graph_of(run))
                if len_k <= 32_768:
                    row["eager_ms"][name] = timed(run)
        save()
        shown = " ".join(f"{name} {ms:.3f}" for name, ms in row["graph_ms"].items())
        eager = " ".join(f"{name} {ms:.3f}" for name, ms in row["eager_ms"].items())
        states = " ".join(f"{name} {check['ok']}" for name, check in row["checks"].items())
        print(f"D{dim} {len_q:,} x {len_k:,} gain {gain:g}: {states}; {shown}; eager {eager}", flush=True)
    print(f"{failed} checks failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
