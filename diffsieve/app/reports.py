"""What a report.json must hold to be listed as a run: files of a folder may be damaged, or of another version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..compare.methods import METHODS
from .limits import shown

_Check = Callable[[Any], bool]


def fault(report: Any) -> str | None:
    """Return what keeps a report from being listed, in words, or `None` where nothing does.

    Args:
        report: what a JSON file holds; may be of any type.
    """
    for path, expected, check in _needed(report):
        found, value = _at(report, path)
        if not found or not check(value):
            return f"{'.'.join(map(str, path))} must be {expected}, got {shown(value) if found else 'nothing'}"
    return None


def _needed(report: Any) -> list[tuple[tuple[str | int, ...], str, _Check]]:
    """Return what every list shows or sorts by: path, what is expected there, and whether a value is that."""
    needed: list[tuple[tuple[str | int, ...], str, _Check]] = [
        (("created",), "a text", _is_text),
        (("settings", "method"), f"one of {', '.join(METHODS)}", lambda value: _is_text(value) and value in METHODS),
        (("settings", "steps"), "a number", _is_number),
        (("clips", 0, "folder"), "a text", _is_text),
        (("clips", 0, "files"), "an object of texts", _is_texts),
        (("clips", 0, "prompt"), "a text", _is_text),
        (("clips", 0, "seed"), "a number", _is_number),
        (("clips", 0, "metrics", "psnr", "mean"), "a number or null", lambda value: value is None or _is_number(value)),
    ]
    if _at(report, ("settings", "method")) == (True, "llsa"):
        needed.append((("settings", "attention", "topk"), "a number or numbers", _is_topk))
    else:
        needed.append((("settings", "sparsity"), "a number", _is_number))
    return needed


def _at(report: Any, path: Sequence[str | int]) -> tuple[bool, Any]:
    """Return whether there is a value at a path, and the value."""
    for key in path:
        inside = key in report if isinstance(report, dict) else isinstance(report, list) and key == 0 and bool(report)
        if not inside:
            return False, None
        report = report[key]
    return True, report


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_topk(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, list) and all(map(_is_number, value)))
