"""Recall of attention mass by order and score on synthetic heads.

    python benchmarks/ba_att_synthetic.py --out benchmarks/results/cpu/ba_att_synthetic.json

Recall: exact attention mass inside the kept blocks, mean over queries. "var" are heads whose token norms differ, "flat"
are heads whose norms hardly do. `oracle` selects by the true mass in that order; `calibrated` takes the order that
`choose_orders` picks per head; `best_order` the best in hindsight. Sorts descend unless said. The method of the paper
is `norm_sort ascending / eq14`.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from diffsieve.kernels import ba_att
from diffsieve.kernels.ba_att.synthetic import attention_by_block, kept_mass, synthetic_head

BLOCK = 128
MEAN = {"second_order": False, "log_count": False}
PAPER = {"beta": 1.0, "center_keys": False, "log_count": False}
GROUPS = {
    "var": ["local3d", "temporal", "semantic", "sinkbig", "sinksmall", "firstframe", "heavynorm"],
    "flat": ["local3d", "spatial", "temporal", "semantic"],
}


def recalls_of_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid: tuple[int, int, int],
    window: int,
    densities: list[float],
) -> dict[str, list[float]]:
    """Recall per density of every recipe on one head."""
    rows: dict[str, list[float]] = {}
    default: dict[str, list[float]] = {}
    for name in ba_att.CANDIDATE_ORDERS:
        for descending in (True, False) if name in ("hilbert_window", "norm_sort") else (True,):
            label = name if descending else f"{name} ascending"
            order = ba_att.token_orders(q, k, grid_thw=grid, orders=name, window=window, descending=descending)
            ordered_key = ba_att.gather_tokens(k, order.key)
            query_stats = ba_att.block_statistics(ba_att.gather_tokens(q, order.query), BLOCK)
            key_stats = ba_att.block_statistics(ordered_key, BLOCK)
            mass = attention_by_block(q, k, order, BLOCK)
            scores = {
                "oracle": mass,
                "mean": ba_att.block_scores(query_stats, key_stats, **MEAN),
                "eq14": ba_att.block_scores(query_stats, key_stats, **PAPER),
                "centred": ba_att.block_scores(query_stats, key_stats),
                "halfk": ba_att.halfk_scores(query_stats, key_stats, ordered_key, BLOCK),
            }
            for kind, score in scores.items():
                kept = [ba_att.kept_blocks(score.shape[-1], density) for density in densities]
                rows[f"{label} / {kind}"] = [kept_mass(mass, ba_att.select_blocks(score, count)) for count in kept]
            if descending:
                default[name] = rows[f"{label} / centred"]
    chosen = []
    for number, density in enumerate(densities):
        errors = ba_att.calibrate_orders(q, k, v, grid_thw=grid, density=density, block_size=BLOCK, window=window)
        name = ba_att.CANDIDATE_ORDERS[int(ba_att.choose_orders(errors)[0])]
        chosen.append(default[name][number])
    rows["calibrated / centred"] = chosen
    rows["best_order / centred"] = [max(values) for values in zip(*default.values(), strict=True)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=int, nargs=3, default=(7, 24, 40), help="frames, height, width in tokens")
    parser.add_argument("--window", type=int, default=1024, help="tokens per sorting window")
    parser.add_argument("--densities", type=float, nargs="+", default=(0.5, 0.4, 0.25, 0.1))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    grid, densities = tuple(args.grid), list(args.densities)
    start = time.perf_counter()
    report = {
        "command": "python benchmarks/ba_att_synthetic.py",
        "torch": torch.__version__,
        "grid_thw": grid,
        "block_size": BLOCK,
        "window": args.window,
        "densities": densities,
        "seeds": list(args.seeds),
        "groups": GROUPS,
        "recall": {},
        "recall_std_over_seeds": {},
        "recall_by_head": {},
    }
    for group, names in GROUPS.items():
        by_head = {}
        for name in names:
            per_seed = []
            for seed in args.seeds:
                q, k, v = synthetic_head(name, grid, flat=group == "flat", seed=seed)
                per_seed.append(recalls_of_head(q, k, v, grid, args.window, densities))
                print(f"{group} {name} seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
            by_head[name] = {row: torch.tensor([one[row] for one in per_seed]) for row in per_seed[0]}
        recipes = by_head[names[0]]
        over_heads = {row: torch.stack([by_head[name][row] for name in names]).mean(0) for row in recipes}
        report["recall"][group] = {row: _rounded(x.mean(0)) for row, x in over_heads.items()}
        report["recall_std_over_seeds"][group] = {row: _rounded(x.std(0)) for row, x in over_heads.items()}
        report["recall_by_head"][group] = {
            name: {row: _rounded(x.mean(0)) for row, x in rows.items()} for name, rows in by_head.items()
        }
    report["seconds"] = round(time.perf_counter() - start)
    for group, rows in report["recall"].items():
        print(f"\n{group}: recall at density {densities}")
        for row, values in rows.items():
            print(f"  {row:36s}" + " ".join(f"{value:.3f}" for value in values))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


if __name__ == "__main__":
    main()
