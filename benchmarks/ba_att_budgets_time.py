"""Time of a BA-Att call whose heads keep different numbers of blocks, on a CUDA GPU.

    python benchmarks/ba_att_budgets_time.py --out outputs/ba_att_budgets_time

First the call is checked against PyTorch, with the same budgets, at 9,000 tokens. Then 12 heads of 128 channels in
bf16, eager, medians in ms with the L2 cache flushed, at the same total:

- "equal": no budgets. "equal, with counts": the kernels that take a count by row, of equal numbers;
- "mixed": levels -3 to 3 in turns. "long last": heads that keep less first, those that keep more last;
- the calibrations of orders and of budgets, with the dense call of their step given.

Writes `ba_att_budgets_time.json`.
"""

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.compare.files import atomic_path
from diffsieve.kernels import ba_att
from diffsieve.kernels.ba_att import attention

GRIDS = [(11, 40, 40), (21, 30, 52), (21, 45, 80)]
SMALL_GRID = (15, 24, 25)
HEADS, DIM, BLOCK = 12, 128, 128
ORDERS = torch.arange(HEADS) % 3
LEVELS = {
    "mixed": [3, -3, 2, -2, 1, -1, 3, -3, 2, -2, 1, -1],
    "long last": [-3, -3, -2, -2, -1, -1, 1, 1, 2, 2, 3, 3],
}
# bf16 has eight bits; the error of the whole call on a GPU was 0.003 to 0.004.
ALLOWED = 0.01


def tensors_of(grid: tuple[int, int, int]) -> list[torch.Tensor]:
    """Queries, keys and values whose tokens resemble their neighbours."""
    generator = torch.Generator("cuda").manual_seed(0)
    length = math.prod(grid)
    base = torch.randn((1, -(-length // 60), HEADS, DIM), generator=generator, device="cuda")
    base = base.repeat_interleave(60, dim=1)[:, :length]
    noise = (torch.randn((1, length, HEADS, DIM), generator=generator, device="cuda") for _ in range(3))
    return [(0.5 * base + x).bfloat16().transpose(1, 2) for x in noise]


def budgets_of(levels: list[int], grid: tuple[int, int, int], density: float) -> torch.Tensor:
    blocks = -(-math.prod(grid) // BLOCK)
    return torch.tensor(ba_att.budgets_of_levels(levels, ba_att.kept_blocks(blocks, density), blocks))


def options_of(grid: tuple[int, int, int], density: float) -> dict[str, Any]:
    how = {"grid_thw": grid, "density": density, "block_size": BLOCK, "score": "residual", "compensate": "centroid"}
    return how | {"beta": 1.0}


def check() -> dict[str, float]:
    """Relative error against PyTorch's steps, where both choose the same blocks: in all rows but a few."""
    found = {}
    tensors = tensors_of(SMALL_GRID)
    for name, levels in LEVELS.items():
        for density in (0.5, 0.1):
            how = options_of(SMALL_GRID, density) | {"orders": ORDERS, "return_info": True}
            how |= {"budgets": budgets_of(levels, SMALL_GRID, density)}
            out, info = ba_att.ba_attention(*tensors, **how)
            again, _ = ba_att.ba_attention(*tensors, **how)
            plain, plain_info = ba_att.ba_attention(*tensors, backend="torch", **how)
            blocks = -(-math.prod(SMALL_GRID) // BLOCK)
            masks = [ba_att.block_mask(x.block_index, x.block_count, blocks) for x in (info, plain_info)]
            rows = (masks[0] == masks[1]).all(-1).float().mean().item()
            error = ((out.float() - plain.float()).norm() / plain.float().norm()).item()
            found[f"{name}, {density:g}"] = round(error, 5)
            if not torch.equal(out, again) or error > ALLOWED or rows < 0.99 or info.backend == "torch":
                raise SystemExit(f"{name} at {density:g}: error {error}, same rows {rows}, backend {info.backend}")
    return found


def milliseconds(call: Callable[[], object]) -> float:
    found: float = triton.testing.do_bench(call, warmup=20, rep=150, return_mode="median")
    return round(found, 3)


def time_grid(grid: tuple[int, int, int]) -> dict[str, Any]:
    tensors = tensors_of(grid)
    dense = scaled_dot_product_attention(*tensors)
    row: dict[str, Any] = {"grid_thw": grid, "tokens": math.prod(grid), "ms": {}}
    for density in (0.5, 0.25, 0.1):
        how = options_of(grid, density)
        call = partial(ba_att.ba_attention, *tensors, orders=ORDERS, **how)
        times = {"equal": milliseconds(call)}
        equal = budgets_of([0] * HEADS, grid, density)
        with mock.patch.object(attention, "_equal_budget", return_value=None):
            times["equal, with counts"] = milliseconds(partial(call, budgets=equal))
        for name, levels in LEVELS.items():
            times[name] = milliseconds(partial(call, budgets=budgets_of(levels, grid, density)))
        times["equal again"] = milliseconds(call)
        calibrate = partial(ba_att.calibrate_orders, *tensors, dense=dense, **how)
        times["calibration of orders"] = milliseconds(calibrate)
        ids = ba_att.choose_orders(calibrate())
        share = partial(ba_att.calibrate_budgets, *tensors, orders=ids, dense=dense, **how)
        times["calibration of budgets"] = milliseconds(share)
        row["ms"][f"{density:g}"] = times
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for ba_att_budgets_time.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "checked": check(),
        "rows": [],
    }
    print(json.dumps(report["checked"]), flush=True)
    for grid in GRIDS:
        report["rows"].append(time_grid(grid))
        print(json.dumps(report["rows"][-1]), flush=True)
        with atomic_path(options.out / "ba_att_budgets_time.json") as part:
            part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
