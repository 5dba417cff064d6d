"""Tiles of the Triton kernel of block-sparse attention on a CUDA GPU: correctness of all shapes, then a sweep.

    PYTHONPATH=. python benchmarks/block_sparse_tiles.py [--out FOLDER] [--only gate|time] [--workers 8]

Writes `block_sparse.json` (default folder `benchmarks/results/<gpu>`) after every section. Each timed tile is first
compared, on its own full-size inputs with output memory filled with NaN, with fp64 attention of sampled query blocks;
one that fails gets no figure. Times are medians of `triton.testing.do_bench` in ms; rates count
`4 * kept (query, key) pairs * D` floating-point operations. What a user gets, beside dense attention and the kernels of
others, is `diffsieve bench block-sparse`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from diffsieve.bench.operations.block_sparse import kept_pairs
from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention
from diffsieve.kernels.block_sparse.reference import block_sparse_attention_reference
from diffsieve.kernels.block_sparse.tiles import TileConfig
from diffsieve.kernels.testing import AttentionCase, AttentionInputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LONG = 75_648  # 21 x 45 x 80 latent tokens, rounded up to whole blocks of 128
RAGGED = 75_600  # 21 x 45 x 80


# ---- correctness on small problems -----------------------------------------------------------------------------------


def gate_cases() -> list[tuple[str, AttentionCase]]:
    """(dtype, case): the shape list of the tests, on a GPU in the dtypes that matter there."""
    cases = []
    for dtype in ("bf16", "fp16"):
        for dim in (64, 128):
            base = AttentionCase(heads=3, kv_heads=3, dim=dim, block_size=128, len_q=450, len_k=450)
            cases += [
                (dtype, replace(base, density=1.0)),
                (dtype, base),
                (dtype, replace(base, variable=True)),
                (dtype, replace(base, len_q=1, len_k=1, heads=1, kv_heads=1)),
                (dtype, replace(base, len_q=127, len_k=129, variable=True)),
                (dtype, replace(base, batch=2, heads=4, kv_heads=2, len_q=1000, len_k=700, layout="blhd")),
                (dtype, replace(base, layout="fused_qkv", variable=True)),
                (dtype, replace(base, layout="padded", density=1.0)),
                (dtype, replace(base, gain=4.0)),
                (dtype, replace(base, gain=16.0)),
                (dtype, replace(base, len_q=2048, len_k=2048, batch=2)),
            ]
        small = AttentionCase(heads=2, kv_heads=1, dim=128, block_size=64, len_q=450, len_k=333, variable=True)
        cases += [(dtype, replace(small, dim=dim)) for dim in (32, 64, 96, 128, 256)]
        cases += [(dtype, replace(small, block_size=size)) for size in (16, 32, 128)]
    cases.append(("fp32", AttentionCase(heads=2, len_q=450, len_k=333, dim=64, variable=True)))
    cases.append(("fp32", AttentionCase(heads=2, len_q=450, len_k=333, dim=128, block_size=128, variable=True)))
    return cases


def check_case(job: tuple[str, AttentionCase]) -> dict[str, Any]:
    """`errors_of_case`, with an exception as a failure of that case alone."""
    try:
        return errors_of_case(*job)
    except Exception as error:
        return {"case": f"{job[1]}-{job[0]}", "ok": False, "exception": f"{type(error).__name__}: {str(error)[:300]}"}


def errors_of_case(dtype: str, case: AttentionCase) -> dict[str, Any]:
    """Errors of the Triton kernel (descriptors where possible, and pointers) and of the torch backend on one case."""
    from diffsieve.kernels.block_sparse.triton_backend import block_sparse_attention_triton

    inputs = testing.make_inputs(case, dtype=DTYPES[dtype], device="cuda")
    exact, exact_lse = testing.exact_attention(inputs, block_size=case.block_size)
    bound = testing.error_bound(testing.masked_sdpa(inputs, block_size=case.block_size), exact)
    single = inputs.floats_to(torch.float32)
    _, single_lse = block_sparse_attention_reference(
        *single.tensors(), block_size=case.block_size, scale=case.dim**-0.5
    )
    lse_bound = testing.lse_bound(single_lse, exact_lse)
    options: dict[str, Any] = {"block_size": case.block_size, "scale": case.dim**-0.5, "return_lse": True}
    runs = {
        "triton": partial(block_sparse_attention_triton, *inputs.tensors(), **options),
        "triton pointers": partial(block_sparse_attention_triton, *inputs.tensors(), use_descriptors=False, **options),
        "torch": partial(block_sparse_attention, *inputs.tensors(), backend="torch", **options),
        "torch SDPA": partial(
            block_sparse_attention, *inputs.tensors(), backend="torch", **{**options, "return_lse": False}
        ),
    }
    errors, lse_errors, ok = {}, {}, True
    for name, run in runs.items():
        with testing.poisoned_memory():
            first, second = run(), run()
        out, lse = first if isinstance(first, tuple) else (first, None)
        again = second[0] if isinstance(second, tuple) else second
        errors[name] = testing.error_ratio(out, exact)
        ok &= errors[name] <= bound and torch.equal(out, again)
        if lse is not None:
            lse_errors[name] = testing.lse_error(lse, exact_lse)
            ok &= lse_errors[name] <= lse_bound
    return {
        "case": f"{case}-{dtype}", "ok": ok, "bound": bound, "errors": errors,
        "lse_bound": lse_bound, "lse_errors": lse_errors,
    }  # fmt: skip


def check_gradients() -> dict[str, Any]:
    """Gradients through the op against those of the fp64 reference, bf16, through output and log-sum-exp."""
    case = AttentionCase(batch=2, heads=4, kv_heads=2, len_q=450, len_k=333, dim=64, variable=True)
    inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        lists = (inputs.block_index, inputs.block_count)
        if dtype == torch.bfloat16:
            out, lse = block_sparse_attention(*leaves, *lists, block_size=64, backend="triton", return_lse=True)
        else:
            out, lse = block_sparse_attention_reference(*leaves, *lists, block_size=64, scale=64**-0.5)
        (out.double().square().sum() + lse.double()[lse.isfinite()].sum()).backward()
        results.append([x.grad for x in leaves])
    exact, _, ours = results
    errors = {name: testing.error_ratio(o, e) for name, o, e in zip("qkv", ours, exact, strict=True)}
    # The output enters its own gradient in bf16 (eps / 4 relative, doubled by the square), each gradient is rounded.
    bound = 4 * torch.finfo(torch.bfloat16).eps / 4
    return {"ok": all(e <= bound for e in errors.values()), "bound": bound, "errors": errors}


def warm_up(job: tuple[TileConfig, bool, AttentionCase]) -> None:
    """Compile a variant of the sweep into Triton's disk cache, on a short problem of the same specialisation."""
    tile, descriptors, case = job
    short = replace(case, len_q=1024, len_k=1024, heads=3, kv_heads=3)
    inputs = testing.make_inputs(short, dtype=torch.bfloat16, device="cuda")
    run_triton(inputs, case.block_size, tile, descriptors)
    torch.cuda.synchronize()


# ---- timing ----------------------------------------------------------------------------------------------------------


def sweep_tiles() -> dict[str, tuple[AttentionCase, list[tuple[TileConfig, bool]]]]:
    """Per shape: the problem, and the (tile, use descriptors) pairs to time at 50 % kept."""
    base = AttentionCase(heads=12, kv_heads=12, len_q=LONG, len_k=LONG, dim=128, block_size=128)
    wide = [
        TileConfig(128, 64, 4, 2), TileConfig(128, 64, 4, 3), TileConfig(128, 64, 4, 5), TileConfig(128, 64, 8, 3),
        TileConfig(128, 32, 4, 3), TileConfig(128, 128, 8, 2), TileConfig(128, 128, 8, 3), TileConfig(64, 64, 4, 3),
    ]  # fmt: skip
    narrow = [
        TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 3), TileConfig(64, 64, 4, 5), TileConfig(64, 32, 4, 3),
    ]  # fmt: skip
    slim = [
        TileConfig(128, 64, 4, 2), TileConfig(128, 64, 4, 3), TileConfig(128, 64, 4, 5), TileConfig(128, 128, 4, 3),
        TileConfig(128, 128, 8, 3), TileConfig(128, 64, 8, 3),
    ]  # fmt: skip
    return {
        "D128-b128": (base, [(t, True) for t in wide] + [(wide[0], False), (wide[3], False)]),
        "D128-b64": (replace(base, block_size=64), [(t, True) for t in narrow] + [(narrow[1], False)]),
        "D64-b128": (replace(base, dim=64), [(t, True) for t in slim] + [(slim[1], False)]),
        "D64-b64": (replace(base, dim=64, block_size=64), [(t, True) for t in narrow]),
    }


def run_triton(
    inputs: AttentionInputs,
    block_size: int,
    tile: TileConfig | None = None,
    descriptors: bool | None = None,
    lse: bool = False,
) -> torch.Tensor:
    from diffsieve.kernels.block_sparse.triton_backend import block_sparse_attention_triton

    return block_sparse_attention_triton(
        *inputs.tensors(), block_size=block_size, scale=inputs.query.shape[-1] ** -0.5, return_lse=lse,
        tile=tile, use_descriptors=descriptors,
    )[0]  # fmt: skip


class Timings:
    """Collects rows, prints each, and rewrites the JSON file after each."""

    def __init__(self, path: Path, report: dict[str, Any]) -> None:
        self.path, self.report = path, report

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.report, indent=1) + "\n")
        partial.replace(self.path)

    def add(
        self, section: str, name: str, inputs: AttentionInputs, block_size: int, function: Any, **details: Any
    ) -> float:
        """Check, then time one variant; returns its median in ms, or infinity where it failed."""
        row: dict[str, Any] = {"name": name, **details}
        try:
            with testing.poisoned_memory():
                out = function()
            row |= testing.sampled_errors(inputs, out, block_size)
            del out
            row["ok"] = row["error"] <= row["bound"]
        except Exception as error:  # a tile that does not compile or fit is a result of the sweep, not its end
            row |= {"ok": False, "exception": f"{type(error).__name__}: {str(error)[:200]}"}
        if row["ok"]:
            row |= self._time(function, kept_pairs(inputs, block_size), inputs.query.shape[-1])
        self.report.setdefault(section, []).append(row)
        text = f"{row['ms']:9.3f} ms {row['tflops']:6.1f} TFLOP/s" if row["ok"] else f"FAILED {row}"
        print(f"{section:12s} {name:44s} {text}", flush=True)
        self.save()
        return row.get("ms", float("inf"))

    @staticmethod
    def _time(function: Any, pairs: int, dim: int) -> dict[str, float]:
        low, median, high = triton.testing.do_bench(function, warmup=50, rep=250, quantiles=[0.1, 0.5, 0.9])
        return {"ms": median, "ms_p10": low, "ms_p90": high, "tflops": 4 * pairs * dim / median * 1e-9}


def with_density(inputs: AttentionInputs, case: AttentionCase, variable: bool = False) -> AttentionInputs:
    """The same tensors with new lists for the density of `case`."""
    generator = torch.Generator("cuda").manual_seed(testing.SEED)
    blocks = -(-case.len_q // case.block_size), -(-case.len_k // case.block_size)
    index, count = testing.random_blocks(
        case.batch, case.heads, *blocks, density=case.density, variable=variable, generator=generator
    )
    return replace(inputs, block_index=index, block_count=count)


def time_all(timings: Timings) -> None:
    for section, (case, variants) in sweep_tiles().items():
        inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
        best, best_ms = variants[0], float("inf")
        for tile, descriptors in variants:
            how = "descriptors" if descriptors else "pointers"
            name = f"50% BM{tile.block_m} BN{tile.block_n} w{tile.num_warps} s{tile.num_stages} {how}"
            ms = timings.add(
                section, name, inputs, case.block_size,
                partial(run_triton, inputs, case.block_size, tile, descriptors),
                kept=0.5, tile=asdict(tile), descriptors=descriptors,
            )  # fmt: skip
            if ms < best_ms:
                best, best_ms = (tile, descriptors), ms
        timings.report.setdefault("best", {})[section] = {**asdict(best[0]), "descriptors": best[1], "ms": best_ms}
        if section == "D128-b128":
            time_variants(timings, case, inputs)
    time_host(timings)


def time_variants(timings: Timings, case: AttentionCase, inputs: AttentionInputs) -> None:
    """What counts, the log-sum-exp, a short last block, strides and fp16 cost, at 50 % kept."""
    size = case.block_size
    counted = with_density(inputs, replace(case, density=1.0), variable=True)
    timings.add("variants", "counts 0..100%", counted, size, partial(run_triton, counted, size))
    timings.add("variants", "log-sum-exp", inputs, size, partial(run_triton, inputs, size, lse=True))
    half = inputs.floats_to(torch.float16)
    timings.add("variants", "fp16", half, size, partial(run_triton, half, size))
    through_op = partial(block_sparse_attention, *inputs.tensors(), block_size=size)
    timings.add("variants", "through the op", inputs, size, through_op)
    for layout in ("contiguous", "blhd", "fused_qkv"):
        ragged = replace(case, len_q=RAGGED, len_k=RAGGED, layout=layout)
        part = testing.make_inputs(ragged, dtype=torch.bfloat16, device="cuda")
        timings.add("variants", f"L{RAGGED} {layout}", part, size, partial(run_triton, part, size))


def time_host(timings: Timings) -> None:
    """Host time of one call in us, when the GPU has nothing to do: what a short sequence pays at least."""
    inputs = testing.make_inputs(AttentionCase(dim=128, block_size=128), dtype=torch.bfloat16, device="cuda")
    calls = {
        "kernel": partial(run_triton, inputs, 128),
        "op": partial(block_sparse_attention, *inputs.tensors(), block_size=128),
        "dense SDPA": partial(torch.nn.functional.scaled_dot_product_attention, *inputs.tensors()[:3]),
    }
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        microseconds = (time.perf_counter() - start) / 200 * 1e6
        torch.cuda.synchronize()
        timings.report.setdefault("host_us", {})[name] = microseconds
        print(f"host         {name:44s} {microseconds:9.1f} us", flush=True)
    timings.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gpu = torch.cuda.get_device_name()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / gpu.lower().replace(" ", "-"))
    parser.add_argument("--only", choices=("gate", "time"), help="run one half (time still checks each variant)")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile and check side by side")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    timings = Timings(arguments.out / "block_sparse.json", {
        "gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(), "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]), "timer": "triton.testing.do_bench, median, L2 flushed",
    })  # fmt: skip
    report = timings.report
    gate_ok = True
    variants = [(tile, d, case) for case, tiles in sweep_tiles().values() for tile, d in tiles]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        warming = pool.map_async(warm_up, variants, chunksize=1) if arguments.only != "gate" else None
        if arguments.only != "time":
            report["gate"] = pool.map(check_case, gate_cases(), chunksize=1)
            report["gradients"] = check_gradients()
            for row in [*report["gate"], {"case": "gradients", **report["gradients"]}]:
                if not row["ok"]:
                    print("FAILED", row, flush=True)
            failed = sum(not row["ok"] for row in report["gate"]) + (not report["gradients"]["ok"])
            gate_ok = failed == 0
            print(f"gate: {len(report['gate']) + 1} cases, {failed} failed", flush=True)
            timings.save()
        if warming is not None:
            warming.wait()  # a tile that does not compile shows up again in its own row
    report["seconds_gate"] = time.perf_counter() - started
    if arguments.only != "gate":
        time_all(timings)
    report["seconds"] = time.perf_counter() - started
    timings.save()
    print(f"{report['seconds']:.0f} s in all, written to {timings.path}")
    return 0 if gate_ok else 1


if __name__ == "__main__":
    sys.exit(main())
