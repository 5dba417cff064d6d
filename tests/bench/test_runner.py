"""Nothing gets a figure before its check; legs add up; results of different machines and settings do not mix."""

import json
import math
from dataclasses import replace

import pytest
import torch

from diffsieve.bench import OPERATIONS, BenchConfig, plan, run_bench
from diffsieve.bench.problem import Operation, Prepared, Problem, Variant, passes
from diffsieve.bench.results import kernels_digest, peer_versions, read_results
from diffsieve.compare.shards import Deadline
from diffsieve.errors import UserInputError


def _prepared(error=0.0, log=None, name=""):
    def call():
        if log is not None:
            log.append(name)

    return Prepared(call, lambda: {"error": error, "bound": 1.0}, flops=1e6)


def _operation(errors, *, gate=None, log=None, problems=("small",)):
    """An operation `made-up`; `errors` of its variants by name, the first of them the baseline."""
    variants = tuple(
        Variant(name, lambda state, name=name, error=error: _prepared(error, log, name), {"sparsity": None},
                baseline=number == 0)
        for number, (name, error) in enumerate(errors.items())
    )  # fmt: skip
    found = [Problem(name, lambda: None, variants, {"tokens": 1}, {"other": "too large"}) for name in problems]
    return Operation("made-up", "a test", lambda config: {"a": 1}, lambda config: found, lambda config: {}, gate)


@pytest.fixture
def run(monkeypatch, tmp_path):
    # Somebody may be working on the kernels while the tests run.
    monkeypatch.setattr("diffsieve.bench.results.kernels_digest", lambda: "f" * 12)

    def call(operation, deadline=None, **options):
        monkeypatch.setitem(OPERATIONS, "made-up", operation)
        config = BenchConfig(
            out=tmp_path, operations=("made-up",), **{"budget_ms": 0.01, "device": "cpu"} | options
        )  # fmt: skip
        lines = []
        outcome = run_bench(config, deadline=deadline, progress=lines.append)
        return outcome, read_results(tmp_path / "made-up.json"), lines

    return call


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ({"error": 1e-3, "bound": 1e-3}, True),
        ({"error": 2e-3, "bound": 1e-3}, False),
        ({"error": math.nan, "bound": 1e-3}, False),
        ({"error": math.inf, "bound": math.inf, "ok": False}, False),
        ({"error": {"out": 0.0, "dq": 2.0}, "bound": {"out": 1.0, "dq": 1.0}}, False),
        ({"error": {"out": 0.0}, "bound": {"out": 1.0, "dq": 1.0}}, False),
        ({"error": {}, "bound": {}}, False),
        ({"error": 0.0, "bound": 1.0, "ok": False}, False),
        ({}, False),
    ],
    ids=["equal", "above", "nan", "not-ok", "one-of-two", "one-missing", "none", "differs", "empty"],
)
def test_what_passes(check, expected):
    assert passes(check) is expected


def test_a_variant_that_fails_its_check_gets_no_figure_and_is_never_timed(run):
    log = []
    outcome, data, lines = run(_operation({"base": 0.0, "wrong": 1.5, "right": 0.5}, log=log))
    rows = {row["name"]: row for row in data["rows"]}
    assert rows["wrong"]["ok"] is False
    assert "above the bound" in rows["wrong"]["reason"]
    assert not {"ms", "graph_ms", "tflops", "speedup"} & rows["wrong"].keys()
    assert "wrong" not in log
    assert rows["right"]["speedup"].keys() == {"base"}
    assert outcome["failed"].keys() == {"made-up, small, wrong"}
    assert any("FAILED, no figure" in line for line in lines)
    assert not any("wrong" in line and " ms" in line for line in lines)


def test_an_exception_is_a_failure_of_its_row_alone(run):
    operation = _operation({"base": 0.0, "right": 0.0})
    problem = operation.problems(None)[0]

    def fails(state):
        raise torch.OutOfMemoryError("out of memory")

    variants = (*problem.variants, Variant("large", fails, {}, peer=True))
    outcome, data, _ = run(replace(operation, problems=lambda config: [replace(problem, variants=variants)]))
    assert [row["ok"] for row in data["rows"]] == [True, True, False]
    assert outcome["failed"] == {}
    assert "OutOfMemoryError" in outcome["failed_peers"]["made-up, small, large"]


@pytest.mark.parametrize("gate", [lambda config: {"error": 2.0, "bound": 1.0}, lambda config: 1 / 0])
def test_nothing_is_measured_where_the_gate_fails(run, gate):
    log = []
    outcome, data, _ = run(_operation({"base": 0.0, "right": 0.0}, gate=gate, log=log))
    assert data["rows"] == []
    assert data["gate"]["ok"] is False
    assert log == []
    assert outcome["failed"].keys() == {"made-up"}
    assert outcome["missing"] == 0


def test_legs_add_up_and_the_baseline_is_measured_in_each(run):
    log = []
    operation = _operation({"base": 0.0, "a": 0.0, "b": 0.0}, log=log, problems=("one", "two"))
    over = Deadline(1e-9)
    outcome, data, _ = run(operation, over)
    assert [row["name"] for row in data["rows"]] == ["base", "a"]
    assert outcome["missing"] == 4
    for leg in (1, 2, 3):
        outcome, data, _ = run(operation, Deadline(1e-9))
        assert len(data["legs"]) == leg + 1
    assert outcome["missing"] == 0
    assert [(row["problem"], row["name"], row["leg"]) for row in data["rows"]] == [
        ("one", "base", 1), ("one", "a", 0), ("one", "b", 1), ("two", "base", 3), ("two", "a", 2), ("two", "b", 3),
    ]  # fmt: skip
    before = len(log)
    outcome, _, _ = run(operation)
    assert (outcome["done"], outcome["missing"], len(log)) == (6, 0, before)


def test_the_baselines_are_a_piece_of_work_of_their_own(run):
    """With them the first row would be the longest, and a leg would end that has time for more of the others."""
    log = []

    class Noted(Deadline):
        def end(self):
            super().end()
            log.append("end")

    run(_operation({"base": 0.0, "a": 0.0, "b": 0.0}, log=log), Noted(None))
    pieces = [set(piece.split()) for piece in " ".join(log).split("end") if piece.strip()]
    # On a CPU the baseline is called again beside each of the others.
    assert pieces == [{"base"}, {"base", "a"}, {"base", "b"}]


def test_failed_rows_are_tried_again(run):
    run(_operation({"base": 0.0, "mended": 2.0}))
    outcome, data, _ = run(_operation({"base": 0.0, "mended": 0.0}))
    assert outcome["failed"] == {}
    assert [row["ok"] for row in data["rows"]] == [True, True]


def test_results_of_other_settings_are_refused(run):
    run(_operation({"base": 0.0}))
    with pytest.raises(UserInputError, match="settings"):
        run(_operation({"base": 0.0}), dtype="bfloat16")


def test_results_of_other_kernels_are_refused(run, monkeypatch):
    run(_operation({"base": 0.0}))
    monkeypatch.setattr("diffsieve.bench.results.kernels_digest", lambda: "0" * 12)
    with pytest.raises(UserInputError, match="versions"):
        run(_operation({"base": 0.0}))


def test_the_versions_of_other_kernels_are_told(run, tmp_path, monkeypatch):
    for name in ("fa3_fwd-0.0.3", "flash_attn_4-4.0.0b36", "fastvideo_kernel-0.3.5", "flash_attn-2.8.3"):
        (tmp_path / f"{name}.dist-info").mkdir()
        package, version = name.split("-")
        text = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(text)
    assert peer_versions() == {}
    # A folder of modules that was copied without the metadata of its package.
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "fastvideo_kernel.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "copied")
    assert peer_versions() == {"fastvideo-kernel": "unknown"}
    monkeypatch.syspath_prepend(tmp_path)
    found = {"fa3-fwd": "0.0.3", "flash-attn-4": "4.0.0b36", "fastvideo-kernel": "0.3.5"}
    assert peer_versions() == found
    _, data, _ = run(_operation({"base": 0.0}))
    assert found.items() <= data["versions"].items()
    assert "flash-attn" not in data["versions"]


def test_the_digest_is_of_the_sources_of_kernels_and_processors(tmp_path, monkeypatch):
    monkeypatch.setattr("diffsieve.bench.results.__file__", str(tmp_path / "bench" / "results.py"))
    seen = set()
    for name, text, changes in (
        ("kernels/one.py", "1", True), ("kernels/deep/two.py", "1", True), ("processors/one.py", "1", True),
        ("kernels/one.py", "2", True), ("bench/one.py", "1", False),
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        assert (kernels_digest() not in seen) is changes
        seen.add(kernels_digest())


def test_a_file_of_something_else_is_refused(run, tmp_path):
    (tmp_path / "made-up.json").write_text('{"rows": []}')
    with pytest.raises(UserInputError, match="schema"):
        run(_operation({"base": 0.0}))
    assert (tmp_path / "made-up.json").read_text() == '{"rows": []}'


def test_what_cannot_be_measured_is_listed_with_the_reason(run):
    _, data, lines = run(_operation({"base": 0.0}))
    assert data["absent"] == {"small: other": "too large"}
    assert "made-up: not measured: small: other: too large" in lines


def test_the_file_says_where_it_was_measured(run):
    _, data, _ = run(_operation({"base": 0.0}), threads=1)
    assert data["device"]
    assert data["versions"]["torch"] == torch.__version__
    assert data["rows"][0]["peer"] is False
    assert data["settings"] == {"dtype": "float32", "budget_ms": 0.01, "threads": 1, "a": 1}
    assert data["legs"][0]["command"] == "diffsieve bench"
    row = data["rows"][0]
    assert row["ms_p10"] <= row["ms"] <= row["ms_p90"]
    assert row["repeats"] >= 3


def test_infinite_errors_can_be_written(run):
    _, data, _ = run(_operation({"base": 0.0, "wrong": math.inf}))
    assert data["rows"][1]["check"]["error"] == "inf"
    json.dumps(data, allow_nan=False)


class _GPUTimer:
    """What a GPU would say: eager and graph times of each call by its name."""

    on_gpu, text = True, "a stand-in"
    times = {"base": (8.0, 6.0), "a": (4.0, 2.0), "b": (4.0, None)}  # noqa: RUF012

    def __init__(self, config):
        pass

    def eager(self, call, rivals):
        assert rivals == {}
        return {"ms": self.times[call()][0], "ms_p10": 0.0, "ms_p90": 9.0, "repeats": 3}, {}

    def graph(self, call):
        ms = self.times[call()][1]
        return {"no_graph": "why"} if ms is None else {"graph_ms": ms}

    def peak_mib(self, call):
        return 1.0


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_the_file_names_the_gpu_of_the_run(run, monkeypatch, device):
    monkeypatch.setattr("diffsieve.bench.runner.Timer", _GPUTimer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    problem = Problem("small", lambda: None, (), {"tokens": 1})
    operation = replace(_operation({"base": 0.0}), problems=lambda config: [problem])
    _, data, _ = run(operation, device=device)
    assert data["device"] == device


def test_speedups_on_a_gpu_compare_graphs_with_graphs(run, monkeypatch):
    monkeypatch.setattr("diffsieve.bench.runner.Timer", _GPUTimer)
    operation = _operation({"base": 0.0, "a": 0.0, "b": 0.0})
    problem = operation.problems(None)[0]

    def named(variant):
        check = lambda: {"error": 0.0, "bound": 0.0}  # noqa: E731
        return replace(variant, prepare=lambda state: Prepared(lambda: variant.name, check, flops=1e9))

    problem = replace(problem, variants=tuple(map(named, problem.variants)))
    _, data, _ = run(replace(operation, problems=lambda config: [problem]))
    rows = {row["name"]: row for row in data["rows"]}
    assert rows["a"]["baseline_ms"] == {"base": 6.0}
    assert rows["a"]["speedup"] == {"base": 3.0}
    assert rows["a"]["tflops"] == pytest.approx(0.5)
    assert rows["b"]["no_graph"] == "why"
    assert rows["b"]["speedup"] == {"base": 2.0}  # eager with eager
    assert rows["a"]["peak_mib"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "mps"}, "device"),
        ({"backend": "cuda"}, "backend must be one of auto, .*, got 'cuda'"),
        ({"device": "gpu"}, "device must be cuda, cuda:1 or cpu, got 'gpu'"),
        ({"dtype": "float8"}, "dtype"),
        ({"tokens": (0,)}, "tokens"),
        ({"sparsities": (1.0,)}, "sparsity"),
        ({"heads": 0}, "heads"),
        ({"budget_ms": 0.0}, "budget_ms"),
        ({"block_size": 10**9}, "block_size must be at most 65536, got 1000000000"),
        ({"budget_ms": float("inf")}, "budget_ms must be finite and above 0, got inf"),
        ({"operations": ("speed",)}, "operation"),
    ],
)
def test_wrong_settings(tmp_path, options, message):
    with pytest.raises(UserInputError, match=message):
        plan(BenchConfig(out=tmp_path, **{"device": "cpu"} | options))
