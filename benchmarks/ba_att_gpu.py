"""Whole BA-Att call against dense attention on a CUDA GPU: crossover, stages, cost of calibration.

    python benchmarks/ba_att_gpu.py --out benchmarks/results/h200/ba_att.json

Heads of 128 channels in bf16, laid out (B, L, H, D) as a diffusers processor hands them over. Correctness first: all
blocks kept is dense attention, and half of them agrees with the torch backend. Times are medians of
`triton.testing.do_bench` in ms; "graph" is the same call replayed as a CUDA graph, without the host's time.
"""

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import ba_att
from diffsieve.kernels.ba_att.centroids import add_centroids
from diffsieve.kernels.ba_att.fused import gather_with_means, gather_with_statistics, scatter_tokens
from diffsieve.kernels.block_sparse import block_sparse_attention

# Token grids (frames, height, width): small clips, 480p and 720p of Wan at 81 frames.
GRIDS = [(7, 24, 24), (8, 32, 32), (16, 32, 32), (11, 40, 40), (21, 30, 52), (21, 45, 80)]
SPARSITIES = (0.5, 0.75, 0.9)
BLOCK = 128


def milliseconds(call: Callable[[], object]) -> float:
    return triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")


def graph_milliseconds(call: Callable[[], object]) -> float | None:
    """Time of the call as a CUDA graph, or `None` where it cannot be captured."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return triton.testing.do_bench_cudagraph(call, rep=40, return_mode="median")


def inputs(grid: tuple[int, int, int], heads: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, math.prod(grid), heads, 128)
    return tuple(torch.randn(shape, generator=generator, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def gate(heads: int) -> dict[str, float]:
    """Relative errors of the whole call, with the bounds they must keep."""
    q, k, v = inputs((7, 24, 24), heads)
    orders = torch.arange(heads, device="cuda") % len(ba_att.CANDIDATE_ORDERS)
    exact = scaled_dot_product_attention(q.float(), k.float(), v.float())
    plain = error(scaled_dot_product_attention(q, k, v), exact)
    common = {"grid_thw": (7, 24, 24), "orders": orders, "block_size": BLOCK, "compensate": "centroid"}
    full = error(ba_att.ba_attention(q, k, v, density=1.0, **common), exact)
    half, info = ba_att.ba_attention(q, k, v, density=0.5, return_info=True, **common)
    if info.backend != "triton":
        raise SystemExit(f"the triton backend must run here, got {info.backend}")
    trusted = ba_att.ba_attention(q, k, v, density=0.5, backend="torch", **common)
    found = {"dense": plain, "all blocks": full, "half, against torch": error(half, trusted)}
    if not (full <= 2 * plain and found["half, against torch"] <= 3 * plain):
        raise SystemExit(f"the call is wrong: {found}")
    return found


def stages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, orders: object, density: float, grid: tuple) -> dict:
    """Time of each stage on its own, in the order of `ba_attention`."""
    times = {}

    def lap(name: str, call: Callable[[], object]) -> object:
        times[name] = round(milliseconds(call), 4)
        return call()

    order = lap("order", lambda: ba_att.token_orders(q, k, grid_thw=grid, orders=orders, block_size=BLOCK))
    pairs = ((q, order.query), (k, order.key))
    (q, q_stats), (k, k_stats) = lap(
        "gather and moments of q, k", lambda: [gather_with_statistics(x, p, BLOCK, fused=True) for x, p in pairs]
    )
    v, v_mean = lap("gather and means of v", lambda: gather_with_means(v, order.key, BLOCK, fused=True))
    scores = lap("scores", lambda: ba_att.block_scores(q_stats, k_stats))
    kept = ba_att.kept_blocks(scores.shape[-1], density)
    index = lap("selection", lambda: ba_att.select_blocks(scores, kept))
    out, lse = lap("attention", lambda: block_sparse_attention(q, k, v, index, block_size=BLOCK, return_lse=True))
    mask = lap("mask", lambda: ba_att.block_mask(index, None, scores.shape[-1]))
    means = (k_stats.mean, v_mean, k_stats.size)
    out, _ = lap(
        "centroids", lambda: add_centroids(out, lse, q, *means, mask, block_size=BLOCK, scale=128**-0.5, fused=True)
    )
    lap("undo", lambda: scatter_tokens(out, order.query, fused=True))
    return times


def measure(grid: tuple[int, int, int], heads: int) -> dict:
    q, k, v = inputs(grid, heads)
    row: dict = {"grid_thw": grid, "tokens": math.prod(grid), "dense_ms": {}, "calls": {}}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            row["dense_ms"][backend.name] = milliseconds(lambda: scaled_dot_product_attention(q, k, v))
    per_head = torch.arange(heads, device="cuda") % len(ba_att.CANDIDATE_ORDERS)
    cases = (("raster, no centroids", "raster", "none"), ("raster", "raster", "centroid"),
             ("hilbert", "hilbert", "centroid"), ("an order per head", per_head, "centroid"))  # fmt: skip
    for name, orders, compensate in cases:
        for sparsity in SPARSITIES:
            options = {"grid_thw": grid, "orders": orders, "density": 1 - sparsity, "block_size": BLOCK}
            options["compensate"] = compensate

            def call(options: dict = options) -> object:
                return ba_att.ba_attention(q, k, v, **options)

            entry = {"ms": milliseconds(call)}
            try:
                entry["graph_ms"] = graph_milliseconds(call)
            except RuntimeError as problem:
                entry["graph_ms"], entry["no_graph"] = None, str(problem).splitlines()[0]
            entry["speedup"] = {dense: ms / entry["ms"] for dense, ms in row["dense_ms"].items()}
            if sparsity == 0.5 and compensate != "none":
                entry["stages_ms"] = stages(q, k, v, orders, 0.5, grid)
            row["calls"][f"{name}, {sparsity:.0%} skipped"] = entry
    row["calibration_ms"] = milliseconds(
        lambda: ba_att.calibrate_orders(q, k, grid_thw=grid, density=0.5, block_size=BLOCK)
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    report = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "heads": arguments.heads,
        "errors": gate(arguments.heads),
        "rows": [],
    }
    for grid in GRIDS:
        row = measure(grid, arguments.heads)
        report["rows"].append(row)
        calls = "  ".join(f"{name} {entry['ms']:.3f}" for name, entry in row["calls"].items())
        print(row["tokens"], row["dense_ms"], calls, f"calibration {row['calibration_ms']:.3f}", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
