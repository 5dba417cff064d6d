"""The lean kernels of LLSA on a CUDA GPU: are they right, and how much faster than those of the tables.

    PYTHONPATH=. python benchmarks/llsa_lean.py --out FOLDER [--workers 14] [--limit 80]

Small problems of all shapes are compared with fp64 first. Then each variant of pooling, selection and forward is timed
as a CUDA graph at 65,536 (two levels) and 262,144 tokens (three), a variant whose lists or output differ getting no
figure; the fastest of each kernel, "winners" in the file, belong into `diffsieve/kernels/llsa/tiles.py`. Whole calls
follow, by the tables ("old") and with the winners ("new"), each checked at full size against fp64 on one head, as CUDA
graphs and eager, with the peak memory of forward and backward; dense attention at the end. Times are medians of
`triton.testing.do_bench` in ms, bf16, B 2, H 4, D 64, block 16, topk 8. Parts that would begin after `--limit` seconds
are left out and named. Writes `llsa_lean.json` after every row.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.llsa_tiles import BLOCK, BOUNDS, TOPK, Problem, Report, Stages, gate_cases, within
from diffsieve.kernels import testing
from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention, tiles
from diffsieve.kernels.llsa.tiles import PoolTile, QueryTile, SelectionTile
from diffsieve.kernels.llsa.triton_backend import (
    enriched_attention_fwd_triton,
    hierarchical_topk_triton,
    pyramids_triton,
)
from tests.kernels import llsa_cases
from tests.kernels.llsa_cases import LLSACase

DIM = 64
TUNED = [(65_536, 2), (262_144, 3)]
TIMED = [(65_536, 2), (262_144, 3), (65_536, 3), (16_384, 2), (4_096, 1), (1_048_576, 3)]
# Kernel -> variants; None is the table. Those of the selection are of (lists, coarsest level).
POOLING = [None, PoolTile(16, 4, True), PoolTile(8, 4, True), PoolTile(4, 1, True)]
SELECTION = [
    None,
    (SelectionTile(128, 1, True), SelectionTile(256, 4, True)),
    (SelectionTile(64, 1, True), SelectionTile(128, 2, True)),
    (SelectionTile(128, 2, True), SelectionTile(64, 1, True)),
    (SelectionTile(64, 2, True), SelectionTile(64, 2, True)),
]
FORWARD = [
    None,
    QueryTile(64, 32, 32, 4, 2, 128, True), QueryTile(64, 64, 32, 4, 2, 128, True),
    QueryTile(64, 64, 32, 4, 2, 168, True), QueryTile(64, 32, 32, 4, 3, 128, True, 2),
    QueryTile(64, 64, 32, 4, 3, 128, True, 2), QueryTile(64, 32, 16, 4, 2, 128, True, 3),
    QueryTile(64, 64, 64, 4, 2, 168, True), QueryTile(128, 32, 32, 8, 2, 128, True),
    QueryTile(128, 64, 32, 8, 2, 128, True),
]  # fmt: skip


@contextmanager
def tables(pooling: Any = None, selection: Any = None, forward: Any = None) -> Iterator[None]:
    """Put tiles into the rows of dimension 64 for a while; None leaves the row alone."""
    rows: list[tuple[dict[int, Any], Any]] = [(tiles.FORWARD, forward)]
    rows += zip((tiles.SELECTION, tiles.SELECTION_COARSEST), selection or (None, None), strict=True)
    before = tiles.POOLING, [table[DIM] for table, _ in rows]
    try:
        tiles.POOLING = pooling or tiles.POOLING
        for table, tile in rows:
            table[DIM] = tile or table[DIM]
        yield
    finally:
        tiles.POOLING = before[0]
        for (table, _), tile in zip(rows, before[1], strict=True):
            table[DIM] = tile


def small_cases() -> list[tuple[str, LLSACase]]:
    """About half of the other gate: what the forward and the lists depend on."""
    cases = [(dtype, case) for dtype, case in gate_cases() if case.gain != 4.0 and case.layout != "blhd"]
    large = [job for job in cases if job[1].length >= 1000]
    return large + [job for job in cases if job[1].length < 1000][::2]


def check_case(job: tuple[str, LLSACase]) -> dict[str, Any]:
    """Lists and forward of one small problem by the lean kernels, against fp64 on the same lists."""
    name, case = f"{job[1]}-{job[0]}", job[1]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[job[0]]
    for table in (tiles.FORWARD, tiles.SELECTION, tiles.SELECTION_COARSEST):
        table.update({dim: replace(tile, lean=True) for dim, tile in table.items()})
    tiles.POOLING = replace(tiles.POOLING, lean=True)
    try:
        inputs = llsa_cases.make_inputs(case, dtype=dtype, device="cuda")
        with testing.poisoned_memory(), torch.no_grad():
            lists = llsa_cases.choose_keys(case, inputs[0], inputs[1], "triton")
            out, lse = llsa_attention(*inputs, **case.form, indices=lists, return_lse=True, backend="triton")
            whole = llsa_attention(*inputs, **case.form, topk=case.topk, levels=case.levels, backend="triton")
        grad = torch.zeros_like(inputs[0])
        exact = llsa_cases.exact(case, inputs, lists, grad)
        eager = llsa_cases.dense_low_precision(case, inputs, lists, grad)
        errors = {"out": testing.error_ratio(out, exact["out"]), "lse": testing.lse_error(lse, exact["lse"])}
        bounds = {"out": testing.error_bound(eager["out"], exact["out"])}
        same = bool(torch.equal(out, whole))
    except Exception as error:
        return {"case": name, "ok": False, "exception": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"case": name, "ok": within(errors, bounds) and same, "errors": errors, "bounds": bounds, "same": same}


def variants() -> list[tuple[str, Any]]:
    groups = {"pooling": POOLING, "selection": SELECTION, "forward": FORWARD}
    return [(name, tile) for name, group in groups.items() for tile in group]


class Launches(Stages):
    """The stages of one problem with tiles of this file."""

    def run(self, kernel: str, tile: Any) -> list[Tensor]:
        """Results of one kernel, flat."""
        if kernel == "pooling":
            pools = pyramids_triton((self.query, self.key, self.value), BLOCK, self.problem.levels, tile)
            return [x for levels in pools for x in levels[1:]]
        if kernel == "selection":
            with tables(selection=tile):
                return hierarchical_topk_triton(self.q, self.k, self.kept, BLOCK)
        lists = self.problem.indices
        return list(enriched_attention_fwd_triton(self.query, self.k, self.v, lists, **self.form, tile=tile))


def warm_up(job: tuple[int, int, str, Any]) -> None:
    """Compile a variant into Triton's disk cache: the specialisations are those of the full size."""
    length, levels, kernel, tile = job
    Launches(Problem(length, levels, trusted=False)).run(kernel, tile)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def warm_calls(job: tuple[int, int]) -> None:
    """The same for what whole calls launch besides, the backward above all."""
    Problem(*job, trusted=False).both()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of the call, its launches captured once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def add_graph(report: Report, section: str, name: str, call: Callable[[], Any], **details: Any) -> float:
    """`Report.add` of the call as a CUDA graph; a capture that fails is the row's exception."""

    def captured() -> dict[str, Any]:
        replays.append(graph_of(call))
        return {}

    replays: list[Callable[[], Any]] = []
    ms = report.add(section, name, lambda: replays[0](), captured, rep=40, **details)
    replays.clear()
    torch.cuda.empty_cache()
    return ms


def equal_enough(kernel: str, ours: list[Tensor], expected: list[Tensor]) -> dict[str, Any]:
    """Lists have to be the same; means and outputs may differ by roundings."""
    if kernel == "selection":
        return {"ok": all(map(torch.equal, ours, expected))}
    worst = max(testing.error_ratio(a, b) for a, b in zip(ours, expected, strict=True))
    return {"ok": worst <= BOUNDS["out"], "difference": worst}


def tune(report: Report) -> dict[str, Any]:
    """Time all variants; per kernel the one that is fastest on geometric average, None where that is the table."""
    scores: dict[str, list[float]] = {}
    for length, levels in TUNED:
        launches = Launches(Problem(length, levels, trusted=False))
        expected = {kernel: launches.run(kernel, None) for kernel in ("pooling", "selection", "forward")}
        for number, (kernel, tile) in enumerate(variants()):
            section, name = f"tune-N{length}-M{levels}", f"{kernel} {_text(tile)}"
            try:
                with testing.poisoned_memory():
                    checked = equal_enough(kernel, launches.run(kernel, tile), expected[kernel])
            except Exception as error:
                checked = {"ok": False, "exception": f"{type(error).__name__}: {str(error)[:200]}"}
            if not checked["ok"]:
                report.data.setdefault(section, []).append({"name": name, **checked})
                print(f"{section} FAILED {name} {checked}", flush=True)
                ms = float("inf")
            else:
                ms = add_graph(report, section, name, partial(launches.run, kernel, tile), found=checked)
            scores.setdefault(kernel, [1.0] * len(variants()))[number] *= ms
        del launches, expected
        torch.cuda.empty_cache()
    winners: dict[str, Any] = {}
    for kernel, products in scores.items():
        numbers = [number for number, (name, _) in enumerate(variants()) if name == kernel]
        winners[kernel] = variants()[min(numbers, key=lambda number: products[number])][1]
    report.data["winners"] = {kernel: _text(tile) for kernel, tile in winners.items()}
    print("winners", report.data["winners"], flush=True)
    report.save()
    return winners


def _text(tile: Any) -> str:
    if tile is None:
        return "table"
    parts = tile if isinstance(tile, tuple) else (tile,)
    return " / ".join(" ".join(str(x) for x in asdict(part).values()) for part in parts)


def time_calls(report: Report, length: int, levels: int, winners: dict[str, Any]) -> None:
    """Whole calls, old and new in turns: the same inputs, graph and eager, forward and with the backward."""
    section = f"calls-N{length}-M{levels}"
    problem = Problem(length, levels, trusted=False)
    forms = {"old": {}, "new": winners}
    for form, choice in forms.items():
        with tables(**choice):
            checked = check_call(problem)
        report.data.setdefault("checks", []).append({"problem": section, "form": form, **checked})
        print(section, form, "ok" if checked["ok"] else "FAILED", checked, flush=True)
        if not checked["ok"]:
            return

    def forward() -> Any:
        with torch.no_grad():
            return llsa_attention(*problem.leaves(), **problem.options, backend="triton")

    for name, call in (("forward", forward), ("forward and backward", problem.both)):
        for form, choice in forms.items():
            with tables(**choice):
                add_graph(report, section, f"{form} {name}, CUDA graph", call)
                report.add(section, f"{form} {name}, eager", call, rep=40)
    one = problem.query.numel() * problem.query.element_size()
    lists = sum(x.numel() * x.element_size() for x in problem.indices)
    with tables(**winners):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = problem.both()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before + 4 * one
    del grads
    needed = 8 * one + lists
    report.data.setdefault("memory", {})[section] = {"peak_bytes": peak, "needed_bytes": needed, "ratio": peak / needed}
    print(section, "memory", peak / needed, flush=True)
    report.save()


def check_call(problem: Problem) -> dict[str, Any]:
    """Output and gradients of the last head against the torch backend in fp64; two runs give the same bits."""
    runs = []
    for _ in range(2):
        with testing.poisoned_memory():
            leaves = problem.leaves()
            out = llsa_attention(*leaves, **problem.options, backend="triton")
            runs.append((out.detach(), *torch.autograd.grad(out, leaves, problem.grad_out)))
    same = all(map(torch.equal, *runs))
    result: dict[str, Any] = {"deterministic": same, "ok": same and all(bool(x.isfinite().all()) for x in runs[0])}
    if problem.length > 262_144:
        return result
    lists = hierarchical_topk(problem.query, problem.key, **problem.options, backend="triton")
    last = [x.detach()[-1:, -1:].double() for x in (*problem.leaves(), problem.grad_out)]
    leaves = tuple(x.requires_grad_() for x in last[:3])
    chosen = [x[-1:, -1:].contiguous() for x in lists]
    exact = llsa_attention(*leaves, block_size=BLOCK, levels=problem.levels, indices=chosen, backend="torch")
    solved = (exact.detach(), *torch.autograd.grad(exact, leaves, last[3]))
    errors = {
        name: testing.error_ratio(ours[-1:, -1:], theirs)
        for name, ours, theirs in zip(BOUNDS, runs[0], solved, strict=True)
    }
    return result | {"errors": errors, "ok": result["ok"] and within(errors, BOUNDS)}


def time_dense(report: Report, length: int, once: bool) -> None:
    """Dense attention of both kernels; `once`: forward alone, a single run, for calls of seconds."""
    parts = torch.randn(4, 2, 4, length, DIM, device="cuda").bfloat16().unbind(0)
    leaves = [x.clone().requires_grad_() for x in parts[:3]]
    for name, kernel in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FlashAttention-2", SDPBackend.FLASH_ATTENTION)):

        def forward(kernel: SDPBackend = kernel) -> Tensor:
            with sdpa_kernel(kernel), torch.no_grad():
                return scaled_dot_product_attention(*leaves)

        def both(kernel: SDPBackend = kernel) -> Any:
            with sdpa_kernel(kernel):
                return torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, parts[3])

        section = f"dense-N{length}"
        if once:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            forward()
            end.record()
            torch.cuda.synchronize()
            row = {"name": f"{name} forward, one run", "ok": True, "ms": start.elapsed_time(end)}
            report.data.setdefault(section, []).append(row)
            print(section, row, flush=True)
            report.save()
            continue
        for what, call in (("forward", forward), ("forward and backward", both)):
            add_graph(report, section, f"{name} {what}, CUDA graph", call)
            report.add(section, f"{name} {what}, eager", call, rep=40)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=14, help="processes that compile and check side by side")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds after which no further part begins")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    report = Report(arguments.out / "llsa_lean.json", {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": triton.__version__, "cudnn": torch.backends.cudnn.version(), "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]), "timer": "triton.testing.do_bench, median, L2 flushed",
        "shape": {"B": 2, "H": 4, "D": DIM, "block": BLOCK, "topk": TOPK, "dtype": "bf16"},
    })  # fmt: skip
    failed = 0
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        calls = pool.map_async(warm_calls, TIMED[:-1], chunksize=1)
        kernels = pool.map_async(_warm_quietly, [(*shape, *job) for shape in TUNED for job in variants()], chunksize=1)
        rows = pool.map(check_case, small_cases(), chunksize=1)
        report.data["gate"] = rows
        failed += sum(not row["ok"] for row in rows)
        for row in rows:
            if not row["ok"]:
                print("FAILED", row, flush=True)
        kernels.wait()
        calls.wait()
    print(f"gate: {len(rows)} cases, {failed} failed, {time.perf_counter() - started:.0f} s", flush=True)
    report.save()
    winners: dict[str, Any] = {}

    def tuned() -> None:
        winners.update(tune(report))

    parts: dict[str, Callable[[], None]] = {"tune": tuned}
    parts |= {f"N{n}-M{m}": partial(time_calls, report, n, m, winners) for n, m in TIMED}
    parts |= {"dense-N4096": partial(time_dense, report, 4096, False)}
    parts |= {"dense-N1048576": partial(time_dense, report, 1_048_576, True)}
    for name, part in parts.items():
        if time.perf_counter() - started > arguments.limit:
            report.data.setdefault("left out", []).append(name)
            continue
        try:
            part()
        except Exception as error:  # one part that fails must not cost the others
            failed += 1
            report.data.setdefault("exceptions", {})[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{name} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
        print(f"{name} done at {time.perf_counter() - started:.0f} s", flush=True)
        report.save()
    report.data["seconds"] = time.perf_counter() - started
    report.save()
    left_out = report.data.get("left out", [])
    print(f"{report.data['seconds']:.0f} s in all, written to {report.path}; left out: {left_out}", flush=True)
    return 0 if failed == 0 else 1


def _warm_quietly(job: tuple[int, int, str, Any]) -> None:
    """A variant that does not compile shows up again in its own row."""
    try:
        warm_up(job)
    except Exception as error:
        print("warm-up", job, type(error).__name__, str(error)[:200], flush=True)


if __name__ == "__main__":
    sys.exit(main())
