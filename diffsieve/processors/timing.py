"""Seconds spent in the stages of the sparse attention calls."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StageTimer:
    """Adds up the time of named stages on one device.

    CUDA time is taken from events and read when asked for, so measuring makes nobody wait during the run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block of code under a name."""
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream(self.device))
            yield
            end.record(torch.cuda.current_stream(self.device))
            self._events.append((name, start, end))
        else:
            begin = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - begin)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by stage; waits for the device if events are pending."""
        for name, start, end in self._events:
            end.synchronize()
            self._add(name, start.elapsed_time(end) / 1e3)
        self._events.clear()
        return dict(self._seconds)

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "_seconds": self.seconds(), "_events": []}  # events belong to their process

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
