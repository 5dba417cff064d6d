"""Time of PSNR, SSIM, MS-SSIM and LPIPS on a long pair of clips, and the memory it takes.

    PYTHONPATH=. python benchmarks/eval_speed.py --out FOLDER [--frames 1000] [--height 720] [--width 1280]

Frames are made as they are asked for, uint8 on the CPU, so that the time holds the transfer to the device. A tenth of
the frames is measured first: the peak memory of both must be the same. LPIPS runs on its real weights when they are
there, else on a random backbone, which takes as long. Writes `eval_speed.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from diffsieve.compare.report import versions
from diffsieve.eval import MissingWeightsError, load_lpips
from diffsieve.eval import measure as measure_pair
from diffsieve.eval.clips import ClipReader
from diffsieve.eval.lpips import LoadedLpips
from diffsieve.eval.lpips_net import Lpips

KEPT = 8  # different frames, shown in turns


class Repeated(ClipReader):
    """A clip of any length out of a few frames."""

    count = 0

    def frames(self) -> Iterator[torch.Tensor]:
        assert isinstance(self.source, torch.Tensor)
        return (self.source[number % KEPT] for number in range(self.count))


def load(device: str) -> tuple[LoadedLpips, str]:
    try:
        return load_lpips("alex", device=device), "real"
    except MissingWeightsError:
        return LoadedLpips(Lpips("alex").to(device), "none", "none"), "random backbone"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    size = (KEPT, 3, options.height, options.width)
    pair = [torch.randint(0, 256, size, generator=generator, dtype=torch.uint8) for _ in range(2)]
    model, weights = load(options.device)
    runs: list[dict[str, Any]] = []
    # The first run warms up.
    for count in (KEPT, max(KEPT, options.frames // 10), options.frames):
        Repeated.count = count
        readers = [Repeated(name, "tensor", frames) for name, frames in zip(("a", "b"), pair, strict=True)]
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        results = measure_pair(*readers, lpips={"alex": model}, device=options.device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None
        runs.append({"frames": count, "seconds": round(seconds, 3), "peak_gib": peak and round(peak, 3)})
        print(runs[-1], {name: result.mean for name, result in results.items()}, flush=True)
    report = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "command": " ".join(["python", *sys.argv]),
        "versions": versions(),
        "height": options.height,
        "width": options.width,
        "metrics": list(results),
        "lpips_weights": weights,
        "runs": runs[1:],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "eval_speed.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
