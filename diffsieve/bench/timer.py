"""Times of calls: eager, as CUDA graphs, in turns; peak memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from .config import BenchConfig

Call = Callable[[], object]

_FEWEST, _MOST = 3, 200
# How much longer than the second the first call may take and still be like it.
_WARM = 1.1
# Larger than any L2 cache: writing to it before each call leaves nothing of the call before.
_FLUSH_BYTES = 1 << 28
# Writes of the buffer that keep the GPU busy while the host queues a call whose stages are timed.
_HEAD_START = 100


class Timer:
    """Measures on one device, and makes it the current one, where events are recorded.

    Times are in ms, the median with the 10th and 90th percentile. On a GPU the L2 cache is flushed before each call and
    events on the stream take the time; calls are queued without waiting, so an eager time shows the host where that is
    slower than the GPU.
    """

    def __init__(self, config: BenchConfig) -> None:
        self.device = torch.device(str(config.device))
        self.on_gpu = config.on_gpu
        if self.on_gpu:
            torch.cuda.set_device(self.device.index or 0)  # it takes no "cuda" without a number
        self._budget_ms = config.budget_ms
        self._flush = torch.empty(_FLUSH_BYTES if self.on_gpu else 0, dtype=torch.int8, device=self.device)

    @property
    def text(self) -> str:
        """How times are taken, for the head of a result."""
        if self.on_gpu:
            return "CUDA events, L2 flushed, median; graph: the same call replayed as a CUDA graph"
        return "wall clock, median; each call in turns with those that it is compared with"

    def eager(self, call: Call, rivals: Mapping[str, Call] | None = None) -> tuple[dict[str, Any], dict[str, float]]:
        """Time a call, in turns with its rivals so that a disturbance hits all of them.

        Returns:
            `ms`, `ms_p10`, `ms_p90`, `repeats` of the call; the median ms of each rival.
        """
        calls = {"": call, **(rivals or {})}
        first = {name: self._first(each) for name, each in calls.items()}
        repeats = self._repeats(sum(map(min, first.values())))
        if self.on_gpu and not rivals:
            # Calls of seconds: the first ones count, too.
            times_of_call = [ms for ms in first[""] if ms > self._budget_ms]
            return _sample(times_of_call + self._cuda_times(call, repeats - len(times_of_call))), {}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, each in calls.items():
                times[name].append(self._once(each))
        return _sample(times.pop("")), {name: median(values) for name, values in times.items()}

    def graph(self, call: Call) -> dict[str, Any]:
        """Time a call as a CUDA graph: `graph_ms`, `graph_ms_p10`, `graph_ms_p90`; or `no_graph`, the reason."""
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):
                call()
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            return {"no_graph": first_line(error)}
        graph.replay()
        repeats = self._repeats(min(self._first(graph.replay)))
        sample = _sample(self._cuda_times(graph.replay, repeats))
        return {f"graph_{name}": sample[name] for name in ("ms", "ms_p10", "ms_p90")}

    def peak_mib(self, call: Call) -> float | None:
        """Memory that a call needs beyond what is there before it, result included, in MiB; `None` on a CPU."""
        if not self.on_gpu:
            return None
        gc.collect()  # what the call itself would set free on the way is not its memory
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        torch.cuda.synchronize(self.device)
        del result
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def stages(self, call: Callable[[Callable[[str], Any]], object]) -> dict[str, float]:
        """Median ms of the stages of a call, in their order.

        Args:
            call: takes a function that gives a context manager for the name of a stage. A name that comes again is
                another stage, "again".
        """
        rounds: list[dict[str, float]] = []
        call(lambda name: self._stage(name, {}))
        started = time.perf_counter()
        while len(rounds) < _FEWEST or (
            len(rounds) < _MOST and 1e3 * (time.perf_counter() - started) < self._budget_ms
        ):
            marks: dict[str, Any] = {}
            if self.on_gpu:  # the host gets ahead, so that the GPU never waits for it inside the call
                for _ in range(_HEAD_START):
                    self._flush.zero_()
            call(lambda name, marks=marks: self._stage(name, marks))  # type: ignore[misc]
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
            rounds.append({name: mark() for name, mark in marks.items()})
        return {name: median(found[name] for found in rounds) for name in rounds[0]}

    @contextmanager
    def _stage(self, name: str, marks: dict[str, Callable[[], float]]) -> Iterator[None]:
        name = name if name not in marks else f"{name} again"
        if self.on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            marks[name] = lambda: start.elapsed_time(end)
        else:
            began = time.perf_counter()
            yield
            milliseconds = 1e3 * (time.perf_counter() - began)
            marks[name] = lambda: milliseconds

    def _repeats(self, milliseconds: float) -> int:
        return max(_FEWEST, min(_MOST, int(self._budget_ms / max(milliseconds, 1e-3))))

    def _first(self, call: Call) -> list[float]:
        """First times of a call in ms, to choose the repeats by; without the very first one if that was compilation."""
        first = self._once(call)
        if first <= self._budget_ms:
            return [first]
        second = self._once(call)
        return [first, second] if first <= _WARM * second else [second]

    def _once(self, call: Call) -> float:
        if self.on_gpu:
            return self._cuda_times(call, 1)[0]
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def _cuda_times(self, call: Call, repeats: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in events]


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message, for a row."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _sample(times: list[float]) -> dict[str, Any]:
    share = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    low, middle, high = torch.tensor(times, dtype=torch.float64).quantile(share).tolist()
    return {"ms": middle, "ms_p10": low, "ms_p90": high, "repeats": len(times)}
