"""Results as Markdown tables, for the pages and for people who ran something."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .config import percent
from .plots import best_ms

Results = Mapping[str, Any]

# The method of ours that a table shows, by operation.
_OURS = {"ba-att": "default", "wan": "BA-Att"}


def markdown(results: Results) -> str:
    """The table of a result file, whatever its operation."""
    if results["operation"] == "llsa":
        return llsa_table(results)
    if results["operation"] in _OURS:
        return speed_table(results, _OURS[results["operation"]])
    methods = [row["method"] for row in results["rows"] if row["ok"] and row["sparsity"] is not None]
    tables = [f"{method}:\n\n{speed_table(results, method)}" for method in dict.fromkeys(methods)]
    return "\n\n".join(tables)


def source(results: Results) -> str:
    """How a result was made: its command, or what measures it now and where the figures are from."""
    if "origin" not in results:
        commands = {_without_values(leg["command"], "--out", "--max-seconds") for leg in results["legs"]}
        if len(commands) > 1:
            return f"`diffsieve bench {results['operation']}`, {len(commands)} commands, given in its JSON"
        return f"`{commands.pop()}`"
    commit = results["origin"]["commit"]
    return f"`diffsieve bench {results['operation']}`; figures of the script before it, in commit {commit}"


def speed_table(results: Results, method: str, *, over: str | None = None) -> str:
    """Time by problem: what speed-ups are over, then a method at each sparsity with its speed-up.

    Args:
        results: of an operation with sparsities.
        method: of the rows shown beside the dense ones.
        over: the dense method that speed-ups are over; by default that of the first column.

    Returns:
        A table; cells of what was not measured are empty.
    """
    rows = [row for row in results["rows"] if row["ok"]]
    ours = [row for row in rows if row["method"] == method]
    dense = list(dict.fromkeys(name for row in ours for name in row.get("speedup", {})))
    shown = sorted({row["sparsity"] for row in ours if row["sparsity"]})
    header = ["", *dense, *(f"{percent(share)} skipped" for share in shown)]
    lines = [_line(header), "|" + "---|" * len(header)]
    for problem in dict.fromkeys(row["problem"] for row in sorted(ours, key=lambda row: row["tokens"])):
        times = {row["method"]: best_ms(row) for row in rows if row["problem"] == problem and row["sparsity"] is None}
        sparse = {row["sparsity"]: row for row in ours if row["problem"] == problem}
        cells = [
            problem,
            *(_ms(times.get(name)) for name in dense),
            *(_speed(sparse.get(share), over) for share in shown),
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def rate_table(results: Results, tokens: int, *, share: float | None = None) -> str:
    """Time and rate of every kernel at one length; with `share`, of the dense ones and of those that skip that much."""
    lines = ["| kernel | time | rate |", "|---|---|---|"]
    for row in results["rows"]:
        if row["ok"] and row["tokens"] == tokens and (share is None or row["sparsity"] in (None, share)):
            lines.append(f"| {_kernel(row)} | {_ms(best_ms(row))} | {row['tflops']:.0f} TFLOP/s |")
    return "\n".join(lines)


def rates_by_length(results: Results) -> str:
    """Time in ms and rate in TFLOP/s of every kernel by length, dense ones first; "-" where there is no figure."""
    rows = [row for row in results["rows"] if row["ok"]]
    lengths = sorted({row["tokens"] for row in rows})
    lines = [_line(["kernel", *(f"{tokens:,} tokens" for tokens in lengths)]), "|" + "---|" * (1 + len(lengths))]
    cells: dict[str, dict[int, str]] = {}
    for row in sorted(rows, key=lambda row: row["sparsity"] is not None):
        cells.setdefault(_kernel(row), {})[row["tokens"]] = f"{_three(best_ms(row))} ms, {row['tflops']:.0f}"
    lines += [_line([name, *(found.get(tokens, "-") for tokens in lengths)]) for name, found in cells.items()]
    return "\n".join(lines)


def _kernel(row: Mapping[str, Any]) -> str:
    """The name of a kernel, ours as code, and the share that it skips."""
    name = row["method"] if row.get("peer") or row["sparsity"] is None else f"`{row['method']}`"
    return str(name) if row["sparsity"] is None else f"{name}, {percent(row['sparsity'])} skipped"


def _three(value: float) -> str:
    """Three digits or so: short calls differ in the third."""
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1}f}"


def llsa_table(results: Results) -> str:
    """Time of LLSA by tokens and levels, eager and as a CUDA graph, beside the dense kernels."""
    rows = [row for row in results["rows"] if row["ok"]]
    dense = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "LLSA"))
    names = [name.removeprefix("dense, ") for name in dense]
    graphs = any("graph_ms" in row for row in rows)
    header = ["tokens", "levels"]
    for direction in ("forward", "forward + backward"):
        header += [direction, *(["in a CUDA graph"] if graphs else []), *names]
    lines = [_line(header), "|" + "---|" * len(header)]
    for tokens, levels in dict.fromkeys((row["tokens"], row["levels"]) for row in rows):
        found = {
            (row["method"], row["direction"]): row
            for row in rows
            if row["tokens"] == tokens and row["levels"] == levels
        }
        cells = [f"{tokens:,}", str(levels)]
        for direction in ("forward", "forward and backward"):
            ours = found.get(("LLSA", direction))
            cells.append(_number(ours, "ms"))
            cells += [_number(ours, "graph_ms")] if graphs else []
            cells += [_number(found.get((name, direction)), "ms") for name in dense]
        lines.append(_line(cells))
    return "\n".join(lines)


def _number(row: Mapping[str, Any] | None, name: str) -> str:
    if row is None or row.get(name) is None:
        return ""
    return f"{row[name]:.2f}" if row[name] < 10 else f"{row[name]:.1f}"


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    digits = 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} ms"


def _speed(row: Mapping[str, Any] | None, over: str | None) -> str:
    if row is None:
        return ""
    ratios = row.get("speedup", {})
    ratio = next(iter(ratios.values()), None) if over is None else ratios.get(over)
    return _ms(best_ms(row)) + ("" if ratio is None else f", {ratio:.2f}x")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _without_values(command: str, *flags: str) -> str:
    for flag in flags:
        command = re.sub(rf" {flag}[ =]\S+", "", command)
    return command
