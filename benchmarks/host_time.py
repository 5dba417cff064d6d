"""Microseconds that the host spends on a call of the kernels, without a GPU: what a short call takes eagerly.

    PYTHONPATH=. python benchmarks/host_time.py [--out FOLDER] [--only NAME ...] [--repeats 300] [--functions 0]

Tensors lie on the CPU and Triton has a driver that launches nothing, but binds and specialises arguments, looks its
kernels up and compiles them for sm_90 as ever. So everything is timed that Python does, PyTorch's dispatch and its
allocations included; the driver's own part, the encoding of tensor descriptors and the C part of a launch are not.
Small tensor operations run on the CPU and count with what they take there. Figures compare code on one machine.

Each case gives the median, the launches and the operations of PyTorch per call, and where the time goes: shares of a
profile (which itself slows short functions down most), scaled to the median. Writes `host_time.json` with --out.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from diffsieve.kernels.ba_att import ba_attention
from diffsieve.kernels.block_sparse import backends as block_sparse_backends
from diffsieve.kernels.block_sparse import block_sparse_attention, hopper_backend, triton_backend
from diffsieve.kernels.block_sparse import op as block_sparse_op
from diffsieve.kernels.llsa import backends as llsa_backends
from diffsieve.kernels.llsa import llsa_attention
from tests.kernels.driver_stand_in import replace_driver

LAUNCHES: Counter[str] = Counter()

# Part of a call -> where its functions are; the first part that fits.
PARTS = (
    ("triton", ("/triton/", "triton.", "<string>")),  # the last: its generated binders
    ("checks", ("/checks.py", "/backends.py", "(_validate)", "(_check_orders)")),
    ("dispatch", ("/custom_ops.py", "/torch/_ops.py", "/torch/_library/", "/torch/_dynamo/", "torch._ops", "apply")),
    ("autograd", ("/torch/autograd/", "run_backward")),
    ("ours", ("/diffsieve/kernels/",)),
    ("device", ("/torch/cuda/",)),
    ("tensors", ("torch",)),
)


class Launcher:
    """Takes the place of a launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *args: Any) -> None:
        LAUNCHES[self.name] += 1


def pretend(stack: ExitStack) -> None:
    """Let tensors on the CPU pass for those of a Hopper GPU."""
    replace_driver(Launcher)
    for module, name in (
        (block_sparse_backends, "triton_obstacle"),
        (block_sparse_backends, "_no_hopper"),
        (llsa_backends, "triton_obstacle"),
        (block_sparse_op, "_validate_lists"),  # reads the lists on a CPU only
    ):
        stack.enter_context(mock.patch.object(module, name, nothing))


def nothing(*_: Any) -> None:
    """No obstacle, and nothing to check."""


def cases() -> dict[str, Callable[[], Any]]:
    """Name -> call. Shapes are small: the host does the same for large ones."""
    made = torch.Generator().manual_seed(0)

    def tensors(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=made).bfloat16() for _ in range(3)]

    query, key, value = tensors(1, 12, 1024, 128)
    index = torch.arange(4, dtype=torch.int32).expand(1, 12, 8, 4).contiguous()
    options = {"block_size": 128, "scale": 0.1, "return_lse": False}
    block_sparse = (query, key, value, index, None)
    found: dict[str, Callable[[], Any]] = {
        "block-sparse triton, launch": lambda: triton_backend.block_sparse_attention_triton(*block_sparse, **options),
        "block-sparse triton": lambda: block_sparse_attention(*block_sparse, block_size=128, backend="triton"),
        "block-sparse hopper, launch": lambda: hopper_backend.block_sparse_attention_hopper(
            *block_sparse, **options, fixed_stabiliser=True
        ),
        "block-sparse hopper": lambda: block_sparse_attention(*block_sparse, block_size=128, backend="hopper"),
    }

    pixels = tensors(2, 4, 2048, 64)
    wanted = [x.clone().requires_grad_() for x in pixels]
    grad = torch.randn(pixels[0].shape, generator=made).bfloat16()

    def forward_backward() -> None:
        torch.autograd.grad(llsa_attention(*wanted, levels=2, backend="triton"), wanted, grad)

    found["llsa forward"] = lambda: llsa_attention(*pixels, levels=2, backend="triton")
    found["llsa forward and backward"] = forward_backward

    grid = (4, 16, 16)
    video = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(1, 12, 1024, 128)]
    preset = {"grid_thw": grid, "density": 0.5, "score": "residual", "compensate": "centroid"}
    table = torch.tensor([0, 1, 2, 3] * 3)
    static = torch.tensor([0, 1, 2] * 4)
    for backend in ("triton", "hopper"):
        for name, orders in (("raster", "raster"), ("hilbert", "hilbert"), ("static table", static), ("table", table)):
            found[f"ba_attention {backend}, {name}"] = lambda orders=orders, backend=backend: ba_attention(
                *video, orders=orders, backend=backend, **preset
            )
    return found


def part_of(function: tuple[str, int, str]) -> str:
    where = f"{function[0]}({function[2]})"
    return next((part for part, places in PARTS if any(place in where for place in places)), "other")


def profile(call: Callable[[], Any], repeats: int, functions: int) -> dict[str, float]:
    """Share of each part, in [0, 1]; prints the functions that take the most time."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(repeats):
        call()
    profiler.disable()
    stats = pstats.Stats(profiler)
    times: Counter[str] = Counter()
    for function, (_, _, own, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        times[part_of(function)] += own
    total = sum(times.values())
    if functions:
        ranked = sorted(stats.stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
        for function, (_, calls, own, _, _) in ranked[:functions]:
            where = f"{'/'.join(function[0].split('/')[-3:])}:{function[1]} {function[2]}"
            print(f"    {own / repeats * 1e6:7.1f} us {calls / repeats:6.1f} x  {part_of(function):9} {where}")
    return {part: own / total for part, own in times.items()}


def operations(call: Callable[[], Any]) -> dict[str, int]:
    """Operations of PyTorch's dispatcher in a call, those inside of others too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    return {event.key: event.count for event in profiler.key_averages() if "::" in event.key}


def measure(call: Callable[[], Any], repeats: int, functions: int) -> dict[str, Any]:
    for _ in range(20):
        call()
    LAUNCHES.clear()
    call()
    launches = dict(LAUNCHES)
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1000)
    median = statistics.median(times)
    shares = profile(call, repeats, functions)
    return {
        "median_us": round(median, 1),
        "p10_us": round(statistics.quantiles(times, n=10)[0], 1),
        "launches": launches,
        "operations": operations(call),
        "parts_us": {part: round(share * median, 1) for part, share in sorted(shares.items(), key=lambda x: -x[1])},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cases")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--functions", type=int, default=0, help="how many functions of each profile to print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/host_time.py", *sys.argv[1:]]),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "repeats": options.repeats,
        "cases": {},
    }
    with ExitStack() as stack:
        pretend(stack)
        for name, call in cases().items():
            if not any(part in name for part in options.only):
                continue
            found = measure(call, options.repeats, options.functions)
            report["cases"][name] = found
            launches, ops = sum(found["launches"].values()), sum(found["operations"].values())
            parts = ", ".join(f"{part} {us:.0f}" for part, us in found["parts_us"].items())
            print(f"{name}: {found['median_us']:.0f} us, {launches} launches, {ops} operations ({parts})", flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        part = options.out / "host_time.json.part"
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        part.replace(options.out / "host_time.json")


if __name__ == "__main__":
    main()
