"""Stages of BA-Att around the attention kernel on a CUDA GPU, with and without `fused_selection.LEAN`.

    python benchmarks/ba_att_lean.py --out outputs/ba_att_lean

Writes `ba_att_lean.json`. Correctness first: kernels against PyTorch, both forms of the whole call against each other.
Times are medians of CUDA graphs in ms, without the host's time; "floor" is the time that the bytes of a stage (its
arithmetic, for the centroids) take at best on an H200: 4.2 TB/s, 600 TFLOP/s.
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

from diffsieve.kernels import ba_att
from diffsieve.kernels.ba_att import fused_selection
from diffsieve.kernels.ba_att.centroids import add_centroids
from diffsieve.kernels.ba_att.fused import gather_with_means, gather_with_statistics, scatter_tokens
from diffsieve.kernels.ba_att.fused_selection import score_blocks_fused, select_blocks_fused
from diffsieve.kernels.block_sparse import block_sparse_attention

GRIDS = [(21, 30, 52), (21, 45, 80)]
HEADS, DIM, BLOCK = 12, 128, 128
BANDWIDTH, RATE = 4.2e12, 600e12
# Ids on the CPU, as the processors keep them.
TABLES = {
    "static": torch.arange(HEADS) % 3,
    "two windows": torch.tensor([3, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]),
    "all candidates": torch.arange(HEADS) % 5,
}
HOW = {"beta": 0.5, "center_keys": True, "log_count": True, "second_order": True, "scale": DIM**-0.5}


def milliseconds(call: Callable[[], object]) -> float:
    with torch.cuda.stream(torch.cuda.Stream()):
        return triton.testing.do_bench_cudagraph(call, rep=40, return_mode="median")


def inputs(grid: tuple[int, int, int]) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, math.prod(grid), HEADS, DIM)
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)]


def whole(grid: tuple[int, int, int], tensors: list[torch.Tensor], table: str, density: float) -> Callable:
    return lambda **extra: ba_att.ba_attention(
        *tensors, grid_thw=grid, orders=TABLES[table], density=density, block_size=BLOCK, compensate="centroid",
        score="residual", **extra,
    )  # fmt: skip


def gate(grid: tuple[int, int, int]) -> dict[str, float]:
    tensors = inputs(grid)
    call, found = whole(grid, tensors, "all candidates", 0.5), {}
    fused_selection.LEAN = False
    plain, plain_info = call(return_info=True)
    fused_selection.LEAN = True
    lean, lean_info = call(return_info=True)
    again = call()
    if plain_info.backend in ("torch", "reference"):
        raise SystemExit(f"a Triton backend must run here, got {plain_info.backend}")
    found["error"] = ((lean - plain).float().norm() / plain.float().norm()).item()
    found["rows with other blocks"] = (lean_info.block_index != plain_info.block_index).any(-1).float().mean().item()
    scores = torch.randn(HEADS, 591, 591, device="cuda").mul_(4).round_()  # ties
    index, mask = select_blocks_fused(scores, 296, return_mask=True)
    same = torch.equal(index, ba_att.select_blocks(scores, 296)) and torch.equal(
        mask, ba_att.block_mask(index, None, 591)
    )
    if not (torch.equal(lean, again) and same and found["error"] < 5e-3 and found["rows with other blocks"] < 0.05):
        raise SystemExit(f"the lean kernels are wrong: {found}, lists equal {same}")
    return found


def floors(grid: tuple[int, int, int]) -> dict[str, float]:
    """Least ms of each stage: every tensor of tokens read once and written once."""
    length, blocks = math.prod(grid), -(-math.prod(grid) // BLOCK)
    tensor, pairs = 2 * HEADS * length * DIM, HEADS * blocks * blocks
    moved = {
        "order": 2 * 8 * HEADS * length,
        "gather of q": 2 * tensor,
        "gather of k": 2 * tensor,
        "gather of v": 2 * tensor,
        "scores": 4 * pairs,
        "selection and mask": (4 + 2 + 1) * pairs,
        "centroids and undo": 3 * tensor,
    }
    found = {name: 1e3 * size / BANDWIDTH for name, size in moved.items()}
    found["centroids and undo"] = max(found["centroids and undo"], 1e3 * 4 * HEADS * length * blocks * DIM / RATE)
    return found


def stages(grid: tuple[int, int, int], table: str, lean: bool) -> dict[str, float]:
    query, key, value = inputs(grid)
    blocks = -(-math.prod(grid) // BLOCK)
    kept, found = ba_att.kept_blocks(blocks, 0.5), {}
    fused_selection.LEAN = lean

    def lap(name: str, call: Callable) -> object:
        found[name] = milliseconds(call)
        return call()

    def choose() -> tuple[torch.Tensor, torch.Tensor]:
        if lean:
            return select_blocks_fused(scores, kept, return_mask=True)
        index = ba_att.select_blocks(scores, kept)
        return index, ba_att.block_mask(index, None, blocks)

    def compensate() -> torch.Tensor:
        means, options = (k_stats.mean, v_mean, k_stats.size), {"block_size": BLOCK, "scale": DIM**-0.5, "fused": True}
        if lean:
            return add_centroids(out, lse, q, *means, mask, perm=order.query, **options)[0]
        return scatter_tokens(add_centroids(out, lse, q, *means, mask, **options)[0], order.query, fused=True)

    order = lap("order", lambda: ba_att.token_orders(query, key, grid_thw=grid, orders=TABLES[table], block_size=BLOCK))
    q, q_stats = lap("gather of q", lambda: gather_with_statistics(query, order.query, BLOCK, fused=True))
    k, k_stats = lap("gather of k", lambda: gather_with_statistics(key, order.key, BLOCK, fused=True))
    v, v_mean = lap("gather of v", lambda: gather_with_means(value, order.key, BLOCK, fused=True))
    if lean:
        scores = lap("scores", lambda: score_blocks_fused("residual", q_stats, k_stats, **HOW))
    else:
        scores = lap("scores", lambda: ba_att.residual_scores(q_stats, k_stats, **HOW))
    index, mask = lap("selection and mask", choose)
    out, lse = block_sparse_attention(q, k, v, index, block_size=BLOCK, return_lse=True)
    lap("centroids and undo", compensate)
    return found


def table_of_stages(grid: tuple[int, int, int], table: str) -> dict[str, dict[str, float]]:
    forms = {"floor": floors(grid), "default": stages(grid, table, False), "lean": stages(grid, table, True)}
    for times in forms.values():
        times["all"] = sum(times.values())
    return {name: {form: round(times[name], 4) for form, times in forms.items()} for name in forms["floor"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for ba_att_lean.json")
    folder = parser.parse_args().out
    report: dict = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "gate": gate((7, 24, 24)),
        "rows": [],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for grid in GRIDS:
        row: dict = {"grid_thw": grid, "tokens": math.prod(grid), "stages_ms": {}, "call_ms": {}}
        for table in TABLES:
            row["stages_ms"][table] = table_of_stages(grid, table)
        tensors = inputs(grid)
        for density in (0.5, 0.25, 0.1):
            for lean in (False, True):
                fused_selection.LEAN = lean
                form = f"{1 - density:.0%} skipped, {'lean' if lean else 'default'}"
                row["call_ms"][form] = round(milliseconds(whole(grid, tensors, "two windows", density)), 4)
        fused_selection.LEAN = False
        row["calibration_ms"] = triton.testing.do_bench(
            lambda tensors=tensors, grid=grid: ba_att.calibrate_orders(
                *tensors[:2], grid_thw=grid, density=0.5, block_size=BLOCK, score="residual"
            ),
            return_mode="median",
        )
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        partial = folder / ".ba_att_lean.json.part"
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.replace(folder / "ba_att_lean.json")


if __name__ == "__main__":
    main()
