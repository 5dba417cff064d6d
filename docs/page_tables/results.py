"""Where committed results lie, and how one is read."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> Any:
    """Return what a committed JSON file holds; `name` is below `benchmarks/results`."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))
