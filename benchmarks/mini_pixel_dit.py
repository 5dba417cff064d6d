"""Seconds until `diffsieve generate --model mini-pixel-dit` has drawn a picture on two cores of a CPU.

    python benchmarks/mini_pixel_dit.py --out FOLDER [--threads 2] [--repeats 1]

Runs the command in a process of its own with the settings that ship: 128 x 128 pixels (16,384 tokens), 20 steps, the
model's guidance. The wall time counts everything, from the start of Python to the written file; the CPU time is that
of user and system together, of all threads. The load of the machine stands beside them: others at work lengthen the
wall time. Threads that wait sleep (OMP_WAIT_POLICY=passive), or their spinning would count as CPU time.
Writes `mini_pixel_dit.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from diffsieve.compare.files import write_json

COMMAND = ["generate", "--model", "mini-pixel-dit", "--prompt", "Smileys & Emotion", "--seed", "0", "--device", "cpu"]
SETTINGS = ("width", "height", "steps", "guidance_scale", "dtype")
GOAL_SECONDS = 90.0


def measure(threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        load, before, begun = os.getloadavg(), resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "diffsieve", *COMMAND, "--out", str(out)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"},
            check=True,
        )
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 2),
        "load_before": [round(value, 2) for value in load],
        "load_after": [round(value, 2) for value in os.getloadavg()],
        "seconds_picture": report["clips"][0]["seconds"]["total"],
        "seconds_steps": report["clips"][0]["seconds"]["steps"],
        "settings": {name: report["settings"][name] for name in SETTINGS},
        "environment": report["environment"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for mini_pixel_dit.json")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of the command")
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    runs = [measure(given.threads) for _ in range(given.repeats)]
    result = {
        "command": f"python benchmarks/mini_pixel_dit.py --threads {given.threads} --repeats {given.repeats}",
        "measured": "OMP_NUM_THREADS={} OMP_WAIT_POLICY=passive diffsieve {}".format(
            given.threads, " ".join(f'"{part}"' if " " in part else part for part in COMMAND)
        ),
        "goal_seconds": GOAL_SECONDS,
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "environment": runs[0]["environment"],
        "runs": [{name: value for name, value in run.items() if name != "environment"} for run in runs],
    }
    given.out.mkdir(parents=True, exist_ok=True)
    write_json(given.out / "mini_pixel_dit.json", result)
    for run in runs:
        print(f"{run['seconds']} s, {run['cpu_seconds']} s of CPU, load {run['load_before'][0]}")


if __name__ == "__main__":
    main()
