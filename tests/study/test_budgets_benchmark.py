"""The script that measures shared blocks on captured calls, on a tiny pipeline."""

import importlib.util
import json
from pathlib import Path

import pytest

from diffsieve.study import capture
from tests.tiny import HEADS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ba_att_budgets.py"


@pytest.fixture
def script():
    location = importlib.util.spec_from_file_location("ba_att_budgets", SCRIPT)
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


def test_report_of_tiny_captures(script, pipe, captures, tmp_path):
    config = captures()
    capture(config, pipe=pipe)
    arguments = ["--captures", str(config.out), "--out", str(tmp_path / "budgets"), "--block-size", "4"]
    script.main([*arguments, "--density", "0.5", "0.05"])
    report = json.loads((tmp_path / "budgets" / "ba_att_budgets.json").read_text())
    assert [path.name for path in (tmp_path / "budgets").iterdir()] == ["ba_att_budgets.json"]
    rows = [row for row in report["rows"] if row["density"] == 0.5]
    assert len(rows) == 3  # layers
    for row in rows:
        assert (row["blocks"], row["kept"], sum(row["budgets"])) == (12, 6, 6 * HEADS)
        assert [step["step"] for step in row["steps"]] == [1, 3, 4]
        for step in row["steps"]:
            # Hindsight knows each level's error in that step, and may stay equal.
            assert step["hindsight"] <= min(1.0, step["shared"]) * (1 + 1e-5)
            assert step["equal"] > 0
    alone = [row for row in report["rows"] if row["density"] == 0.05]  # one block: nothing to share
    assert all(step["shared"] == 1 for row in alone for step in row["steps"])
