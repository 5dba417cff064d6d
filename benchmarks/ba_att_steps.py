"""Steps of BA-Att around the attention kernel on a CUDA GPU, with tiles for `ba_att.forms` to choose among.

    python benchmarks/ba_att_steps.py --out outputs/ba_att_steps [--steps centroids]

Writes `ba_att_steps.json`. First each variant is checked against PyTorch, in processes of their own: one that fails is
reported and not timed. Then steps are timed, and the whole call with the tiles in use and with the fastest of each
step. `--steps` names those whose other tiles are of interest; of the rest the tile in use is checked and timed. Times
are medians of CUDA graphs in ms, without the host's time; "floor" is the time that the bytes of a step (its arithmetic,
for the centroids) take at best on an H200: 4.2 TB/s, 600 TFLOP/s.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from diffsieve.kernels import ba_att, testing
from diffsieve.kernels.ba_att import attention, forms
from diffsieve.kernels.ba_att.centroids import add_centroids, add_skipped_fused
from diffsieve.kernels.ba_att.forms import CentroidTile, Forms, GatherTile, ScoreTile, WindowTile
from diffsieve.kernels.ba_att.fused import gather_with_means, gather_with_statistics, scatter_tokens
from diffsieve.kernels.ba_att.fused_selection import list_blocks_fused, score_blocks_fused
from diffsieve.kernels.ba_att.scores import mean_key
from diffsieve.kernels.ba_att.selection import skipped_blocks
from diffsieve.kernels.block_sparse import block_sparse_attention

GRIDS = [(21, 45, 80), (21, 30, 52)]
SMALL_GRID = (15, 24, 25)
HEADS, DIM, BLOCK = 12, 128, 128
BANDWIDTH, RATE = 4.2e12, 600e12
# Ids on the CPU, as the processors keep them.
WINDOWS = torch.tensor([3, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
TABLES = {"static": torch.arange(HEADS) % 3, "two windows": WINDOWS, "all candidates": torch.arange(HEADS) % 5}
HOW = {"beta": 0.5, "center_keys": True, "log_count": True, "second_order": True, "scale": DIM**-0.5}
OTHERS: dict[str, list[Any]] = {
    "gather": [GatherTile(*x) for x in ((8, 128), (4, 128), (4, 64), (2, 32), (1, 32))],
    "gather_means": [GatherTile(*x) for x in ((8, 128), (4, 64), (2, 64))],
    "scores": [
        ScoreTile(64, 64, 32, 4, 4), ScoreTile(64, 64, 32, 8, 3), ScoreTile(128, 64, 32, 8, 3),
        ScoreTile(64, 64, 64, 4, 2), ScoreTile(64, 128, 32, 8, 3),
    ],
    "select_warps": [1, 4],
    "windows": [WindowTile(*x) for x in ((64, 32, 4), (64, 64, 4), (128, 32, 4))],
    "centroids": [
        CentroidTile(64, 64, 4, 2, 168, True), CentroidTile(128, 32, 8, 2, 128, True),
        CentroidTile(64, 32, 4, 2, 168, True), Forms().centroids_elsewhere,
    ],
}  # fmt: skip
# The first of each step is in use.
VARIANTS = {step: [getattr(Forms(), step), *tiles] for step, tiles in OTHERS.items()}


class Problem:
    """One call of BA-Att, stopped before each step; every input of a step comes from PyTorch."""

    def __init__(self, grid: tuple[int, int, int], density: float = 0.5) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (1, math.prod(grid), HEADS, DIM)
        # Blocks that differ: tokens near each other are alike.
        base = torch.randn((1, -(-shape[1] // 60), HEADS, DIM), generator=generator, device="cuda")
        base = base.repeat_interleave(60, dim=1)[:, : shape[1]]
        noise = [torch.randn(shape, generator=generator, device="cuda") for _ in range(3)]
        tensors = [(0.5 * base + x).bfloat16().transpose(1, 2) for x in noise]
        self.query, self.key, self.value = tensors
        self.grid = grid
        self.order = ba_att.token_orders(*tensors[:2], grid_thw=grid, orders=TABLES["static"], block_size=BLOCK)
        self.q, self.q_stats = gather_with_statistics(self.query, self.order.query, BLOCK, fused=False)
        self.k, self.k_stats = gather_with_statistics(self.key, self.order.key, BLOCK, fused=False)
        self.v, self.v_mean = gather_with_means(self.value, self.order.key, BLOCK, fused=False)
        self.scores = ba_att.residual_scores(self.q_stats, self.k_stats, **HOW)
        self.set_density(density)

    def set_density(self, density: float) -> None:
        blocks = self.scores.shape[-1]
        self.kept = ba_att.kept_blocks(blocks, density)
        self.index = ba_att.select_blocks(self.scores, self.kept)
        self.mask = ba_att.block_mask(self.index, None, blocks)
        self.skipped, _ = skipped_blocks(self.index, None, blocks)
        self.skipped = self.skipped.contiguous()
        self.attend = partial(
            block_sparse_attention, self.q, self.k, self.v, self.index, block_size=BLOCK, return_lse=True
        )
        self.out, self.lse = self.attend()

    def step(self, field: str) -> Callable[[], Any]:
        """The call that a step is."""
        if field == "gather":
            return lambda: gather_with_statistics(self.query, self.order.query, BLOCK, fused=True)
        if field == "gather_means":
            return lambda: gather_with_means(self.value, self.order.key, BLOCK, fused=True)
        if field == "scores":
            return lambda: score_blocks_fused("residual", self.q_stats, self.k_stats, **HOW)
        if field.startswith("select"):
            return lambda: list_blocks_fused(self.scores, self.kept, return_skipped=True)
        if field == "windows":
            return partial(self.orders, WINDOWS)
        attended = (self.out, self.lse, self.q, self.k_stats.mean, self.v_mean)
        return lambda: add_skipped_fused(
            *attended, self.skipped, None, self.order.query, block_size=BLOCK, scale=DIM**-0.5
        )[0]

    def orders(self, table: torch.Tensor) -> ba_att.TokenOrders:
        return ba_att.token_orders(self.query, self.key, grid_thw=self.grid, orders=table, block_size=BLOCK, fused=True)

    def whole(self, table: str, density: float, **extra: Any) -> Any:
        return ba_att.ba_attention(
            self.query, self.key, self.value, grid_thw=self.grid, orders=TABLES[table], density=density,
            block_size=BLOCK, compensate="centroid", score="residual", **extra,
        )  # fmt: skip

    def difference(self, field: str) -> float:
        """How far a step is off, in units of what is allowed."""
        with testing.poisoned_memory():
            got = self.step(field)()
            again = self.step(field)()
        pairs = zip(_tensors(got), _tensors(again), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return math.inf
        if field in ("gather", "gather_means"):
            tokens, moments = (self.q, self.q_stats[:2]) if field == "gather" else (self.v, [self.v_mean])
            same = torch.equal(got[0], tokens)
            found = got[1][:2] if field == "gather" else [got[1]]
            off = max(float((a - b).abs().max()) for a, b in zip(found, moments, strict=True))
            return off / 2e-5 if same else math.inf
        if field == "scores":
            return float((got - self.scores).abs().max()) / 5e-4
        if field.startswith("select"):
            wanted = (self.index, self.skipped)
            return 0.0 if all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)) else math.inf
        if field == "windows":
            plain = ba_att.token_orders(self.query, self.key, grid_thw=self.grid, orders=WINDOWS, block_size=BLOCK)
            valid = torch.equal(got.key.sort(-1).values, plain.key.sort(-1).values)
            off = (got.key != plain.key).float().mean().item()
            return off / 0.01 if valid and torch.equal(got.query, plain.query) else math.inf
        sizes = (self.k_stats.size, self.mask)
        exact, _ = add_centroids(
            self.out.float(), self.lse, self.q.float(), self.k_stats.mean, self.v_mean, *sizes, block_size=BLOCK,
            scale=DIM**-0.5,
        )  # fmt: skip
        exact = scatter_tokens(exact, self.order.query, fused=False)
        off = ((got.float() - exact).norm() / exact.norm()).item()
        return off / 8e-3 if bool(got.isfinite().all()) else math.inf


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for part in result for x in ([part] if isinstance(part, torch.Tensor) else list(part))]


def with_form(field: str, value: Any) -> Forms:
    return Forms()._replace(**{field: value})


def check(field: str, number: int) -> dict[str, Any]:
    """Compile one variant and compare it with PyTorch, on few tokens and on the shapes that it compiles anew for."""
    value = VARIANTS[field][number]
    forms.FORMS = with_form(field, value)
    problem = Problem(SMALL_GRID)
    found: dict[str, Any] = {"off": problem.difference(field)}
    if field.startswith("select"):  # kernels of the padded number of blocks; ties
        for blocks in (591, 256):
            problem.scores = torch.randn(1, HEADS, blocks, blocks, device="cuda").mul_(4).round_()
            problem.kept = ba_att.kept_blocks(blocks, 0.5)
            problem.index = ba_att.select_blocks(problem.scores, problem.kept)
            problem.skipped, _ = skipped_blocks(problem.index, None, blocks)
            found["off"] = max(found["off"], problem.difference(field))
    if field == "centroids":  # weights that overflow without the running maximum
        problem.lse = problem.lse - 300.0
        found["off with a restart"] = problem.difference(field)
    return found


def check_some(tasks: list[str]) -> None:
    """Print a line for each variant; stop at the first that raises, since the GPU may be of no more use then."""
    for task in tasks:
        field, number = task.split(":")
        try:
            found: dict[str, Any] = check(field, int(number))
        except Exception as error:
            print(json.dumps([task, {"failed": f"{type(error).__name__}: {str(error)[:600]}"}]), flush=True)
            raise SystemExit(1) from error
        print(json.dumps([task, found if max(found.values()) <= 1 else {"failed": found}]), flush=True)


def check_all() -> dict[str, dict[str, Any]]:
    """By step and variant, what processes of their own found: {"off": ...} in units of what is allowed, or "failed"."""
    results: dict[str, Any] = {}

    def run(tasks: list[str]) -> str:
        command = [sys.executable, __file__, "--check", *tasks]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
            lines, error = done.stdout, done.stderr[-600:]
        except subprocess.TimeoutExpired as late:
            lines, error = (late.stdout or b"").decode(), "no result within 100 s"
        results.update(json.loads(line) for line in lines.splitlines() if line.startswith("["))
        return error

    def run_alone(task: str) -> None:
        error = run([task])
        results.setdefault(task, {"failed": error})

    tasks = [f"{field}:{number}" for field, values in VARIANTS.items() for number in range(len(values))]
    workers = max(2, min(14, (os.cpu_count() or 2) - 2))
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, [tasks[first::workers] for first in range(workers)]))
        list(pool.map(run_alone, [task for task in tasks if task not in results]))  # after one that broke off
    return {
        field: {str(value): results[f"{field}:{number}"] for number, value in enumerate(values)}
        for field, values in VARIANTS.items()
    }


def milliseconds(call: Callable[[], object], rep: int = 12) -> float:
    with torch.cuda.stream(torch.cuda.Stream()):
        return round(triton.testing.do_bench_cudagraph(call, rep=rep, return_mode="median"), 4)


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # the others are still worth measuring
        return {"failed": f"{type(error).__name__}: {str(error)[:600]}"}


def floors(grid: tuple[int, int, int]) -> dict[str, float]:
    """Least ms of each step: every tensor of tokens read once and written once."""
    length, blocks = math.prod(grid), -(-math.prod(grid) // BLOCK)
    tensor, pairs = 2 * HEADS * length * DIM, HEADS * blocks * blocks
    moved = {
        "gather": 2 * tensor, "gather_means": 2 * tensor, "scores": 4 * pairs, "select_warps": 8 * pairs,
        "windows": 2 * 2 * length * DIM + 2 * 8 * HEADS * length, "centroids": 3 * tensor,
    }  # fmt: skip
    found = {name: 1e3 * size / BANDWIDTH for name, size in moved.items()}
    half = 1e3 * 2 * HEADS * length * blocks * DIM / RATE  # half of the blocks
    found["centroids"] = max(found["centroids"], half)
    return {name: round(x, 4) for name, x in found.items()}


def time_steps(problem: Problem, checked: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for field, values in VARIANTS.items():
        found[field] = {}
        for value in values:
            if "failed" in checked[field][str(value)]:
                continue
            forms.FORMS = with_form(field, value)
            call = problem.step(field)
            found[field][str(value)] = attempt(lambda call=call: milliseconds(call))
    forms.FORMS = Forms()
    centroids = {}
    for density in (0.25, 0.1):  # more blocks to stand in for
        problem.set_density(density)
        for value in VARIANTS["centroids"]:
            if "failed" not in checked["centroids"][str(value)]:
                forms.FORMS = with_form("centroids", value)
                call = problem.step("centroids")
                centroids[f"{1 - density:.0%} skipped, {value}"] = attempt(lambda call=call: milliseconds(call))
    forms.FORMS = Forms()
    found["centroids at other densities"] = centroids
    keys = torch.stack([problem.key[:, 0], problem.key[:, 1]], dim=1)
    found["parts of the windows"] = {
        "stack two heads": milliseconds(lambda: torch.stack([problem.key[:, 0], problem.key[:, 1]], dim=1)),
        "their mean key": milliseconds(lambda: keys.mean(dim=2, keepdim=True, dtype=torch.float32)),
        "static order": milliseconds(partial(problem.orders, TABLES["static"])),
    }
    found["parts of the scores"] = {"mean key": milliseconds(lambda: mean_key(problem.k_stats))}
    return found


def best_forms(times: dict[str, dict[str, Any]]) -> Forms:
    """The fastest variant of each step; of the compensation that with the least sum over the densities."""
    best = {}
    for field, values in VARIANTS.items():
        totals = []
        for number, value in enumerate(values):
            found = [times[field].get(str(value))]
            if field == "centroids":
                others = times["centroids at other densities"].items()
                found += [x for name, x in others if name.endswith(f"skipped, {value}")]
            if all(isinstance(x, float) for x in found):
                totals.append((sum(found), number))
        if totals:
            best[field] = values[min(totals)[1]]
    return Forms(**best)


def time_calls(problem: Problem, chosen: dict[str, Forms]) -> dict[str, Any]:
    """The whole call and the attention kernel alone, by share of skipped blocks."""
    found: dict[str, Any] = {}
    for density in (0.5, 0.25, 0.1):
        row: dict[str, Any] = {}
        problem.set_density(density)
        row["attention kernel alone"] = attempt(lambda: milliseconds(problem.attend, 20))
        for name, form in chosen.items():
            forms.FORMS = form
            row[f"call, static, {name}"] = attempt(partial(milliseconds, partial(problem.whole, "static", density), 20))
            for table in TABLES:
                row[f"rest of the call, {table}, {name}"] = attempt(partial(time_rest, problem, table, density))
        if "best" in chosen:
            row["best against in use"] = attempt(partial(_distance, problem, density, chosen))
        forms.FORMS = Forms()
        _, info = problem.whole("static", density, return_info=True)
        found[f"{1 - density:.0%} skipped"] = row | {"backend": info.backend}
    return found


def time_rest(problem: Problem, table: str, density: float) -> float:
    """The call but for its attention: the difference of two long times would hold what the clock does in between."""
    with mock.patch.object(attention, "block_sparse_attention", return_value=(problem.out, problem.lse)):
        return milliseconds(partial(problem.whole, table, density))


def _distance(problem: Problem, density: float, chosen: dict[str, Forms]) -> dict[str, float]:
    outs, lists = [], []
    for form in chosen.values():
        forms.FORMS = form
        out, info = problem.whole("two windows", density, return_info=True)
        outs.append(out.float())
        lists.append(info.block_index)
    other = (lists[0] != lists[-1]).any(-1).float().mean().item()
    return {"error": ((outs[0] - outs[-1]).norm() / outs[0].norm()).item(), "rows with other blocks": other}


def time_calibration(problem: Problem) -> float:
    call = partial(
        ba_att.calibrate_orders, problem.query, problem.key, problem.value, grid_thw=problem.grid, density=0.5,
        block_size=BLOCK, score="residual", compensate="centroid",
    )  # fmt: skip
    found: float = triton.testing.do_bench(call, warmup=5, rep=40, return_mode="median")
    return round(found, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for ba_att_steps.json")
    parser.add_argument("--steps", nargs="+", choices=list(VARIANTS), help="of these alone all tiles")
    parser.add_argument("--check", nargs="+", metavar="STEP:NUMBER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        check_some(options.check)
        return
    if options.out is None:
        parser.error("--out must name a folder")
    for step in set(VARIANTS) - set(options.steps or VARIANTS):
        del VARIANTS[step][1:]
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "checked": check_all(),
        "rows": [],
    }

    def save(what: object) -> None:
        report["seconds"] = round(time.monotonic() - started, 1)
        partial_file = options.out / ".ba_att_steps.json.part"
        partial_file.write_text(json.dumps(report, indent=1) + "\n")
        partial_file.replace(options.out / "ba_att_steps.json")
        print(json.dumps(what), flush=True)

    save({step: {name: x for name, x in found.items() if "failed" in x} for step, found in report["checked"].items()})
    chosen = {"in use": Forms()}
    for grid in GRIDS:
        problem = Problem(grid)
        row: dict[str, Any] = {"grid_thw": grid, "tokens": math.prod(grid), "floor_ms": floors(grid)}
        report["rows"].append(row)
        row["steps_ms"] = time_steps(problem, report["checked"])
        if grid == GRIDS[0]:
            best = best_forms(row["steps_ms"])
            report["best"] = {field: str(value) for field, value in best._asdict().items()}
            chosen |= {"best": best} if best != Forms() else {}
        save(row)
        row["call_ms"] = time_calls(problem, chosen)
        row["calibration_ms"] = attempt(partial(time_calibration, problem))
        save({"best": report["best"], "call_ms": row["call_ms"], "calibration_ms": row["calibration_ms"]})


if __name__ == "__main__":
    main()
