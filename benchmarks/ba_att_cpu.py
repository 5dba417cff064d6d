"""Whole BA-Att call against dense attention on a CPU, with the time of every stage.

    python benchmarks/ba_att_cpu.py --out benchmarks/results/cpu/ba_att.json

Inputs come as a diffusers processor hands them over: (B, L, H, D) memory seen as (B, H, L, D). All cases of one run
alternate with the dense call, so that a machine under load slows both.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from diffsieve.kernels import ba_att
from diffsieve.kernels.block_sparse import block_sparse_attention


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def summary(times: list[float]) -> dict[str, float]:
    best, p10, median, p90 = torch.tensor(times).quantile(torch.tensor([0.0, 0.1, 0.5, 0.9])).tolist()
    return {"min": round(best, 3), "p10": round(p10, 3), "median": round(median, 3), "p90": round(p90, 3)}


def stages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: dict, block_size: int) -> dict[str, float]:
    """Time of each stage of one call, in the order of `ba_attention`."""
    times, last = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[name], last = 1e3 * (now - last), now

    order = ba_att.token_orders(q, k, grid_thw=case["grid_thw"], orders=case["orders"], block_size=block_size)
    lap("order")
    q, k, v = (ba_att.gather_tokens(x, p) for x, p in ((q, order.query), (k, order.key), (v, order.key)))
    lap("gather")
    statistics = [ba_att.block_statistics(x, block_size) for x in (q, k)]
    lap("statistics")
    scores = ba_att.block_scores(*statistics)
    lap("scores")
    index = ba_att.select_blocks(scores, ba_att.kept_blocks(scores.shape[-1], case["density"]))
    lap("selection")
    out = block_sparse_attention(q, k, v, index, block_size=block_size)
    lap("attention")
    ba_att.undo_order(out, order.query)
    lap("undo")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=int, nargs=3, default=(7, 24, 24), help="frames, height, width in tokens")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    grid = tuple(args.grid)
    length = grid[0] * grid[1] * grid[2]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, args.heads, args.dim, generator=generator).transpose(1, 2) for _ in range(3))
    per_head = torch.arange(args.heads) % len(ba_att.CANDIDATE_ORDERS)
    cases = {
        f"{name}-{density}": {"orders": orders, "density": density, "grid_thw": grid}
        for density in (0.5, 0.25)
        for name, orders in (("raster", "raster"), ("hilbert", "hilbert"), ("per_head", per_head))
    }

    # Correctness gate: all blocks kept is dense attention.
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    full = ba_att.ba_attention(q, k, v, grid_thw=grid, orders=per_head, density=1.0, block_size=args.block_size)
    error = ((full - dense).norm() / dense.norm()).item()
    if not error < 2e-6:
        raise SystemExit(f"density 1 differs from dense attention: relative error {error}")

    totals: dict[str, list[float]] = {name: [] for name in ("dense", *cases)}
    laps: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for repeat in range(args.repeats + 2):
        for name, case in cases.items():
            dense_time = milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
            whole = milliseconds(lambda c=case: ba_att.ba_attention(q, k, v, block_size=args.block_size, **c))
            lap = stages(q, k, v, case, args.block_size)
            if repeat >= 2:  # the first rounds warm up
                totals["dense"].append(dense_time)
                totals[name].append(whole)
                laps[name].append(lap)

    report = {
        "command": "python benchmarks/ba_att_cpu.py",
        "cpu": platform.processor() or platform.machine(),
        "threads": args.threads,
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "shape": {"batch": 1, "heads": args.heads, "tokens": length, "dim": args.dim, "grid_thw": grid},
        "dtype": "float32",
        "block_size": args.block_size,
        "repeats": args.repeats,
        "error_at_density_1": error,
        "dense_ms": summary(totals["dense"]),
        "cases": {},
    }
    for name in cases:
        stage_ms = {stage: summary([lap[stage] for lap in laps[name]]) for stage in laps[name][0]}
        overhead = [sum(lap.values()) - lap["attention"] for lap in laps[name]]
        report["cases"][name] = {
            "whole_ms": summary(totals[name]),
            "speedup_median": round(report["dense_ms"]["median"] / summary(totals[name])["median"], 3),
            "speedup_min": round(report["dense_ms"]["min"] / summary(totals[name])["min"], 3),
            "all_but_attention_ms": summary(overhead),
            "stages_ms": stage_ms,
        }
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
