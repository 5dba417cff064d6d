"""Many runs one after the other on a server in a process of its own: python -m tests.app.soak FOLDER RUNS SETTLED."""

import ctypes
import gc
import json
import os
import sys
from pathlib import Path

from gradio_client import Client

from diffsieve.app.store import Bounds
from tests.app.conftest import SMALL
from tests.app.serving import tiny_server


def resident_megabytes() -> float:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # what glibc's allocator keeps for later, some ten MB up and down, is not held by the server
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(folder: Path, runs: int, settled: int) -> dict[str, float]:
    """Return the memory in use after `settled` runs and after all, in MB, and what is stored then."""
    with tiny_server(folder, bounds=Bounds(size=3_000_000)) as running:
        client = Client(running.url, verbose=False, download_files=False)
        before = 0.0
        for number in range(runs):
            report = client.predict(**vars(SMALL) | {"seed": number}, api_name="/compare")[3]["report"]
            assert report["seed"] == [number]
            if number == settled:
                before = resident_megabytes()
        after = resident_megabytes()
        store = running.handlers.store
        found = {
            "before": before,
            "after": after,
            "bytes": sum(path.stat().st_size for path in store.root.rglob("*") if path.is_file()),
            "served": len(list((store.served / "runs").iterdir())),
            "runs": len(store.runs()),
        }
        client.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(soak(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))) + "\n")
