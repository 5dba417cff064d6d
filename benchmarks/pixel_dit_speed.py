"""Throughput and memory of the pixel DiT on a CUDA GPU: training and sampling step, LLSA against full attention.

    PYTHONPATH=. python benchmarks/pixel_dit_speed.py --out benchmarks/results/h200 [--side 256] [--enough 0.5]

DiT-S (12 layers, 6 heads of 64), bf16, random pictures, blocks compiled. A training step is noise, forward, backward,
clipping and AdamW under autocast; a sampling step is one forward without gradient. Full attention runs once with
FlashAttention-2 and once with cuDNN. LLSA is compared with the torch backend first; what fails gets no figure. Writes
`pixel_dit_speed.json` after every row and keeps rows of earlier calls. A row that runs out of memory says so; one that
fails otherwise is left out, and the exit code is 1. `--enough` is the time after which a row stops repeating its step;
`--max-seconds` the time after which no row begins.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from diffsieve.bench.dense_kernel import check_kernel, dense_kernel
from diffsieve.compare.report import versions
from diffsieve.errors import DiffsieveError
from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention
from diffsieve.pipelines.pixel_dit import PixelDiTTransformer2DModel
from diffsieve.pipelines.training.checkpoint import write_json
from diffsieve.pipelines.training.pixel_dit.config import SHAPES, PixelStageConfig
from diffsieve.pipelines.training.pixel_dit.loss import flow_loss, sample_times

METHODS = {
    "llsa": None,
    "full, FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "full, cuDNN": SDPBackend.CUDNN_ATTENTION,
}
# (side, pictures in a training step, in a sampling step)
SIZES = [(128, 16, 32), (256, 4, 8), (512, 1, 2)]
LEVELS = {128: 2, 256: 2, 512: 3}  # of LLSA


def transformer(method: str, side: int) -> PixelDiTTransformer2DModel:
    shape = SHAPES["S"]
    torch.manual_seed(0)
    model = PixelDiTTransformer2DModel(
        sample_size=side,
        num_layers=int(shape["layers"]),
        num_attention_heads=int(shape["heads"]),
        attention_head_dim=int(shape["head_dim"]),
        mlp_ratio=shape["mlp_ratio"],
        num_classes=9,
        attention_method="llsa" if method == "llsa" else "full",
        levels=LEVELS[side],
    ).to("cuda")
    model.compile_repeated_blocks(dynamic=False)
    return model


def timed(step: Callable[[], Any], enough: float) -> dict[str, float]:
    """Median seconds of a step that has run before, with the peak memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    begun = time.monotonic()
    while not seconds or (len(seconds) < 20 and time.monotonic() - begun < enough):
        started = time.monotonic()
        step()
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    return {
        "seconds": median(seconds),
        "slowest": max(seconds),
        "repeats": len(seconds),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def training_step(model: PixelDiTTransformer2DModel, side: int, batch: int) -> Callable[[], None]:
    config = PixelStageConfig()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator("cuda").manual_seed(0)
    pixels = torch.rand(batch, 3, side, side, device="cuda", generator=generator) * 2 - 1
    labels = torch.zeros(batch, dtype=torch.int64, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            times = sample_times(batch, config, generator)
            loss = flow_loss(model, pixels, labels, times, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def sampling_step(model: PixelDiTTransformer2DModel, side: int, batch: int) -> Callable[[], None]:
    model.to(torch.bfloat16).eval()
    pixels = torch.randn(batch, 3, side, side, device="cuda", dtype=torch.bfloat16)
    timestep = torch.full((batch,), 500.0, device="cuda")
    labels = torch.zeros(batch, dtype=torch.int64, device="cuda")

    @torch.no_grad()
    def step() -> None:
        model(pixels, timestep, labels, return_dict=False)

    return step


def check_llsa() -> float:
    """Relative error of LLSA in bf16, output and gradients, against the torch backend in fp32, at 128 x 128."""
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(1, 6, 16_384, 64, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    results = []
    for dtype, backend in ((torch.float32, "torch"), (torch.bfloat16, "triton")):
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors[:3])
        lists = hierarchical_topk(tensors[0].float(), tensors[1].float(), levels=2, backend="torch")
        out = llsa_attention(q, k, v, levels=2, indices=lists, backend=backend)
        assert isinstance(out, torch.Tensor)
        results.append([out, *torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))])
    return max(float((b.float() - a).norm().detach() / a.norm().detach()) for a, b in zip(*results, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--side", type=int, choices=[side for side, _, _ in SIZES], help="one size; default all")
    parser.add_argument("--method", choices=list(METHODS), help="one of them; default all")
    parser.add_argument("--batch", type=int, help="pictures in a step, in place of the table's")
    # at 512 a step of full attention takes many seconds
    parser.add_argument("--enough", type=float, default=4.0)
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    target = arguments.out / "pixel_dit_speed.json"
    report: dict[str, Any] = json.loads(target.read_text()) if target.is_file() else {"rows": []}
    error = check_llsa()
    print(f"llsa: relative error {error:.1e}", flush=True)
    if not error < 1e-2:
        raise SystemExit("LLSA must agree with the torch backend; nothing is measured")
    report |= {
        "command": " ".join(["python", *sys.argv]),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "model": SHAPES["S"],
        "dtype": "bfloat16",
        "llsa_relative_error": error,
    }
    begun, failed = time.monotonic(), False
    for side, train_batch, sample_batch in SIZES:
        if arguments.side not in (None, side):
            continue
        for method in METHODS:
            if arguments.method not in (None, method):
                continue
            for what, standard in (("train", train_batch), ("sample", sample_batch)):
                batch = arguments.batch or standard
                key = {"side": side, "method": method, "step": what, "batch": batch}
                if any(key.items() <= row.items() for row in report["rows"]):
                    continue
                if time.monotonic() - begun > arguments.max_seconds:
                    print("time is over; call again for the rest")
                    raise SystemExit(1 if failed else 0)
                try:
                    row = key | run_row(method, what, side, batch, arguments.enough)
                except (RuntimeError, DiffsieveError) as error:  # such as no kernel of that kind for the size
                    print(f"{key} failed: {error}", flush=True)
                    failed = True
                    continue
                report["rows"].append(row)
                write_json(target, report)
                print(json.dumps(row), flush=True)
    if failed:
        raise SystemExit(1)


def run_row(method: str, what: str, side: int, batch: int, enough: float) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()  # a compiled block refers to itself: the model of the row before is still there
    torch.cuda.empty_cache()
    model = transformer(method, side)
    try:
        with dense_kernel(METHODS[method]):
            make = training_step if what == "train" else sampling_step
            step = make(model, side, batch)
            step()  # compiles and warms up
            if METHODS[method] is not None:
                check_kernel(step, METHODS[method])
            figures: dict[str, Any] = timed(step, enough)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    if method == "llsa":
        figures["levels"] = LEVELS[side]
    figures["images_per_s"] = batch / figures["seconds"]
    figures["tokens_per_s"] = figures["images_per_s"] * side**2
    return figures


if __name__ == "__main__":
    main()
