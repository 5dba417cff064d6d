"""Every operation at a tiny size on a CPU, and that each check sees a wrong result."""

import pytest
import torch

from diffsieve.bench import BenchConfig, plan, run_bench
from diffsieve.bench import peers as room
from diffsieve.bench.operations import ba_att, block_sparse, llsa, wan
from diffsieve.bench.problem import passes
from diffsieve.bench.results import read_results
from diffsieve.errors import UserInputError
from diffsieve.kernels import testing
from diffsieve.kernels.block_sparse import block_sparse_attention

GRID = (3, 8, 12)


def _config(tmp_path, **options):
    tiny = {"device": "cpu", "tokens": (300,), "grids": (GRID,), "sparsities": (0.5,), "heads": 2, "dim": 32,
            "block_size": 32, "budget_ms": 1.0}  # fmt: skip
    return BenchConfig(out=tmp_path, **tiny | options)


def _run(tmp_path, operation, **options):
    outcome = run_bench(_config(tmp_path, operations=(operation,), **options))
    return outcome, read_results(tmp_path / f"{operation}.json")


def test_block_sparse(tmp_path):
    outcome, data = _run(tmp_path, "block-sparse")
    assert (outcome["failed"], outcome["failed_peers"]) == ({}, {})
    rows = {row["name"]: row for row in data["rows"]}
    assert list(rows) == ["dense, SDPA", "dense, math", "torch, 0 % skipped", "torch, 50 % skipped"]
    assert rows["torch, 50 % skipped"]["speedup"].keys() == {"dense, SDPA"}
    assert all(row["check"]["error"] <= row["check"]["bound"] and row["tflops"] > 0 for row in data["rows"])
    assert data["absent"]["FlexAttention"] == "needs a CUDA GPU"
    assert "triton" in data["absent"]


def test_block_sparse_sees_a_wrong_kernel(tmp_path, monkeypatch):
    def wrong(*tensors, **options):
        return 1.001 * block_sparse_attention(*tensors, **options)

    monkeypatch.setattr(block_sparse, "block_sparse_attention", wrong)
    outcome, data = _run(tmp_path, "block-sparse")
    assert [row["ok"] for row in data["rows"]] == [True, True, False, False]
    assert len(outcome["failed"]) == 2


def test_ba_att(tmp_path):
    outcome, data = _run(tmp_path, "ba-att")
    assert (outcome["failed"], outcome["failed_peers"]) == ({}, {})
    assert data["gate"]["ok"]
    default = next(row for row in data["rows"] if row["method"] == "default")
    assert list(default["stages_ms"]) == [
        "order, statistics, choice of blocks", "attention kernel", "compensation", "order undone",
    ]  # fmt: skip
    assert default["calibration_ms"] > 0
    assert default["grid_thw"] == list(GRID)


def test_stages_of_a_call_that_undoes_the_order_with_the_compensation(tmp_path, monkeypatch):
    found = [{"selection": 2.0, "attention": 9.0}, {"attention kernel": 8.0}]
    monkeypatch.setattr(ba_att.Timer, "stages", lambda self, call: found.pop(0))
    config = _config(tmp_path)
    inputs = ba_att._inputs(config, GRID)
    options = ba_att._options(config, GRID, "default", 0.5)
    extra = ba_att._extra(config, (inputs.query, inputs.key, inputs.value), options)
    assert extra["stages_ms"] == {
        "order, statistics, choice of blocks": 2.0, "attention kernel": 8.0, "compensation, order undone": 1.0,
    }  # fmt: skip


def test_calibration_is_timed_with_the_settings_of_the_call(tmp_path, monkeypatch):
    config = _config(tmp_path, backend="torch")
    calls = []
    monkeypatch.setattr(ba_att, "calibrate_orders", lambda *tensors, **options: calls.append(options))
    inputs = ba_att._inputs(config, GRID)
    options = ba_att._options(config, GRID, "default", 0.5)
    ba_att._extra(config, (inputs.query, inputs.key, inputs.value), options)
    assert {"backend": "torch", "score": "residual", "density": 0.5, "block_size": 32}.items() <= calls[0].items()


@pytest.mark.parametrize("wrong", ["output", "lists", "random"])
def test_ba_att_sees_a_wrong_call(tmp_path, monkeypatch, wrong):
    right = ba_att.ba_attention

    def call(query, key, value, *, return_info=False, **options):
        if wrong == "lists":  # blocks of the wrong score
            options["center_keys"], options["score"] = False, "moments"
            query = query + 3.0
        out, info = right(query, key, value, return_info=True, **options)
        if wrong == "output":
            out = 1.001 * out
        if wrong == "random":
            out = out + 1e-7 * torch.rand_like(out)
        return (out, info) if return_info else out

    monkeypatch.setattr(ba_att, "ba_attention", call)
    outcome, data = _run(tmp_path, "ba-att")
    assert outcome["failed"]
    assert not any(row["ok"] for row in data["rows"] if row["sparsity"] is not None)


def test_llsa(tmp_path):
    outcome, data = _run(tmp_path, "llsa")
    assert (outcome["failed"], outcome["failed_peers"]) == ({}, {})
    assert data["gate"]["ok"]
    rows = {row["name"]: row for row in data["rows"]}
    assert rows["LLSA, forward"]["speedup"].keys() == {"dense, SDPA, forward"}
    both = rows["LLSA, forward and backward"]
    assert both["check"]["error"].keys() == {"out", "dq", "dk", "dv"}
    assert both["levels"] == 1


def test_llsa_sees_wrong_gradients(tmp_path):
    config = _config(tmp_path)
    problem = llsa.problems(config)[0]
    inputs = problem.build()
    assert passes(llsa._check(inputs, 1, "forward and backward"))
    exact = llsa._solve

    def solve(attend, leaves, grad_out, direction):
        found = exact(attend, leaves, grad_out, direction)
        return found | {"dv": found["dv"] + (1e-3 if leaves[0].dtype == torch.float32 else 0.0)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llsa, "_solve", solve)
        checked = llsa._check(inputs, 1, "forward and backward")
    assert not passes(checked)


def test_wan(tmp_path):
    outcome, data = _run(tmp_path, "wan", grids=((2, 6, 8),), block_size=16)
    assert (outcome["failed"], outcome["missing"]) == ({}, 0)
    dense, sparse = data["rows"]
    assert (dense["model"], dense["sparsity"], sparse["sparsity"]) == ("mini-wan", None, 0.5)
    assert sparse["check"]["dense_calls"] == {"dense layer": 1}
    assert sparse["check"]["backend"] == "torch"


def test_wan_sees_a_forward_that_is_not_sparse(tmp_path, monkeypatch):
    config = _config(tmp_path, block_size=16)
    monkeypatch.setattr(wan, "apply_sparse_attention", lambda *args: None)
    prepared = wan._prepare_sparse(config, "mini-wan", (2, 6, 8), 0.5, None)
    with pytest.raises(UserInputError):
        prepared.check()


def test_the_large_transformers_have_the_sizes_of_wan():
    from diffusers import WanTransformer3DModel

    for name, parameters in (("wan2.1-1.3b", 1.42e9), ("wan2.1-14b", 14.29e9)):
        with torch.device("meta"):
            model = WanTransformer3DModel(**wan.sizes(name))
        assert sum(x.numel() for x in model.parameters()) == pytest.approx(parameters, rel=5e-3)


def test_an_unknown_model(tmp_path):
    with pytest.raises(UserInputError, match="model"):
        plan(_config(tmp_path, operations=("wan",), models=("wan",)))


def test_peers_are_listed_with_the_reason(tmp_path, monkeypatch):
    config = _config(tmp_path)
    monkeypatch.setattr(BenchConfig, "on_gpu", property(lambda self: True))
    config = _config(tmp_path, dtype="bfloat16", block_size=128)
    found = room.absent_peers(config)
    for package in ("fa3-fwd", "flash-attn-4", "fastvideo-kernel"):
        assert f"{package} is not installed" in found.values()
    present = [peer.name for peer in room.peers_here(config)]
    assert present[:2] == ["dense, cuDNN", "dense, FlashAttention-2"]
    assert {"FlexAttention", "dense, math"} <= set(present)
    # An installed module is found by its name alone.
    monkeypatch.setattr(room, "has_module", lambda name: True)
    assert "FlashAttention-4" in [peer.name for peer in room.peers_here(config)]
    sparse = next(peer for peer in room.PEERS if peer.name == "FlashAttention-4")
    assert "whole blocks" in (sparse.obstacle_at(config, 75_600, 12) or "")
    assert sparse.obstacle_at(config, 75_648, 12) is None
    fine = _config(tmp_path, dtype="bfloat16", block_size=32)
    assert sparse.obstacle_at(fine, 75_648, 12) == "needs blocks of a multiple of 64 tokens, got 32"


def test_modules_are_found_by_dotted_names():
    assert room.has_module("torch.nn")
    assert not room.has_module("torch.no_such_module")
    assert not room.has_module("no_such_package.part")


def test_lists_for_other_kernels():
    case = testing.AttentionCase(len_q=200, len_k=200, block_size=32, density=0.4)
    inputs = testing.make_inputs(case, dtype=torch.float32)
    count, index = room._full_width(inputs, 32)
    mask = room.kept_matrix(inputs, 32)
    assert index.shape == mask.shape == (1, 2, 7, 7)
    assert torch.equal(mask.sum(-1), count)
    for head in range(2):
        for row in range(7):
            kept = index[0, head, row, : count[0, head, row]]
            assert torch.equal(mask[0, head, row].nonzero()[:, 0], kept.long())


def test_kept_pairs_counts_the_short_last_block():
    case = testing.AttentionCase(len_q=100, len_k=70, block_size=32, density=1.0)
    inputs = testing.make_inputs(case, dtype=torch.float32)
    assert block_sparse.kept_pairs(inputs, 32) == 2 * 100 * 70


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["block-sparse", "ba-att", "llsa", "wan"])
def test_on_a_gpu(tmp_path, operation):
    sizes = {"tokens": (1_024,), "grids": ((4, 16, 16),), "heads": 4, "dim": 64, "block_size": 64}
    models = {"models": ("mini-wan",)} if operation == "wan" else {}
    outcome, data = _run(tmp_path, operation, device="cuda", **sizes | models)
    assert (outcome["failed"], outcome["missing"]) == ({}, 0)
    ours = [row for row in data["rows"] if row["ok"] and not row["method"].startswith("dense")]
    assert all(row["peak_mib"] > 0 for row in ours)
    if operation != "wan":
        assert all("graph_ms" in row for row in ours if row["method"] != "FlexAttention")
