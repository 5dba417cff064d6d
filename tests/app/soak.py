"""Many runs one after the other on a server in a process of its own, and its memory on the way.

python -m tests.app.soak --runs 200 --every 20 --out benchmarks/results/cpu/app_soak.json
"""

import argparse
import ctypes
import gc
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from gradio_client import Client

from diffsieve.app.store import Bounds
from diffsieve.compare.files import write_json
from diffsieve.compare.report import environment
from tests.app.conftest import SMALL
from tests.app.serving import tiny_server

# Four runs fill it, so that every later one has an old one removed.
BYTES = 3_000_000


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def held_megabytes() -> float:
    """Memory without what only waits to be given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # what glibc's allocator keeps for later, some ten MB up and down, is not held by the server
        trim(0)
    return resident_megabytes()


def soak(folder: Path, runs: int, every: int) -> dict:
    """Return what the JSON holds, without the command: memory before the first run, after every so many, at the end."""
    with tiny_server(folder, bounds=Bounds(size=BYTES)) as running:
        client = Client(running.url, verbose=False, download_files=False)
        store, started, rows = running.handlers.store, time.monotonic(), []

        def look(done: int) -> None:
            resident = resident_megabytes()
            rows.append(
                {
                    "runs": done,
                    "seconds": round(time.monotonic() - started, 1),
                    "megabytes_resident": resident,
                    "megabytes_held": held_megabytes(),
                    "bytes_stored": sum(path.stat().st_size for path in store.root.rglob("*") if path.is_file()),
                    "runs_stored": len(store.runs()),
                    "runs_served": len(list((store.served / "runs").glob("*"))),
                }
            )

        look(0)
        for number in range(runs):
            report = client.predict(**vars(SMALL) | {"seed": number}, api_name="/compare")[3]["report"]
            assert report["seed"] == [number]
            if (number + 1) % every == 0 or number + 1 == runs:
                look(number + 1)
        client.close()
        place = environment(running.handlers.shelf.get("tiny").pipe)
    return {
        "measured": "the server's process after so many runs of a tiny WanPipeline, each with another seed; "
        "held: after a collection, and after the allocator gave free memory back",
        "environment": place | {"gradio": version("gradio")},
        "processor": platform.processor() or platform.machine(),
        "settings": vars(SMALL),
        "bytes_allowed": BYTES,
        "memory": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="file for the JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diffsieve-soak-") as folder:
        found = soak(Path(folder), options.runs, options.every)
    command = " ".join(["python", "-m", "tests.app.soak", *sys.argv[1:]])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, {"command": command} | found)


if __name__ == "__main__":
    main()
