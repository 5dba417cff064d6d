"""The script that turns a log of pytest into a result."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_tests.py"
HEAD = "platform linux -- Python 3.12.3, pytest-9.1.1, pluggy-1.6.0 -- python3\n"
XDIST = (
    HEAD
    + """
tests/a.py::test_one[x, y]
[gw1] [ 40%] PASSED tests/a.py::test_one[x, y]
[gw0] [ 69%] FAILED tests/b.py::test_two
[gw0] [100%] SKIPPED tests/a.py::test_three
FAILED tests/b.py::test_two - AssertionError: 1
"""
)
ALONE = (
    HEAD
    + """
tests/a.py::test_one[x, y] PASSED                    [ 40%]
tests/b.py::test_two FAILED                          [ 69%]
tests/a.py::test_three SKIPPED (no GPU)              [100%]
FAILED tests/b.py::test_two - AssertionError: 1
"""
)


def _run(tmp_path, monkeypatch, log, *more):
    location = importlib.util.spec_from_file_location("gpu_tests", SCRIPT)
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    (tmp_path / "log").write_text(log)
    arguments = [
        str(tmp_path / "log"),
        "--gpu",
        "G",
        "--torch",
        "2",
        "--triton",
        "3",
        "--out",
        str(tmp_path / "out.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py", *arguments, *more])
    module.main()
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize("log", [XDIST, ALONE], ids=["xdist", "alone"])
def test_every_outcome_is_told(tmp_path, monkeypatch, log):
    found = _run(tmp_path, monkeypatch, log)
    assert found["tests"] == {
        "tests/a.py::test_one[x, y]": "passed", "tests/a.py::test_three": "skipped", "tests/b.py::test_two": "failed",
    }  # fmt: skip
    assert found["outcomes"] == {"passed": 1, "skipped": 1, "failed": 1}
    assert found["versions"] == {"python": "3.12.3", "torch": "2", "triton": "3"}


def test_a_part_of_the_tests(tmp_path, monkeypatch):
    assert _run(tmp_path, monkeypatch, XDIST, "--tests", "tests/b")["tests"] == {"tests/b.py::test_two": "failed"}


def test_versions_of_other_packages(tmp_path, monkeypatch):
    found = _run(tmp_path, monkeypatch, ALONE, "--package", "flash-attn-4", "4.0.0b36", "--package", "fa3-fwd", "0.0.3")
    assert found["versions"] == {
        "python": "3.12.3", "torch": "2", "triton": "3", "flash-attn-4": "4.0.0b36", "fa3-fwd": "0.0.3",
    }  # fmt: skip


def test_a_log_without_outcomes_is_refused(tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        _run(tmp_path, monkeypatch, HEAD)
    assert not (tmp_path / "out.json").exists()
