"""Runs operations: gate, check, time, write; in legs."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..compare.shards import Deadline
from ..errors import BackendUnavailableError, DiffsieveError, UserInputError
from .config import BenchConfig
from .operations import OPERATIONS
from .problem import Operation, Prepared, Problem, Variant, passes
from .results import Results, head_of
from .timer import Timer, first_line

Say = Callable[[str], None]


def run_bench(
    config: BenchConfig,
    *,
    deadline: Deadline | None = None,
    progress: Say = lambda line: None,
    command: Sequence[str] = ("diffsieve", "bench"),
) -> dict[str, Any]:
    """Measure, and write a JSON file for each operation after every row.

    Rows that are there already are kept; those that failed are tried again. Nothing gets a figure that is not within
    the bound of its check; the gate of an operation, where it has one, comes before all of its rows.

    Args:
        config: what to measure.
        deadline: when to stop; at least one row is made.
        progress: takes lines for people.
        command: the words of the command line, for the file.

    Returns:
        `out`, `done` (rows with figures), `missing` (variants without a row yet), `failed` (rows and gates of ours that
        failed, by name with the reason), `failed_peers`, and `files`.

    Raises:
        UserInputError: an unknown operation, or `out` holds results of another device, other versions or settings.
    """
    operations = _chosen(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = _Run(config, deadline or Deadline(None), progress, shlex.join(command))
    for operation in operations:
        run.operation(operation)
    return run.outcome()


def plan(config: BenchConfig) -> dict[str, Any]:
    """Say what `run_bench` would measure, without measuring.

    Returns:
        `operations`: by name `summary`, `problems` (the names of their variants) and `absent` (with the reasons).

    Raises:
        UserInputError: an unknown operation.
    """
    found = {}
    for operation in _chosen(config):
        problems = operation.problems(config)
        found[operation.name] = {
            "summary": operation.summary,
            "problems": {problem.name: [variant.name for variant in problem.variants] for problem in problems},
            "absent": _absent(operation, problems, config),
        }
    return {"operations": found}


def _chosen(config: BenchConfig) -> list[Operation]:
    for name in config.operations:
        if name not in OPERATIONS:
            raise UserInputError(f"operation must be one of {', '.join(OPERATIONS)}, got {name!r}")
    return [OPERATIONS[name] for name in config.operations or tuple(OPERATIONS)]


def _absent(operation: Operation, problems: Sequence[Problem], config: BenchConfig) -> dict[str, str]:
    of_sizes = {f"{problem.name}: {name}": why for problem in problems for name, why in problem.absent.items()}
    return dict(operation.absent(config)) | of_sizes


def result_path(out: Path, operation: str) -> Path:
    return out / f"{operation}.json"


@dataclass(frozen=True)
class _Baseline:
    figures: dict[str, Any]
    call: Callable[[], object]


class _Run:
    def __init__(self, config: BenchConfig, deadline: Deadline, progress: Say, command: str) -> None:
        self.config, self.deadline, self.progress, self.command = config, deadline, progress, command
        self.timer = Timer(config)
        self.done = self.missing = 0
        self.failed: dict[str, str] = {}
        self.failed_peers: dict[str, str] = {}
        self.files: list[str] = []
        self.begun = False

    def outcome(self) -> dict[str, Any]:
        return {
            "out": str(self.config.out), "done": self.done, "missing": self.missing, "failed": self.failed,
            "failed_peers": self.failed_peers, "files": self.files, "other_shards_missing": 0,
        }  # fmt: skip

    def operation(self, operation: Operation) -> None:
        config = self.config
        path = result_path(config.out, operation.name)
        problems = operation.problems(config)
        results = Results(
            path, head_of(operation.name, config, operation.settings(config), self.timer.text), self.command
        )
        absent = _absent(operation, problems, config)
        results.data["absent"] |= absent
        for name, why in absent.items():
            self.progress(f"{operation.name}: not measured: {name}: {why}")
        self.files.append(str(path))
        results.save()
        if self._gate(operation, results):
            for problem in problems:
                self._problem(operation.name, problem, results)
        for problem in problems:
            for variant in problem.variants:
                row = results.row(problem.name, variant.name)
                where = f"{operation.name}, {problem.name}, {variant.name}"
                if row is None:
                    self.missing += operation.name not in self.failed
                elif row["ok"]:
                    self.done += 1
                else:
                    (self.failed_peers if variant.peer else self.failed)[where] = row["reason"]

    def _gate(self, operation: Operation, results: Results) -> bool:
        if operation.gate is None or results.data.get("gate", {}).get("ok"):
            return True
        if self.begun and self.deadline.passed:
            return True  # no problem begins either
        self.deadline.begin()
        try:
            found = operation.gate(self.config)
            reason = None if passes(found) else "an error above its bound"
        except Exception as error:  # the other operations are still to run
            found, reason = {}, first_line(error)
        self.deadline.end()
        ok = reason is None
        results.data["gate"] = _json_ready(found | {"ok": ok} | ({} if ok else {"reason": reason}))
        results.save()
        if not ok:
            self.failed[operation.name] = f"the check against the fp64 reference failed, nothing is measured: {reason}"
            self.progress(f"{operation.name}: {self.failed[operation.name]}")
        return ok

    def _problem(self, operation: str, problem: Problem, results: Results) -> None:
        rows = {variant.name: results.row(problem.name, variant.name) for variant in problem.variants}
        todo = [variant for variant in problem.variants if not (rows[variant.name] or {}).get("ok")]
        if not todo or (self.begun and self.deadline.passed):
            return
        self.deadline.begin()
        torch._dynamo.reset()  # a kernel compiled for too many sizes is not compiled for the next
        state = None
        try:
            state = problem.build()
        except Exception as error:  # too large for this device: a result, not the end
            for variant in todo:
                self._failed(operation, problem, variant, results, {}, first_line(error))
            _free()
            return
        baselines: dict[str, _Baseline] = {}
        comparable = [variant for variant in problem.variants if variant.baseline]
        others = [variant for variant in todo if not variant.baseline]
        for variant in comparable:
            found = self._variant(operation, problem, variant, results, state, {})
            if found is not None:
                baselines[variant.name] = found
        # A piece of its own: together with the first row it would be the longest, and end the leg before its time.
        self.deadline.end()
        self.deadline.begin()
        for number, variant in enumerate(others):
            if number and self.deadline.passed:
                break
            self._variant(operation, problem, variant, results, state, _same_direction(baselines, variant, problem))
            self.deadline.end()
            self.deadline.begin()
            self.begun = True
        self.deadline.end()
        self.begun = True
        del state, baselines
        _free()

    def _variant(
        self,
        operation: str,
        problem: Problem,
        variant: Variant,
        results: Results,
        state: Any,
        baselines: dict[str, _Baseline],
    ) -> _Baseline | None:
        """Check and time one variant; what a baseline is compared by, or `None` where it failed."""
        check: dict[str, Any] = {}
        try:
            prepared = variant.prepare(state)
            check = prepared.check()
            if not passes(check):
                raise DiffsieveError(f"error {check.get('error')} above the bound {check.get('bound')}")
            figures = self._figures(prepared, baselines)
        except Exception as error:
            unavailable = isinstance(error, BackendUnavailableError)
            reason = str(error) if unavailable or isinstance(error, DiffsieveError) else first_line(error)
            self._failed(operation, problem, variant, results, check, reason)
            _free()
            return None
        row = _row(problem, variant, results.leg) | {"ok": True, "check": check} | figures
        results.put(_json_ready(row))
        self.progress(f"{operation}, {problem.name}: {variant.name}: {row_text(row)}")
        # On a GPU only the figures are compared, and the memory of the call is free for the next row.
        call = prepared.call if not self.timer.on_gpu else _nothing
        del prepared
        _free()
        return _Baseline(figures, call)

    def _figures(self, prepared: Prepared, baselines: dict[str, _Baseline]) -> dict[str, Any]:
        rivals = {} if self.timer.on_gpu else {name: baseline.call for name, baseline in baselines.items()}
        figures, rival_ms = self.timer.eager(prepared.call, rivals)
        if self.timer.on_gpu and prepared.graph:
            figures |= self.timer.graph(prepared.call)
        best = figures.get("graph_ms", figures["ms"])
        if prepared.flops is not None:
            figures["tflops"] = prepared.flops / best * 1e-9
        if baselines:
            if not rival_ms:  # what compiled models have of both, where both can be captured
                graphs = "graph_ms" in figures and all("graph_ms" in b.figures for b in baselines.values())
                kind = "graph_ms" if graphs else "ms"
                best = figures[kind]
                rival_ms = {name: baseline.figures[kind] for name, baseline in baselines.items()}
            figures["baseline_ms"] = rival_ms
            figures["speedup"] = {name: ms / best for name, ms in rival_ms.items()}
        peak = self.timer.peak_mib(prepared.call)
        if peak is not None:
            figures["peak_mib"] = peak
        if prepared.extra is not None:
            figures |= prepared.extra()
        return figures

    def _failed(
        self, operation: str, problem: Problem, variant: Variant, results: Results, check: dict[str, Any], reason: str
    ) -> None:
        row = _row(problem, variant, results.leg) | {"ok": False, "check": check, "reason": reason}
        results.put(_json_ready(row))
        self.progress(f"{operation}, {problem.name}: {variant.name}: FAILED, no figure: {reason}")


def row_text(row: dict[str, Any]) -> str:
    """The figures of a row for people."""
    parts = [f"{row['ms']:.3f} ms ({row['ms_p10']:.3f} to {row['ms_p90']:.3f})"]
    if "graph_ms" in row:
        parts.append(f"{row['graph_ms']:.3f} ms as a CUDA graph")
    if "tflops" in row:
        parts.append(f"{row['tflops']:.3g} TFLOP/s")
    parts += [f"{ratio:.2f}x over {name}" for name, ratio in row.get("speedup", {}).items()]
    if "peak_mib" in row:
        parts.append(f"{row['peak_mib']:.0f} MiB")
    return ", ".join(parts)


def _same_direction(baselines: dict[str, _Baseline], variant: Variant, problem: Problem) -> dict[str, _Baseline]:
    """The baselines that do the same as a variant: a forward is compared with forwards."""
    direction = variant.details.get("direction")
    wanted = {v.name for v in problem.variants if v.baseline and v.details.get("direction") == direction}
    return {name: baseline for name, baseline in baselines.items() if name in wanted}


def _row(problem: Problem, variant: Variant, leg: int) -> dict[str, Any]:
    return {
        "problem": problem.name, "name": variant.name, **problem.details, **variant.details, "peer": variant.peer,
        "leg": leg,
    }  # fmt: skip


def _nothing() -> None:
    raise AssertionError("calls of baselines are not kept on a GPU")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _json_ready(value: Any) -> Any:
    """Infinite and undefined errors as text, which JSON has; tuples as lists."""
    if isinstance(value, dict):
        return {name: _json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return value
