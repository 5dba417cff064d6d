"""The Python lines that do what the page did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..pipelines.defaults import EMBEDDED

# Arguments of a comparison in the order in which people read them.
_FIELDS = (
    "method",
    "preset",
    "sparsity",
    "topk",
    "warmup",
    "block_size",
    "min_tokens",
    "steps",
    "frames",
    "height",
    "width",
    "guidance_scale",
    "negative_prompt",
    "dtype",
)


def python_lines(report: Mapping[str, Any]) -> str:
    """Return a script that repeats a comparison.

    Args:
        report: what report.json holds.
    """
    settings = report["settings"]
    name = settings["model"]
    # The page shows no path of the server, so a folder has its name alone.
    where = "" if name in EMBEDDED or "/" in name else "  # the folder of the model, with its path"
    lines = [f"    model={name!r},{where}", f"    prompt={tuple(report['prompt'])!r},"]
    fields = [name for name in _FIELDS if not (name == "frames" and report.get("pictures"))]
    lines += [f"    {name}={settings[name]!r}," for name in fields if settings.get(name) is not None]
    # A folder of its own, so that the lines of one run can follow those of another.
    made = report["created"][:19].replace(":", "")
    lines += [f"    seed={tuple(report['seed'])!r},", f'    out=Path("outputs/compare-{made}"),']
    return "\n".join(
        [
            "from pathlib import Path",
            "",
            "from diffsieve.compare import CompareConfig, compare",
            "",
            "config = CompareConfig(",
            *lines,
            ")",
            "report = compare(config)",
            'print(report["summary"]["psnr"]["mean"], "dB")',
            "",
        ]
    )
