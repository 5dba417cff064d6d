"""What shared blocks would do to the squared error of a layer: measured on the files of `diffsieve capture`.

    diffsieve capture --out outputs/capture
    python benchmarks/ba_att_budgets.py --captures outputs/capture --out outputs/budgets

For each clip and layer the last step of the warm-up calibrates orders and budgets, and every later step captured is
attended to with equal and with shared numbers of blocks, and with those that are best for this very step (`hindsight`,
of the same levels, errors measured at each). Writes `ba_att_budgets.json`.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.compare.files import atomic_path
from diffsieve.compare.report import versions
from diffsieve.kernels.ba_att import (
    LEVELS,
    ba_attention,
    blocks_of_level,
    budgets_of_levels,
    calibrate_budgets,
    calibrate_orders,
    choose_budgets,
    choose_orders,
    kept_blocks,
)
from diffsieve.pipelines.loading import resolve_device
from diffsieve.processors import BAAttConfig
from diffsieve.processors.ba_att import kernel_arguments
from diffsieve.processors.warmup import dense_steps
from diffsieve.study import Captured, captured_files, read_captured


def errors_of(captured: Captured, orders: torch.Tensor, budgets: torch.Tensor | None, how: dict) -> torch.Tensor:
    """Squared error of each head, (H,) on the CPU."""
    query, key, value = captured.query, captured.key, captured.value
    grouped = key.shape[1] != query.shape[1]
    dense = scaled_dot_product_attention(query, key, value, scale=captured.scale, enable_gqa=grouped)
    out = ba_attention(query, key, value, grid_thw=captured.grid_thw, orders=orders, budgets=budgets, **how)
    return (out.float() - dense.float()).square().sum((0, 2, 3)).cpu()


def hindsight(captured: Captured, orders: torch.Tensor, kept: int, num_blocks: int, how: dict) -> float:
    """The least error of the layer with levels that keep the total, each head at each level measured."""
    heads = len(orders)
    best = {0: 0.0}
    by_level = {}
    for level in LEVELS:
        blocks = blocks_of_level(level, kept)
        if 1 <= blocks <= num_blocks:
            by_level[level] = errors_of(captured, orders, torch.full((heads,), blocks), how).tolist()
    for head in range(heads):
        ways: dict[int, float] = {}
        for total, error in best.items():
            for level, errors in by_level.items():
                ways[total + level] = min(ways.get(total + level, float("inf")), error + errors[head])
        best = ways
    return best[0]


def measure(calibrating: Captured, later: list[Captured], density: float, block_size: int, backend: str) -> dict:
    """Calibrate in one call and compare in the others."""
    config = BAAttConfig(density=density, block_size=block_size, backend=backend, budgets="auto")
    selection, rest = kernel_arguments(config, second_order=True)
    how = {name: value for name, value in (selection | rest).items() if name not in ("top_p", "min_density")}
    how |= {"scale": calibrating.scale}
    qkv, grid = (calibrating.query, calibrating.key, calibrating.value), calibrating.grid_thw
    orders = choose_orders(calibrate_orders(*qkv, grid_thw=grid, **how)).cpu()
    num_blocks = -(-qkv[0].shape[2] // block_size)
    kept = kept_blocks(num_blocks, density)
    errors = calibrate_budgets(*qkv, orders=orders, grid_thw=grid, **how)
    levels = choose_budgets(errors, kept, num_blocks).tolist()
    budgets = torch.tensor(budgets_of_levels(levels, kept, num_blocks))
    steps = []
    for captured in later:
        equal = float(errors_of(captured, orders, None, how).sum())
        shared = float(errors_of(captured, orders, budgets, how).sum())
        best = hindsight(captured, orders, kept, num_blocks, how)
        steps.append({"step": captured.step, "equal": equal, "shared": shared / equal, "hindsight": best / equal})
    return {"density": density, "blocks": num_blocks, "kept": kept, "budgets": budgets.tolist(), "steps": steps}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Measure all clips and layers of a folder of captures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--captures", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--density", type=float, nargs="+", default=[0.5, 0.4, 0.25, 0.1])
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--warmup", type=float, default=0.2, help="share of the steps")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default=None)
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    groups: dict[tuple, list[Path]] = {}
    for path in captured_files(options.captures):
        groups.setdefault((path.parent.name, path.name.split("-step")[0]), []).append(path)
    rows = []
    for (clip, layer), paths in groups.items():
        calls = [call for call in (read_captured(path, device) for path in paths) if call.call == 0]
        warm = dense_steps(options.warmup, calls[0].num_steps or 0)
        first = [call for call in calls if call.step == warm - 1]
        later = [call for call in calls if call.step >= warm]
        if not first or not later:
            continue
        for density in options.density:
            found = measure(first[0], later, density, options.block_size, options.backend)
            rows.append({"clip": clip, "layer": layer} | found)
            ratios = ", ".join(f"step {x['step']} {x['shared']:.2f} ({x['hindsight']:.2f})" for x in found["steps"])
            print(f"{clip[:24]} {layer} {density:g}: {ratios}", flush=True)
    means = {
        f"{density:g}": {
            name: fmean(step[name] for row in rows if row["density"] == density for step in row["steps"])
            for name in ("shared", "hindsight")
        }
        for density in options.density
        if rows
    }
    place = {"versions": versions(), "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    report = {"schema": "diffsieve.ba_att_budgets/1", "block_size": options.block_size, "environment": place}
    with atomic_path(options.out / "ba_att_budgets.json") as part:
        part.write_text(json.dumps(report | {"means": means, "rows": rows}, indent=1), encoding="utf-8")
    print(json.dumps(means))


if __name__ == "__main__":
    main()
