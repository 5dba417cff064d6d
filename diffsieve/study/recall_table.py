"""Recall of all variants summed up over captured calls: by layer, step and head, and against what was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ..eval import summarize
from ..kernels.ba_att import CANDIDATE_ORDERS
from .variants import VARIANTS

_HINDSIGHT = "hindsight"
Call = Mapping[str, Any]


def summarize_recall(lines: Sequence[Call]) -> dict[str, Any]:
    """Return rows by variant and sparsity, and the correlation of the paper's bound.

    Every head of every call counts once. `hindsight` is the best of the five orders for each head of each call.
    """
    calls = list({line["file"]: line for line in lines}.values())
    by_pair: dict[tuple[str, float], list[tuple[Call, Mapping[str, Any]]]] = {}
    skipped: dict[tuple[str, float], set[str]] = {}
    for call in calls:
        for row in [*call["rows"], *_hindsight(call)]:
            pair = row["variant"], row["sparsity"]
            if "skipped" in row:
                skipped.setdefault(pair, set()).add(row["skipped"])
            else:
                by_pair.setdefault(pair, []).append((call, row))
    names = [*VARIANTS]
    pairs = sorted({*by_pair, *skipped}, key=lambda pair: (pair[1], names.index(pair[0])))
    return {
        "calls": len(calls),
        "layers": _distinct(calls, "layer"),
        "steps": _distinct(calls, "step"),
        "prompts": _distinct(calls, "prompt"),
        "seeds": _distinct(calls, "seed"),
        "tokens": _distinct(calls, "tokens"),
        "rows": [_row(pair, by_pair.get(pair, []), sorted(skipped.get(pair, ()))) for pair in pairs],
        "bound": _bound(calls),
    }


def _row(
    pair: tuple[str, float], found: Sequence[tuple[Call, Mapping[str, Any]]], skipped: Sequence[str]
) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": pair[0], "sparsity": pair[1], "calls": len(found), "skipped": list(skipped)}
    if not found:
        return row
    heads = [(call, r["recall"]) for call, r in found]
    row |= {
        "recall": summarize([value for _, values in heads for value in values]).to_dict(),
        "by_layer": _grouped((call["layer"], values) for call, values in heads),
        "by_step": _grouped((str(call["step"]), values) for call, values in heads),
        "by_head": _by_head(heads),
        "error": summarize([value for _, r in found for value in r["error"]]).to_dict(),
        "density": fmean(r["density"] for _, r in found),
    }
    if "predicted" in found[0][1]:
        row["predicted"] = {name: _predicted([r for _, r in found], name) for name in ("error", "recall")}
    return row


def _predicted(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return what self-calibration said in the last dense step against what its choice got in later steps."""
    pairs = [(p, r) for row in rows for p, r in zip(row["predicted"][name], row[name], strict=True)]
    differences = [got - predicted for predicted, got in pairs]
    return {
        "predicted": fmean(predicted for predicted, _ in pairs),
        "got": fmean(got for _, got in pairs),
        "got_minus_predicted": summarize(differences).to_dict(),
        "absolute_difference": fmean(map(abs, differences)),
        "r": _pearson(pairs),
    }


def _hindsight(call: Call) -> list[dict[str, Any]]:
    by_sparsity: dict[float, list[Mapping[str, Any]]] = {}
    names = {f"order {name}" for name in CANDIDATE_ORDERS}
    for row in call["rows"]:
        if row["variant"] in names and "recall" in row:
            by_sparsity.setdefault(row["sparsity"], []).append(row)
    return [
        {
            "variant": _HINDSIGHT,
            "sparsity": sparsity,
            "recall": [max(values) for values in zip(*(row["recall"] for row in rows), strict=True)],
            "error": [min(values) for values in zip(*(row["error"] for row in rows), strict=True)],
            "density": rows[0]["density"],
        }
        for sparsity, rows in by_sparsity.items()
        if len(rows) == len(names)
    ]


def _bound(calls: Sequence[Call]) -> dict[str, Any]:
    """Return, by order, how the bound U goes with the true deviation."""
    found = {}
    for order in calls[0]["bound"] if calls else ():
        values = [(call, call["bound"][order]) for call in calls]
        r = [value for _, figures in values for value in figures["r"] if value is not None]
        found[order] = {
            "r": summarize(r).to_dict(),
            "share_of_heads_above_0.5": fmean(value > 0.5 for value in r) if r else None,
            "r_by_layer": _grouped((call["layer"], figures["r"]) for call, figures in values),
            "bound": fmean(value for _, figures in values for value in figures["bound"]),
            "deviation": fmean(value for _, figures in values for value in figures["deviation"]),
        }
    return found


def _grouped(pairs: Iterable[tuple[str, Sequence[float | None]]]) -> dict[str, float | None]:
    groups: dict[str, list[float]] = {}
    for name, values in pairs:
        groups.setdefault(name, []).extend(value for value in values if value is not None)
    return {name: fmean(values) if values else None for name, values in groups.items()}


def _by_head(heads: Sequence[tuple[Call, Sequence[float]]]) -> dict[str, list[float]]:
    groups: dict[str, list[Sequence[float]]] = {}
    for call, values in heads:
        groups.setdefault(call["layer"], []).append(values)
    return {layer: [fmean(head) for head in zip(*values, strict=True)] for layer, values in groups.items()}


def _distinct(calls: Sequence[Call], name: str) -> list[Any]:
    return sorted({call[name] for call in calls})


def _pearson(pairs: Sequence[tuple[float, float]]) -> float | None:
    means = [fmean(values) for values in zip(*pairs, strict=True)]
    centred = [(a - means[0], b - means[1]) for a, b in pairs]
    squares = [sum(pair[side] ** 2 for pair in centred) for side in (0, 1)]
    if min(squares) <= 0:
        return None
    return sum(a * b for a, b in centred) / (squares[0] * squares[1]) ** 0.5
