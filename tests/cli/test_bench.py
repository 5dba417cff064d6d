"""`diffsieve bench` as a command: plan, run, exit codes."""

import json

import pytest
from typer.testing import CliRunner

from diffsieve.cli import app

TINY = ["--device", "cpu", "--tokens", "200", "--sparsity", "0.5", "--heads", "2", "--dim", "16", "--block-size", "32",
        "--budget-ms", "1", "--threads", "1"]  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_list(tmp_path):
    result = run("--list", "--device", "cpu", "--out", str(tmp_path / "new"))
    assert result.exit_code == 0
    for name in ("block-sparse:", "ba-att:", "llsa:", "wan:", "not measured: FlexAttention: needs a CUDA GPU"):
        assert name in result.stdout
    assert not (tmp_path / "new").exists()


def test_a_run_writes_results_and_plots(tmp_path):
    result = run("block-sparse", *TINY, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["done"], report["missing"], report["failed"]) == (4, 0, {})
    assert (tmp_path / "block-sparse.json").is_file()
    assert {path.name for path in tmp_path.glob("*.png")} == {"block-sparse-time.png", "block-sparse-speedup.png"}


def test_legs_end_with_3_and_go_on(tmp_path, monkeypatch):
    # Somebody may be working on the kernels while the tests run.
    monkeypatch.setattr("diffsieve.bench.results.kernels_digest", lambda: "f" * 12)
    words = ("block-sparse", *TINY, "--out", str(tmp_path), "--max-seconds", "1e-9")
    codes = [run(*words).exit_code for _ in range(3)]
    assert codes == [3, 3, 0]


@pytest.mark.parametrize(
    ("arguments", "message"), [(["speed"], "operation must be"), (["--grid", "3x4"], "grid must be")]
)
def test_wrong_arguments(tmp_path, arguments, message):
    result = run(*arguments, "--device", "cpu", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert message in result.output


def test_a_failed_check_is_exit_code_1(tmp_path, monkeypatch):
    from diffsieve.bench.operations import block_sparse

    monkeypatch.setattr(block_sparse, "check_output", lambda *args, **options: {"error": 1.0, "bound": 0.1})
    result = run("block-sparse", *TINY, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "no figure" in result.output
    assert "TFLOP/s" not in result.output
