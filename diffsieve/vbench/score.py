"""`diffsieve vbench score`: VBench on the generated videos, in its own environment, with failures that show."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compare.files import write_json
from ..compare.report import now
from ..errors import DiffsieveError, UserInputError
from ..eval import summarize, temporal_flickering
from .generate import RUNS, clear_parts, finished_videos, read_generated
from .suite import DIMENSIONS, SCORED_VIDEOS, Suite, ask_python, video_name

SCORE_SCHEMA = "diffsieve.vbench.score/1"
SCORES = "scores"
FLICKERING = "temporal_flickering"
# Color is scored on the videos in which the object was found; VBench lists those alone.
_PARTIAL = frozenset({"color"})
_DRIVER = Path(__file__).parent / "driver.py"
_VERSION = "from importlib.metadata import version; print(version('vbench'))"


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """What to score.

    Args:
        folder: of `diffsieve vbench generate`.
        python: interpreter of an environment with vbench.
        dimensions: of VBench; empty: those that the videos were made for.
        device: for VBench, "cuda" or "cpu".
        local: whether VBench takes its networks from `$VBENCH_CACHE_DIR` alone.
        again: score anew what has a score.
    """

    folder: Path
    python: str = sys.executable
    dimensions: tuple[str, ...] = ()
    device: str = "cuda"
    local: bool = False
    again: bool = False


def score_videos(config: ScoreConfig, *, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Score every run and dimension in a process of its own; `scores/<run>/<dimension>.json` keeps what succeeded.

    Args:
        config: see `ScoreConfig`.
        progress: told a line before each dimension.

    Returns:
        `{"folder", "vbench", "scores": {run: {dimension: value}}, "failures": [text, ...]}`. One failed dimension does
        not stop the others.

    Raises:
        UserInputError: no such folder, videos are missing, a dimension without prompts in it, or no vbench in the
            interpreter's environment.
    """
    settings, suite = read_generated(config.folder)
    runs = [run for run in RUNS if (config.folder / run).is_dir()]
    dimensions = config.dimensions or tuple(settings["suite"]["dimensions"]) or DIMENSIONS
    suite.select(dimensions)
    if empty := [name for name in dimensions if not suite.prompts_of(name)]:
        raise UserInputError(f"dimension must have prompts among the generated videos, got {empty[0]}, which has none")
    _check_videos(config.folder, runs, suite, settings["videos"])
    package = ask_python(config.python, _VERSION)
    scores: dict[str, dict[str, float]] = {}
    failures = []
    for run in runs:
        for dimension in dimensions:
            target = config.folder / SCORES / run / f"{dimension}.json"
            record = None if config.again else _read_record(target)
            if record is None:
                if progress is not None:
                    progress(f"{run}: {dimension}")
                try:
                    record = _score(config, run, dimension, suite, settings["videos"], package)
                except DiffsieveError as error:
                    failures.append(f"{run}, {dimension}: {error}")
                    continue
                write_json(target, record)
            scores.setdefault(run, {})[dimension] = record["value"]
    return {"folder": str(config.folder), "vbench": package, "scores": scores, "failures": failures}


def _score(config: ScoreConfig, run: str, dimension: str, suite: Suite, videos: int, package: str) -> dict[str, Any]:
    place = (config.folder / SCORES / run).resolve()
    place.mkdir(parents=True, exist_ok=True)
    full_info, request = place / f"{dimension}.prompts.json", place / f"{dimension}.request.json"
    entries = [entry for entry in suite.entries if dimension in entry["dimension"]]
    full_info.write_text(json.dumps(entries), encoding="utf-8")
    result = place / f"{dimension}_eval_results.json"
    result.unlink(missing_ok=True)
    videos_path = (config.folder / run).resolve()
    values = {
        "device": config.device,
        "full_info": str(full_info),
        "output": str(place),
        "videos": str(videos_path),
        "name": dimension,
        "dimension": dimension,
        "local": config.local,
    }
    request.write_text(json.dumps(values), encoding="utf-8")
    log = place / f"{dimension}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        code = subprocess.run(
            [config.python, str(_DRIVER), str(request)], stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, cwd=place, check=False, env=_environment(),
        ).returncode  # fmt: skip
    if code:
        raise DiffsieveError(f"VBench failed with exit code {code}: {_last_words(log)}; all of it is in {log}")
    expected = {
        str(videos_path / video_name(prompt, index))
        for prompt in suite.prompts_of(dimension)
        for index in range(min(videos, SCORED_VIDEOS))
    }
    value, scored = _read_result(result, dimension, expected)
    record = {
        "schema": SCORE_SCHEMA,
        "created": now(),
        "dimension": dimension,
        "run": run,
        "value": value,
        "videos": scored,
        "expected_videos": len(expected),
        "videos_per_prompt": min(videos, SCORED_VIDEOS),
        "vbench": package,
        "seconds": round(time.monotonic() - started, 1),
    }
    if dimension == FLICKERING:
        own = summarize([temporal_flickering(path).mean for path in sorted(expected)]).mean
        record["in_process"] = own
        record["in_process_difference"] = None if own is None else abs(own - value)
    return record


def _read_result(path: Path, dimension: str, expected: set[str]) -> tuple[float, int]:
    """Return VBench's value and the number of scored videos; everything that makes it unfit for a table is an error."""
    try:
        value, details = json.loads(path.read_text(encoding="utf-8"))[dimension]
        scored = {os.path.abspath(detail["video_path"]) for detail in details}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DiffsieveError(f"VBench left no result of its own form in {path}: {error!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DiffsieveError(f"VBench's value must be a finite number, got {value!r}")
    if not all(map(_finite, details)):
        raise DiffsieveError("VBench's value of a video is not finite")
    missing = sorted(expected - scored)
    if missing and dimension not in _PARTIAL:
        raise DiffsieveError(
            f"VBench left {len(missing)} of {len(expected)} videos out, such as {Path(missing[0]).name}"
        )
    if foreign := sorted(scored - expected):
        raise DiffsieveError(f"VBench scored a video that was not asked for: {Path(foreign[0]).name}")
    return float(value), len(scored)


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _check_videos(folder: Path, runs: Sequence[str], suite: Suite, videos: int) -> None:
    if not runs:
        raise UserInputError(f"{folder} must hold videos in {' or '.join(RUNS)}, got none")
    clear_parts(folder, runs)
    wanted = {(prompt, index) for prompt in suite.prompts for index in range(videos)}
    missing = sorted(wanted - finished_videos(folder, runs))
    if missing:
        raise UserInputError(
            f"{folder} must hold all videos, got none for {video_name(*missing[0])} and {len(missing) - 1} others: "
            "diffsieve vbench generate goes on"
        )
    names = {video_name(*item) for item in wanted}
    for run in runs:
        if foreign := sorted(path.name for path in (folder / run).iterdir() if path.name not in names):
            raise UserInputError(f"{folder / run} must hold the videos alone, got {foreign[0]}")


def _environment() -> dict[str, str]:
    """What VBench sees: not the variables with which a launcher told this process that it is one of several."""
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in ours}


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCORE_SCHEMA else None
