"""Fidelity of sparse attention to dense attention on mini-wan: presets, single orders and plain mean pooling.

Every variant starts from the noise of the dense clip and keeps the same share of blocks after the same warm-up. The
first variant is dense attention with another kernel: the noise floor that no method can beat.

    python benchmarks/mini_wan_fidelity.py --prompts 24 --sparsity 0.5 0.75
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from diffsieve.compare import CompareConfig
from diffsieve.compare.clip import generate_clip
from diffsieve.compare.floor import other_kernel
from diffsieve.eval import psnr, ssim
from diffsieve.kernels.ba_att import CANDIDATE_ORDERS
from diffsieve.pipelines.defaults import generation_defaults
from diffsieve.pipelines.loading import load_pipeline
from diffsieve.pipelines.training.captions import COLOURS, MOTIONS, caption_of
from diffsieve.pipelines.training.specs import held_out_table
from diffsieve.pipelines.training.sprites import load_subjects
from diffsieve.processors import BAAttConfig, sparse_attention, sparsity_summary


def held_out_prompts(count: int) -> list[str]:
    """Captions of `count` triples of subject, motion and colour that training never saw, spread over all of them."""
    names = tuple(load_subjects())
    triples = held_out_table(names).nonzero().tolist()
    picked = [triples[(2 * i + 1) * len(triples) // (2 * count)] for i in range(count)]
    return [caption_of(names[s], MOTIONS[m], COLOURS[c]) for s, m, c in picked]


def variants(sparsity: float, warmup: float, block_size: int, quick: bool) -> dict[str, BAAttConfig]:
    """The configurations compared at one sparsity, by name."""
    common: dict[str, Any] = {
        "sparsity": sparsity,
        "warmup_steps": warmup,
        "min_tokens": 0,
        "block_size": block_size,
    }
    mass: dict[str, Any] = {"score": "moments", "compensate": "none"}
    named = {
        "default": BAAttConfig(**common),
        "paper": BAAttConfig(preset="paper", **common),
        "mean pooling, raster": BAAttConfig(order="raster", cov_layers="none", log_count=False, **mass, **common),
        "default, score moments": BAAttConfig(score="moments", **common),
        "default, no compensation, score moments": BAAttConfig(**mass, **common),
    }
    if not quick:
        for order in CANDIDATE_ORDERS:
            named[f"order {order}"] = BAAttConfig(order=order, **common)
    return named


def mean_of(values: list[float]) -> dict[str, float]:
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else 0.0, "n": len(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="mini-wan")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5])
    parser.add_argument("--warmup", type=float, default=0.2)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--size", type=int, nargs=3, metavar=("FRAMES", "HEIGHT", "WIDTH"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="leave out the single orders")
    parser.add_argument("--part", default="1/1", help="I/N: every Nth variant only, from the Ith")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    part, parts = (int(number) for number in arguments.part.split("/"))
    started = time.perf_counter()
    pipe = load_pipeline(arguments.model)
    device = pipe._execution_device
    frames, height, width = arguments.size or (None, None, None)
    config = CompareConfig(
        model=arguments.model, steps=arguments.steps, frames=frames, height=height, width=width
    ).filled(generation_defaults(pipe))
    prompts = held_out_prompts(arguments.prompts)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    report: dict[str, Any] = {
        "gpu": gpu,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "settings": {
            "steps": config.steps, "frames": config.frames, "height": config.height, "width": config.width,
            "guidance_scale": config.guidance_scale, "dtype": str(pipe.transformer.dtype), "seed": arguments.seed,
            "warmup": arguments.warmup, "block_size": arguments.block_size,
        },
        "prompts": prompts,
        "rows": [],
    }  # fmt: skip

    def make(prompt: str) -> torch.Tensor:
        return generate_clip(pipe, config, prompt=prompt, seed=arguments.seed).frames

    def measure(name: str, sparsity: float | None, settings: BAAttConfig | None) -> None:
        scores: dict[str, list[float]] = {"psnr": [], "ssim": [], "density": [], "density_sparse_steps": []}
        backend = None
        for prompt, dense in zip(prompts, references, strict=True):
            with sparse_attention(pipe, settings) if settings is not None else nullcontext():
                clip = make(prompt)
                if settings is not None:
                    summary = sparsity_summary(pipe)
                    backend = summary.backend
                    scores["density"].append(summary.density_overall or 0.0)
                    scores["density_sparse_steps"].append(summary.density_sparse_steps or 0.0)
            scores["psnr"].append(psnr(dense, clip).mean)
            scores["ssim"].append(ssim(dense, clip).mean)
        row = {"variant": name, "sparsity": sparsity, "kernel": backend}
        row["config"] = None if settings is None else settings.to_dict()
        row |= {key: mean_of(values) for key, values in scores.items() if values}
        row["psnr_by_prompt"] = scores["psnr"]
        report["rows"].append(row)
        print(
            f"{name:42s} sparsity {sparsity}  PSNR {row['psnr']['mean']:6.2f} dB  SSIM {row['ssim']['mean']:.4f}  "
            f"density {row.get('density', {}).get('mean', 1.0):.3f}  ({time.perf_counter() - started:.0f} s)",
            flush=True,
        )
        report["seconds"] = time.perf_counter() - started
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    references = [make(prompt) for prompt in prompts]
    print(f"dense clips done ({time.perf_counter() - started:.0f} s)", flush=True)
    if part == 1:
        with other_kernel(pipe):
            measure("dense, another kernel (noise floor)", None, None)
    runs = [
        (name, sparsity, settings)
        for sparsity in arguments.sparsity
        for name, settings in variants(sparsity, arguments.warmup, arguments.block_size, arguments.quick).items()
    ]
    for run in runs[part - 1 :: parts]:
        measure(*run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
