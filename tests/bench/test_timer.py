"""The timer: in turns on a CPU; its paths on a GPU with a stand-in for `torch.cuda` that counts what is asked of it."""

import gc
import json
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffsieve.bench import timer as room
from diffsieve.bench.config import BenchConfig
from diffsieve.bench.timer import Timer


@pytest.fixture
def on_cpu(tmp_path):
    return Timer(BenchConfig(out=tmp_path, device="cpu", budget_ms=20.0))


class _Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class _Graph:
    """Keeps the calls made while it captures, and makes them again."""

    capturing = None

    def replay(self):
        for call in self.calls:
            call()


@contextmanager
def _capture(graph):
    graph.calls, _Graph.capturing = [], graph
    try:
        yield
    finally:
        _Graph.capturing = None


@contextmanager
def _stream(stream):
    yield


@pytest.fixture
def on_gpu(monkeypatch):
    cuda = SimpleNamespace(
        Event=_Event, synchronize=lambda device: None, Stream=lambda device: None, stream=_stream, CUDAGraph=_Graph,
        graph=_capture, reset_peak_memory_stats=lambda device: None, memory_allocated=lambda device: 2**20,
        max_memory_allocated=lambda device: 5 * 2**20, set_device=lambda device: None,
    )  # fmt: skip
    for name, value in vars(cuda).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(room, "_FLUSH_BYTES", 8)
    return Timer(SimpleNamespace(device="cpu", on_gpu=True, budget_ms=20.0))


@pytest.mark.usefixtures("on_gpu")
def test_its_device_becomes_the_current_one(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    for device in ("cuda:1", "cuda"):
        Timer(SimpleNamespace(device=device, on_gpu=True, budget_ms=20.0))
    assert current == [1, 0]


def test_calls_take_turns_on_a_cpu(on_cpu):
    order = []
    sample, rivals = on_cpu.eager(lambda: order.append("call"), {"dense": lambda: order.append("dense")})
    turns = 2 * sample["repeats"]
    assert order[-turns:] == ["call", "dense"] * sample["repeats"]
    assert len(order) >= turns + 2
    assert rivals.keys() == {"dense"}
    assert sample["ms_p10"] <= sample["ms"] <= sample["ms_p90"]


def test_a_first_call_that_compiles_does_not_set_the_repeats(on_cpu):
    compiling = [0.1]
    sample, _ = on_cpu.eager(lambda: time.sleep(compiling.pop()) if compiling else None)
    assert sample["repeats"] > 3


@pytest.mark.parametrize(("pauses", "calls"), [([], 3), ([0.2], 4)], ids=["", "the first one compiles"])
def test_calls_longer_than_the_budget_are_made_three_times_on_a_gpu(pauses, calls, on_gpu):
    made = []

    def call():
        made.append(pauses.pop(0) if pauses else 0.03)
        time.sleep(made[-1])

    sample, _ = on_gpu.eager(call)
    assert len(made) == calls
    assert sample["repeats"] == 3
    assert 30 <= sample["ms"] <= sample["ms_p90"] < 200


def test_repeats_fit_the_budget(on_cpu):
    slow, _ = on_cpu.eager(lambda: time.sleep(0.02))
    fast, _ = on_cpu.eager(lambda: None)
    assert slow["repeats"] == 3
    assert fast["repeats"] > 3
    assert slow["ms"] >= 20 > fast["ms"]


@pytest.mark.parametrize("device", ["on_cpu", "on_gpu"])
def test_stages(device, request):
    timer = request.getfixturevalue(device)

    def call(stage):
        for name, seconds in (("selection", 0.004), ("attention", 0.008), ("selection", 0.0)):
            with stage(name):
                time.sleep(seconds)

    found = timer.stages(call)
    assert list(found) == ["selection", "attention", "selection again"]
    assert found["attention"] > found["selection"] > found["selection again"]


def test_there_is_no_peak_on_a_cpu(on_cpu):
    assert on_cpu.peak_mib(lambda: None) is None


def test_what_a_call_frees_of_earlier_ones_is_not_taken_off_its_peak(on_gpu, monkeypatch):
    """Calls before may leave cycles that hold memory: freed within the call, they made peaks of 0 MiB."""
    used = {"now": 0, "most": 0}

    class Held:
        def __init__(self, mib):
            self.mib = mib
            used["now"] += mib
            used["most"] = max(used.values())

        def __del__(self):
            used["now"] -= self.mib

    def call():
        gc.collect()
        return Held(3)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used["now"] * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: used["most"] * 2**20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: used.update(most=used["now"]))
    garbage = Held(4)
    garbage.itself = garbage
    del garbage
    assert on_gpu.peak_mib(call) == 3.0


def test_no_committed_row_has_a_peak_that_cannot_be():
    """Every call has a result. A row without `peak_mib` was not measured, as on a CPU."""
    files = list((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/bench/*.json"))
    assert files
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            assert row.get("peak_mib", 1) > 0, f"{file.name}: {row['problem']}: {row['name']}"


def test_eager_and_graph_times_on_a_gpu(on_gpu):
    def call():
        if _Graph.capturing is not None:
            _Graph.capturing.calls.append(lambda: time.sleep(0.001))
        else:
            time.sleep(0.004)

    sample, rivals = on_gpu.eager(call)
    assert rivals == {}
    assert sample["ms"] >= 4
    graph = on_gpu.graph(call)
    assert graph.keys() == {"graph_ms", "graph_ms_p10", "graph_ms_p90"}
    assert 1 <= graph["graph_ms"] < 4
    assert on_gpu.peak_mib(call) == 4.0


def test_what_cannot_be_captured_says_why(on_gpu):
    def call():
        if _Graph.capturing is not None:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    assert on_gpu.graph(call) == {"no_graph": "RuntimeError: operation not permitted"}
