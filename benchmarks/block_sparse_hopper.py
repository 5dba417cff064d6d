"""The `hopper` backend on a Hopper GPU: does it end, is it right, and which tile is fastest.

    PYTHONPATH=. python benchmarks/block_sparse_hopper.py --out FOLDER [--limit 150]

Three stages, each in a process of its own with a time limit in seconds, so that a kernel that never ends costs no
more: `gate` (small problems, awkward shapes, activations times 1 to 200, every tile of the sweep), `tune` (12 heads,
75,648 tokens, 50 % of the blocks kept: every tile, exact and with the fixed stabiliser, beside the `triton` backend and
dense cuDNN) and `sweep` (the best tiles of each shape at 100 to 10 %). A stage that fails ends the run. Writes
`block_sparse_hopper.json` after every row; a variant gets no figure unless its own full-size output passes. Times are
medians of `do_bench` in ms.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention
from diffsieve.kernels.block_sparse.hopper_backend import HopperTile, block_sparse_attention_hopper
from diffsieve.kernels.testing import AttentionCase, AttentionInputs

Job = tuple[AttentionCase, torch.dtype, HopperTile | None, bool]
LONG = 75_648  # 21 x 45 x 80 latent tokens, rounded up to whole blocks of 128
SHAPES = {
    f"D{dim}-b{block}": AttentionCase(
        heads=12, kv_heads=12, len_q=LONG, len_k=LONG, dim=dim, block_size=block, density=0.5
    )
    for dim, block in ((128, 128), (64, 128), (128, 64), (64, 64))
}


def tiles_of(case: AttentionCase) -> list[HopperTile]:
    """Tiles to try, those that fit into 227 KiB of shared memory."""
    if case.block_size == 64:
        found = [HopperTile(1, 64, stages) for stages in (2, 3, 4)] + [HopperTile(1, 64, 2, False)]
    else:
        shapes = [(2, 128, 2), (2, 128, 3), (2, 64, 3), (2, 64, 4), (1, 64, 2), (1, 64, 3)]
        found = [HopperTile(*shape) for shape in shapes] + [HopperTile(2, 128, 2, False)]
    size = {tile: 2 * case.dim * (64 * tile.consumers + 2 * tile.num_stages * tile.block_n) for tile in found}
    return [tile for tile in found if size[tile] <= 226 * 1024]


def run_hopper(
    inputs: AttentionInputs, block_size: int, tile: HopperTile | None = None, fixed: bool = False, lse: bool = False
) -> Any:
    out = block_sparse_attention_hopper(
        *inputs.tensors(), block_size=block_size, scale=inputs.query.shape[-1] ** -0.5, return_lse=lse, tile=tile,
        fixed_stabiliser=fixed,
    )  # fmt: skip
    return out if lse else out[0]


def gate(report: dict[str, Any], save: Any) -> None:
    base = AttentionCase(heads=3, kv_heads=3, dim=128, block_size=128, len_q=450, len_k=450)
    cases = []
    for dim in (128, 64):
        one = replace(base, dim=dim)
        cases += [
            replace(one, density=1.0), one, replace(one, variable=True), replace(one, block_size=64, variable=True),
            replace(one, len_q=1, len_k=1), replace(one, len_q=127, len_k=129, variable=True),
            replace(one, batch=2, heads=4, kv_heads=2, len_q=1000, len_k=700, layout="blhd", variable=True),
            replace(one, layout="fused_qkv"), replace(one, layout="padded", density=1.0),
            replace(one, block_size=256, len_q=700, len_k=900), replace(one, len_q=5000, len_k=5000, batch=2),
        ]  # fmt: skip
        cases += [replace(one, len_q=2000, len_k=2000, gain=gain) for gain in (4.0, 16.0, 200.0)]
    forms = (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)
    jobs: list[Job] = [(case, dtype, None, fixed) for case in cases for dtype, fixed in forms]
    jobs += [
        (replace(case, len_q=1100, len_k=1100, heads=3, kv_heads=3), torch.bfloat16, tile, fixed)
        for case in SHAPES.values() for tile in tiles_of(case) for fixed in (False, True)
    ]  # fmt: skip
    # One problem comes first and alone: whether the kernel ends at all. Then the compilers run side by side.
    print(check_small(*jobs[0]), flush=True)
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.starmap(warm_up, jobs, chunksize=1)
    for check in [partial(check_small, *job) for job in jobs] + [check_far]:
        row = check()
        report.setdefault("gate", []).append(row)
        if not row["ok"]:
            print("FAILED", row, flush=True)
        save()
    failed = sum(not row["ok"] for row in report["gate"])
    print(f"gate: {len(report['gate'])} cases, {failed} failed", flush=True)
    if failed:
        raise SystemExit(1)


def warm_up(case: AttentionCase, dtype: torch.dtype, tile: HopperTile | None, fixed: bool) -> None:
    """Compile into Triton's cache on disk; what fails here is shown, and counted, by the check."""
    try:
        inputs = testing.make_inputs(case, dtype=dtype, device="cuda")
        run_hopper(inputs, case.block_size, tile, fixed, lse=tile is None)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{case}: {type(error).__name__}", flush=True)


def check_small(case: AttentionCase, dtype: torch.dtype, tile: HopperTile | None, fixed: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"case": f"{case}-{dtype}", "tile": tile and asdict(tile), "fixed": fixed}
    try:
        inputs = testing.make_inputs(case, dtype=dtype, device="cuda")
        # Tiles are compiled without the log-sum-exp, as they are timed.
        with testing.poisoned_memory():
            first, again = (run_hopper(inputs, case.block_size, tile, fixed, lse=tile is None) for _ in range(2))
        exact, exact_lse = testing.exact_attention(inputs, block_size=case.block_size)
        bound = testing.error_bound(testing.masked_sdpa(inputs, block_size=case.block_size), exact)
        if case.gain == 200.0:
            bound = testing.one_key_bound(dtype)
        out = first[0] if tile is None else first
        row |= {"error": testing.error_ratio(out, exact), "bound": bound}
        row["same_again"] = torch.equal(out, again[0] if tile is None else again)
        row["ok"] = row["error"] <= bound and row["same_again"]
        if tile is None:
            options: dict[str, Any] = {"block_size": case.block_size, "backend": "reference", "return_lse": True}
            _, single = block_sparse_attention(*inputs.floats_to(torch.float32).tensors(), **options)
            row["lse_error"] = testing.lse_error(first[1], exact_lse)
            row["lse_bound"] = testing.lse_bound(single, exact_lse)
            row["ok"] = row["ok"] and row["lse_error"] <= row["lse_bound"]
    except Exception as error:
        row |= {"ok": False, "exception": f"{type(error).__name__}: {str(error)[:300]}"}
    return row


def check_far() -> dict[str, Any]:
    """Tensors of more than 2^31 elements, some rows of every head."""
    case = AttentionCase(heads=130, kv_heads=130, len_q=131_072, len_k=131_072, dim=128, block_size=128, density=1e-3)
    row: dict[str, Any] = {"case": f"{case}-{torch.bfloat16}"}
    try:
        inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
        row |= testing.sampled_errors(inputs, run_hopper(inputs, 128, lse=True)[0], 128, samples=130)
        row["ok"] = row["error"] <= row["bound"]
    except Exception as error:
        row |= {"ok": False, "exception": f"{type(error).__name__}: {str(error)[:300]}"}
    return row


def measure(name: str, inputs: AttentionInputs, block_size: int, function: Any, dense: bool = False) -> dict[str, Any]:
    """Check, then time one variant."""
    row: dict[str, Any] = {"name": name}
    pairs = inputs.query.shape[1] * inputs.query.shape[2] * inputs.key.shape[2]
    if not dense:
        pairs = inputs.block_index.numel() * block_size**2
        with testing.poisoned_memory():
            row |= testing.sampled_errors(inputs, function(), block_size)
    row["ok"] = dense or row["error"] <= row["bound"]
    if row["ok"]:
        low, median, high = triton.testing.do_bench(function, warmup=50, rep=250, quantiles=[0.1, 0.5, 0.9])
        row |= {"ms": median, "ms_p10": low, "ms_p90": high}
        row["tflops"] = 4 * pairs * inputs.query.shape[-1] / median * 1e-9
    print(f"{name:64s} {row['ms']:8.3f} ms {row['tflops']:6.1f} TFLOP/s" if row["ok"] else f"FAILED {row}", flush=True)
    return row


def tune(report: dict[str, Any], save: Any) -> None:
    for shape, case in SHAPES.items():
        inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
        rows = report.setdefault("tune", {}).setdefault(shape, [])
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            dense = partial(scaled_dot_product_attention, inputs.query, inputs.key, inputs.value)
            rows.append(measure(f"{shape} dense cuDNN", inputs, case.block_size, dense, dense=True))
        theirs = partial(block_sparse_attention, *inputs.tensors(), block_size=case.block_size, backend="triton")
        rows.append(measure(f"{shape} 50% triton", inputs, case.block_size, theirs))
        for fixed in (False, True):
            timed = []
            for tile in tiles_of(case):
                ours = partial(run_hopper, inputs, case.block_size, tile, fixed)
                form = "fixed" if fixed else "exact"
                kept = "registers" if tile.query_in_registers else "shared"
                name = f"{shape} 50% {form} c{tile.consumers} n{tile.block_n} s{tile.num_stages} Q in {kept}"
                row = measure(name, inputs, case.block_size, ours) | {"tile": asdict(tile), "fixed": fixed}
                timed.append(row)
                rows.append(row)
                save()
            right = [row for row in timed if row["ok"]]
            if right:
                best = min(right, key=lambda row: row["ms"])
                report.setdefault("best", []).append({"shape": shape, "fixed": fixed, "tile": best["tile"]})
            save()


def sweep(report: dict[str, Any], save: Any) -> None:
    for shape in SHAPES:
        rows = report.setdefault("sweep", {}).setdefault(shape, [])
        for kept in (1.0, 0.25, 0.1):
            case = replace(SHAPES[shape], density=kept)
            inputs = testing.make_inputs(case, dtype=torch.bfloat16, device="cuda")
            theirs = partial(block_sparse_attention, *inputs.tensors(), block_size=case.block_size, backend="triton")
            rows.append(measure(f"{shape} {kept:.0%} triton", inputs, case.block_size, theirs))
            for best in report.get("best", []):
                if best["shape"] == shape:
                    tile, fixed = HopperTile(**best["tile"]), best["fixed"]
                    ours = partial(run_hopper, inputs, case.block_size, tile, fixed)
                    name = f"{shape} {kept:.0%} hopper {'fixed' if fixed else 'exact'}, best tile"
                    rows.append(measure(name, inputs, case.block_size, ours))
            save()


STAGES = {"gate": gate, "tune": tune, "sweep": sweep}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=150, help="seconds that a stage may take")
    parser.add_argument("--stage", choices=STAGES, help="run this one, in this process")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "block_sparse_hopper.json"
    if arguments.stage is None:
        path.unlink(missing_ok=True)
        for stage in STAGES:
            command = [sys.executable, *sys.argv, "--stage", stage]
            process = subprocess.Popen(command, start_new_session=True)
            try:
                code = process.wait(arguments.limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
                print(f"{stage}: not done after {arguments.limit} s", flush=True)
                return 1
            if code != 0:
                return code
        return 0

    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": triton.__version__, "command": " ".join(["python", *sys.argv[:-2]]),
        "timer": "triton.testing.do_bench, median, L2 flushed",
    }  # fmt: skip

    def save() -> None:
        partial_path = path.with_suffix(".partial")
        partial_path.write_text(json.dumps(report, indent=1) + "\n")
        partial_path.replace(path)

    STAGES[arguments.stage](report, save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
