"""Tiles of the LLSA kernels on a CUDA GPU: correctness of all shapes, then a sweep, and the time of each stage.

    PYTHONPATH=. python benchmarks/llsa_tiles.py [--out FOLDER] [--only gate|time] [--workers 14]

Writes `llsa.json` (default folder `benchmarks/results/<gpu>`) after every section. Small problems of all shapes are
compared with fp64; each timed tile is compared with the torch backend in fp32 at full size, on the same lists. What
fails gets no figure. The tiles are swept first; the fastest of each kernel, over both problems of the sweep, are those
of the stages timed after ("tiles" in the file: they belong into `tiles.py`). Times are medians of
`triton.testing.do_bench` in ms, bf16, B 2, H 4, D 64, block 16, topk 8. The sections "sparse-..." time the backward of
block-sparse attention at 16,384 tokens. Whole calls beside dense attention, over all lengths, are
`diffsieve bench llsa`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention
from diffsieve.kernels.block_sparse.tiles import BackwardTile
from diffsieve.kernels.block_sparse.triton_backend import block_sparse_attention_triton
from diffsieve.kernels.block_sparse.triton_backward import block_sparse_attention_triton_backward
from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention, tiles
from diffsieve.kernels.llsa.tiles import KeyTile, QueryTile, SelectionTile
from diffsieve.kernels.llsa.triton_backend import (
    enriched_attention_bwd_triton,
    enriched_attention_fwd_triton,
    hierarchical_topk_triton,
    pyramids_triton,
)
from tests.kernels.backward_cases import BACKWARD_CASES, gradient_errors
from tests.kernels.llsa_cases import LLSACase
from tests.kernels.llsa_triton_cases import CASES, measure

BLOCK, TOPK = 16, 8
# (tokens, levels)
SWEPT = [(65_536, 2), (262_144, 3)]
# Largest relative error in bf16: of the output, of a gradient.
BOUNDS = {"out": 5e-3, "dq": 1e-2, "dk": 1e-2, "dv": 1e-2}

FORWARD = [
    QueryTile(64, 64, 32, 4, 2, 128), QueryTile(64, 64, 32, 4, 2, 168), QueryTile(64, 32, 32, 4, 2, 128),
    QueryTile(64, 64, 64, 4, 2, 168), QueryTile(64, 64, 16, 4, 2, 128), QueryTile(64, 128, 32, 4, 2),
    QueryTile(128, 32, 32, 8, 2, 128), QueryTile(128, 64, 32, 8, 2, 128),
]  # fmt: skip
BACKWARD_QUERY = [
    QueryTile(64, 64, 32, 4, 2), QueryTile(64, 64, 32, 4, 2, 168), QueryTile(64, 32, 32, 4, 2, 168),
    QueryTile(64, 32, 16, 4, 2, 128), QueryTile(64, 64, 16, 4, 2, 168), QueryTile(128, 64, 32, 8, 2),
    QueryTile(128, 32, 16, 8, 2, 128),
]  # fmt: skip
BACKWARD_LISTS = [
    KeyTile(64, 16, False, 2, 2), KeyTile(64, 16, False, 2, 2, 128), KeyTile(32, 16, False, 1, 2),
    KeyTile(32, 16, False, 1, 2, 168), KeyTile(16, 16, False, 1, 3), KeyTile(64, 16, True, 4, 2),
    KeyTile(64, 16, True, 4, 3), KeyTile(128, 16, False, 4, 2),
]  # fmt: skip
BACKWARD_COARSEST = [
    KeyTile(64, 64, False, 4, 2), KeyTile(64, 64, False, 4, 2, 168), KeyTile(32, 64, False, 4, 2, 168),
    KeyTile(64, 128, False, 8, 2), KeyTile(64, 64, True, 4, 2), KeyTile(64, 64, True, 4, 2, 168),
    KeyTile(64, 128, True, 8, 2),
]  # fmt: skip
SELECTION = [SelectionTile(128, 1), SelectionTile(128, 2), SelectionTile(64, 1), SelectionTile(64, 2)]
SELECTION_COARSEST = [SelectionTile(256, 4), SelectionTile(128, 2), SelectionTile(64, 1), SelectionTile(64, 2)]
# The rows of the table that the winners replace while this runs: head dimension 64.
TABLES: dict[str, dict[int, Any]] = {
    "tile": tiles.FORWARD, "query_tile": tiles.BACKWARD_QUERY, "list_tile": tiles.BACKWARD_LISTS,
    "coarsest_tile": tiles.BACKWARD_COARSEST, "selection_tile": tiles.SELECTION,
    "selection_coarsest_tile": tiles.SELECTION_COARSEST,
}  # fmt: skip
SPARSE_QUERY = [BackwardTile(64, 64, 4, 2), BackwardTile(128, 64, 8, 2)]
SPARSE_KEY = [BackwardTile(64, 128, 8, 2), BackwardTile(64, 64, 4, 1), BackwardTile(64, 64, 4, 2)]


def gate_cases() -> list[tuple[str, LLSACase]]:
    """The problems of the interpreter tests that differ most, in the dtypes that matter on a GPU, and larger ones."""
    base = LLSACase(batch=1, heads=2, kv_heads=2, dim=64, block_size=16, topk=8)
    larger = [
        replace(base, length=1024, dim=32),
        replace(base, length=1536, topk=6),
        replace(base, length=4111, levels=2, dim=128),
        replace(base, length=4096, levels=2, batch=2, heads=1, kv_heads=1),
        replace(base, length=4097, levels=3, heads=4, kv_heads=1),
        replace(base, length=1024, dim=96, block_size=64, topk=4),
        replace(base, length=2000, levels=2, disjoint=True, layout="fused_qkv"),
        replace(base, length=5000, levels=3, disjoint=True, heads=4),
        *(replace(base, length=1000, levels=2, dim=dim, gain=gain) for dim in (32, 64, 128) for gain in (4.0, 16.0)),
    ]
    # Compiling is most of the gate's time; `pytest -m gpu tests/kernels` has the rest.
    small = [case for case in CASES if case.levels > 1 or case.block_size > 16 or case.disjoint or case.heads > 1]
    others = [("fp16", larger[number]) for number in (0, 2)] + [("fp32", larger[0])]
    return [*(("bf16", case) for case in [*larger, *small]), *others]


def check_case(job: tuple[str, LLSACase]) -> dict[str, Any]:
    """Errors of one small problem; an exception is a failure of that case alone."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    name = f"{job[1]}-{job[0]}"
    try:
        result: dict[str, Any] = measure(job[1], dtypes[job[0]], "cuda")
    except Exception as error:
        return {"case": name, "ok": False, "exception": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"case": name, "ok": within(result["errors"], result["bounds"]) and result["nested"], **result}


def check_sparse_case(number: int) -> dict[str, Any]:
    case = BACKWARD_CASES[number]
    try:
        result: dict[str, Any] = gradient_errors(case, torch.bfloat16, "cuda")
    except Exception as error:
        return {"case": str(case), "ok": False, "exception": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"case": f"backward {case}", "ok": within(result["errors"], result["bounds"]), **result}


def within(errors: dict[str, float], bounds: dict[str, float]) -> bool:
    """NaN is never within."""
    return all(errors[name] <= bounds[name] for name in bounds)


class Problem:
    """Random inputs of one timed problem, its lists, and the trusted results in fp32."""

    def __init__(self, length: int, levels: int, trusted: bool = True) -> None:
        self.length, self.levels = length, levels
        generator = torch.Generator("cuda").manual_seed(testing.SEED)
        tensors = torch.randn(4, 2, 4, length, 64, generator=generator, device="cuda").bfloat16().unbind(0)
        self.query, self.key, self.value = (x.clone().requires_grad_() for x in tensors[:3])
        self.grad_out = tensors[3].clone()
        self.options: dict[str, Any] = {"block_size": BLOCK, "topk": TOPK, "levels": levels}
        with torch.no_grad():
            self.indices = hierarchical_topk(self.query, self.key, **self.options, backend="triton")
        self.trusted = self._solve("torch", torch.float32) if trusted else None

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def both(self) -> tuple[Tensor, ...]:
        out = llsa_attention(*self.leaves(), **self.options, backend="triton")
        return torch.autograd.grad(out, self.leaves(), self.grad_out)

    def _solve(self, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.leaves()]
        out = llsa_attention(*leaves, block_size=BLOCK, levels=self.levels, indices=self.indices, backend=backend)
        grads = torch.autograd.grad(out, leaves, self.grad_out.to(dtype))
        return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def check(self) -> dict[str, Any]:
        """Errors of the Triton backend at full size, with poisoned memory, and whether two runs are bitwise equal."""
        with testing.poisoned_memory():
            ours = self._solve("triton", torch.bfloat16)
            # These come with their own lists, transposed by search instead of by a sort.
            again, once_more = self.both(), self.both()
        equal = all(map(torch.equal, again, once_more)) and all(map(torch.equal, again, list(ours.values())[1:]))
        if self.trusted is None:
            return {"ok": equal and all(bool(x.isfinite().all()) for x in ours.values()), "deterministic": equal}
        return {**self.errors(ours), "deterministic": equal} | ({} if equal else {"ok": False})

    def errors(self, ours: dict[str, Tensor]) -> dict[str, Any]:
        assert self.trusted is not None
        errors = {name: relative(x, self.trusted[name]) for name, x in ours.items()}
        return {"errors": errors, "ok": within(errors, {name: BOUNDS[name] for name in errors})}


def relative(actual: Tensor, expected: Tensor) -> float:
    """RMS(actual - expected) / RMS(expected) in fp32, which full sizes can afford."""
    if not bool(actual.isfinite().all()):
        return float("inf")
    return ((actual.float() - expected).square().mean() / expected.square().mean()).sqrt().item()


class Stages:
    """The launches of one problem, each to be run on its own with a tile."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.form: dict[str, Any] = {"block_size": BLOCK, "scale": 64**-0.5, "enrich": True, "disjoint": False}
        self.query, self.key, self.value = (x.detach() for x in problem.leaves())
        self.q, self.k, self.v = self.pyramid()
        self.kept = [index.shape[3] for index in problem.indices]
        self.out, self.lse = self.forward()

    def pyramid(self) -> list[list[Tensor]]:
        return pyramids_triton((self.query, self.key, self.value), BLOCK, self.problem.levels)

    def topk(self, tile: SelectionTile | None = None, coarsest_tile: SelectionTile | None = None) -> list[Tensor]:
        return hierarchical_topk_triton(self.q, self.k, self.kept, BLOCK, tile, coarsest_tile)

    def forward(self, tile: QueryTile | None = None) -> tuple[Tensor, Tensor]:
        lists = self.problem.indices
        return enriched_attention_fwd_triton(self.query, self.k, self.v, lists, **self.form, tile=tile)

    def backward(self, **overrides: Any) -> dict[str, Tensor]:
        problem = self.problem
        dq, dk, dv = enriched_attention_bwd_triton(
            problem.grad_out, None, self.query, self.k, self.v, self.out, self.lse, problem.indices,
            nested=True, merge=True, **self.form, **overrides,
        )  # fmt: skip
        return {"dq": dq, "dk": dk[0], "dv": dv[0]}


def sweep() -> list[tuple[str, Any]]:
    """(argument of the launch function, tile) of all variants."""
    groups = {
        "tile": FORWARD, "query_tile": BACKWARD_QUERY, "list_tile": BACKWARD_LISTS, "coarsest_tile": BACKWARD_COARSEST,
        "selection_tile": SELECTION, "selection_coarsest_tile": SELECTION_COARSEST,
    }  # fmt: skip
    return [(name, tile) for name, group in groups.items() for tile in group]


def variant(stages: Stages, argument: str, tile: Any) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    """What to time, and what to check before: results against the trusted ones, lists against those of the table."""
    if argument == "tile":
        return partial(stages.forward, tile), lambda: stages.problem.errors({"out": stages.forward(tile)[0]})
    if argument.startswith("selection"):
        choose = partial(stages.topk, **{argument.removeprefix("selection_"): tile})
        return choose, lambda: {"ok": all(map(torch.equal, choose(), stages.problem.indices))}
    run = partial(stages.backward, **{argument: tile})
    return run, lambda: stages.problem.errors(run())


def warm_up(job: tuple[str, Any]) -> None:
    """Compile a variant into Triton's disk cache, on short problems of the same specialisations."""
    for levels in {levels for _, levels in SWEPT}:
        variant(Stages(Problem(8192, levels, trusted=False)), *job)[0]()
    torch.cuda.synchronize()


class Report:
    """Rows by section, printed as they come; the file is rewritten after each."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path, self.data = path, head

    def save(self) -> None:
        partial_path = self.path.with_suffix(".partial")
        partial_path.write_text(json.dumps(self.data, indent=1) + "\n")
        partial_path.replace(self.path)

    def add(
        self,
        section: str,
        name: str,
        function: Callable[[], Any],
        check: Callable[[], dict[str, Any]] | None = None,
        rep: int = 80,
        **details: Any,
    ) -> float:
        """Check, then time; the median in ms, or infinity where something failed."""
        row: dict[str, Any] = {"name": name, **details, "ok": True}
        try:
            row |= check() if check is not None else {}
            if row["ok"]:
                quantiles = [0.1, 0.5, 0.9]
                low, median, high = triton.testing.do_bench(function, warmup=20, rep=rep, quantiles=quantiles)
                row |= {"ms": median, "ms_p10": low, "ms_p90": high}
        except Exception as error:  # a tile that does not compile or fit is a result, not the end
            row |= {"ok": False, "exception": f"{type(error).__name__}: {str(error)[:200]}"}
            torch.cuda.empty_cache()
        self.data.setdefault(section, []).append(row)
        print(f"{section:16s} {name:56s} {row['ms']:9.3f} ms" if row["ok"] else f"{section} FAILED {row}", flush=True)
        self.save()
        return row.get("ms", float("inf"))


def time_sweep(report: Report) -> None:
    """Time all tiles on each problem; the tables take, per kernel, the one that is fastest on geometric average."""
    total: dict[str, dict[Any, float]] = {}
    for problem in (Problem(*shape) for shape in SWEPT):
        stages = Stages(problem)
        section = f"sweep-N{problem.length}-M{problem.levels}"
        for argument, tile in sweep():
            shape = " ".join(str(part) for part in asdict(tile).values() if part is not None)
            ms = report.add(section, f"{argument} {shape}", *variant(stages, argument, tile), rep=40, tile=asdict(tile))
            scores = total.setdefault(argument, {})
            scores[tile] = scores.get(tile, 1.0) * ms
        del stages, problem
        torch.cuda.empty_cache()
    for argument, scores in total.items():
        best = min(scores, key=lambda tile: scores[tile])
        if scores[best] < float("inf"):
            TABLES[argument][64] = best
        report.data.setdefault("tiles", {})[argument] = asdict(TABLES[argument][64])
    print(json.dumps(report.data["tiles"]), flush=True)
    report.save()


def time_stages(report: Report, length: int, levels: int) -> None:
    """Each stage on its own, and the kernels of a forward and backward by name."""
    section = f"N{length}-M{levels}"
    problem = Problem(length, levels)
    checked = problem.check()
    report.data.setdefault("checks", []).append({"problem": section, **checked})
    if not checked["ok"]:
        print(f"{section} FAILED {checked}", flush=True)
        report.save()
        return
    stages = Stages(problem)
    report.add(section, "stage pyramid of q, k, v", stages.pyramid)
    report.add(section, "stage top-k", stages.topk)
    report.add(section, "stage attention", stages.forward)
    report.add(section, "stage backward with transposed lists", stages.backward)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            problem.both()
        torch.cuda.synchronize()
    kernels = {event.key[:60]: event.device_time_total / 5000 for event in profile.key_averages()}
    top = dict(sorted(kernels.items(), key=lambda item: -item[1])[:14])
    report.data.setdefault("kernels_ms", {})[section] = top
    for name, ms in top.items():
        print(f"{section:16s}   {name:54s} {ms:9.3f} ms", flush=True)
    report.save()


def time_block_sparse(report: Report) -> None:
    for dim, block in ((128, 128), (64, 128), (64, 64)):
        base = testing.AttentionCase(heads=12, kv_heads=12, len_q=16_384, len_k=16_384, dim=dim, block_size=block)
        section = f"sparse-D{dim}-b{block}"
        inputs = testing.make_inputs(base, dtype=torch.bfloat16, device="cuda")
        leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        grad = torch.randn_like(inputs.query)
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(*leaves)
                run = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
                report.add(section, f"dense {name} backward", run)
        for kept in (0.5,):
            inputs = testing.make_inputs(replace(base, density=kept), dtype=torch.bfloat16, device="cuda")
            tensors, options = inputs.tensors(), {"block_size": block, "scale": dim**-0.5}
            out, lse = block_sparse_attention_triton(*tensors, **options, return_lse=True)
            single = [x.detach().float().requires_grad_() for x in tensors[:3]]
            exact_out = block_sparse_attention(*single, *tensors[3:], block_size=block, backend="torch")
            exact = torch.autograd.grad(exact_out, single, grad.float())
            for argument, group in (("query_tile", SPARSE_QUERY), ("key_tile", SPARSE_KEY)):
                for tile in (None, *group):
                    if tile is not None and max(tile.block_m, tile.block_n) > block:
                        continue
                    run = partial(
                        block_sparse_attention_triton_backward, grad, None, *tensors, **options,
                        out=out, lse=lse, **{argument: tile},
                    )  # fmt: skip

                    def check(run: Any = run, exact: Any = exact) -> dict[str, Any]:
                        with testing.poisoned_memory():
                            first, second = run(), run()
                        errors = dict(zip(("dq", "dk", "dv"), map(relative, first, exact), strict=True))
                        same = all(map(torch.equal, first, second))
                        return {"errors": errors, "ok": same and within(errors, {n: BOUNDS[n] for n in errors})}

                    shape = "table" if tile is None else " ".join(map(str, asdict(tile).values()))
                    report.add(section, f"{kept:.0%} backward {argument} {shape}", run, check, kept=kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gpu = torch.cuda.get_device_name()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / gpu.lower().replace(" ", "-"))
    parser.add_argument("--only", choices=("gate", "time"), help="run one half (time still checks what it times)")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile and check side by side")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    report = Report(arguments.out / "llsa.json", {
        "gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(), "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]), "timer": "triton.testing.do_bench, median, L2 flushed",
        "shape": {"B": 2, "H": 4, "D": 64, "block": BLOCK, "topk": TOPK, "dtype": "bf16"},
    })  # fmt: skip
    failed = 0
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        warming = pool.map_async(warm_up, sweep(), chunksize=1) if arguments.only != "gate" else None
        if arguments.only != "time":
            rows = pool.map(check_case, gate_cases(), chunksize=1)
            rows += pool.map(check_sparse_case, (0, 2, 4, 5), chunksize=1)
            report.data["gate"] = rows
            for row in rows:
                if not row["ok"]:
                    failed += 1
                    print("FAILED", row, flush=True)
            print(f"gate: {len(rows)} cases, {failed} failed, {time.perf_counter() - started:.0f} s", flush=True)
            report.save()
        if warming is not None:
            warming.wait()  # a tile that does not compile shows up again in its own row
    if arguments.only != "gate":
        parts: dict[str, Callable[[], None]] = {"sweep": partial(time_sweep, report)}
        parts |= {f"N{n}-M{m}": partial(time_stages, report, n, m) for n, m in SWEPT}
        parts["time_block_sparse"] = partial(time_block_sparse, report)
        for name, part in parts.items():
            try:
                part()
            except Exception as error:  # one part that runs out of memory must not cost the others
                failed += 1
                report.data.setdefault("exceptions", {})[name] = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"{name} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
                torch.cuda.empty_cache()
    report.data["seconds"] = time.perf_counter() - started
    report.save()
    print(f"{report.data['seconds']:.0f} s in all, written to {report.path}")
    return 0 if failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
