"""Recall on captured tensors: against definitions, by head, predicted against got, resumed."""

import json

import pytest
import torch

from diffsieve.compare.shards import Deadline, Shard
from diffsieve.errors import UserInputError
from diffsieve.kernels.ba_att import CANDIDATE_ORDERS, ba_attention, token_orders
from diffsieve.processors import BAAttConfig, apply_sparse_attention, observe_attention, sparsity_summary
from diffsieve.processors.ba_att import kernel_arguments
from diffsieve.study import RecallConfig, capture, captured_files, read_captured, study_recall, write_report
from diffsieve.study.hindsight import BestOrders, errors_of_orders, mass_lost_by_orders, watching
from diffsieve.study.mass import block_mass, kept_share
from diffsieve.study.recall_table import summarize_recall
from diffsieve.study.variants import VARIANTS, Variant
from tests.tiny import HEADS, generate


@pytest.fixture
def captured(pipe, captures):
    config = captures()
    capture(config, pipe=pipe)
    return config.out


@pytest.fixture
def config(captured, tmp_path):
    return RecallConfig(
        captures=captured, out=tmp_path / "study", block_size=16, sparsities=(0.34, 0.6), suites=("fidelity", "sort")
    )


def lines_of(out):
    return [json.loads(line) for path in sorted(out.glob("recall-*.jsonl")) for line in path.read_text().splitlines()]


def test_recalls_lie_between_chance_and_the_exact_choice(config):
    result = study_recall(config)
    assert (result["done"], result["missing"]) == (9, 0)  # 3 layers, 3 steps after the warm-up
    lines = lines_of(config.out)
    assert {line["step"] for line in lines} == {1, 3, 4}
    for line in lines:
        rows = {(row["variant"], row["sparsity"]): row for row in line["rows"]}
        for sparsity in (0.34, 0.6):
            best = rows["oracle raster", sparsity]["recall"]
            assert len(best) == HEADS
            for name in ("order raster", "mean pooling", "antidiagonal 8", "random"):
                assert all(a <= b + 1e-6 for a, b in zip(rows[name, sparsity]["recall"], best, strict=True)), name
            if line["layer"] != "transformer.blocks.0":
                kept = {0.34: 2 / 3, 0.6: 1 / 3}[sparsity]
                assert rows["default", sparsity]["density"] == pytest.approx(kept)
        first = line["layer"] == "transformer.blocks.0"
        assert ("skipped" in rows["preset default", 0.6]) == first


def test_recall_and_error_of_one_variant_written_out(config):
    study_recall(config)
    path = next(path for path in captured_files(config.captures) if "blocks.1-step003" in path.name)
    line = next(x for x in lines_of(config.out) if x["file"].endswith(path.name))
    row = next(r for r in line["rows"] if (r["variant"], r["sparsity"]) == ("mean pooling", 0.6))
    captured = read_captured(path)
    for head in range(HEADS):
        q, k, v = (x[0, head] for x in (captured.query, captured.key, captured.value))
        weights = torch.softmax(captured.scale * q @ k.T, dim=-1)
        means = q.view(3, 16, -1).mean(1) @ k.view(3, 16, -1).mean(1).T
        kept = means.argmax(dim=-1)
        mask = torch.zeros(48, 48, dtype=torch.bool)
        for block, column in enumerate(kept.tolist()):
            mask[block * 16 : block * 16 + 16, column * 16 : column * 16 + 16] = True
        assert row["recall"][head] == pytest.approx(float((weights * mask).sum() / 48), abs=1e-5)
        sparse = torch.softmax((captured.scale * q @ k.T).masked_fill(~mask, -torch.inf), dim=-1) @ v
        dense = weights @ v
        assert row["error"][head] == pytest.approx(float((sparse - dense).norm() / dense.norm()), abs=1e-4)


def test_calibration_chooses_as_in_the_pipeline(config, pipe):
    study_recall(config)
    apply_sparse_attention(
        pipe,
        BAAttConfig(
            sparsity=0.6, budgets="equal", beta=0.5, warmup_steps=1, dense_layers=(), block_size=16, min_tokens=0
        ),
    )
    pipe(
        prompt="a cat moves left",
        num_frames=9,
        height=32,
        width=32,
        num_inference_steps=5,
        guidance_scale=1.0,  # the branch that was captured, alone
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="latent",
    )
    orders = sparsity_summary(pipe).orders
    for line in lines_of(config.out):
        row = next(r for r in line["rows"] if (r["variant"], r["sparsity"]) == ("base", 0.6))
        assert tuple(row["orders"]) == orders[line["layer"]]
        assert {name: len(values) for name, values in row["predicted"].items()} == {"error": HEADS, "recall": HEADS}


def test_the_summary_groups_and_compares(config):
    study_recall(config)
    report = json.loads((config.out / "study.json").read_text(encoding="utf-8"))["recall"]
    assert report["calls"] == 9
    rows = {(row["variant"], row["sparsity"]): row for row in report["rows"]}
    base = rows["base", 0.6]
    assert base["recall"]["n"] == 9 * HEADS
    assert set(base["by_layer"]) == {f"transformer.blocks.{n}" for n in range(3)}
    assert set(base["by_step"]) == {"1", "3", "4"}
    assert [len(values) for values in base["by_head"].values()] == [HEADS] * 3
    for name, predicted in base["predicted"].items():
        assert predicted["got"] == pytest.approx(base[name]["mean"])
        assert predicted["got_minus_predicted"]["mean"] == pytest.approx(predicted["got"] - predicted["predicted"])
    best = rows["hindsight", 0.6]["recall"]["mean"]
    assert all(best >= rows[f"order {name}", 0.6]["recall"]["mean"] - 1e-9 for name in CANDIDATE_ORDERS)
    for order in ("raster", "norm_sort"):
        bound = report["bound"][order]
        assert -1 <= bound["r"]["mean"] <= 1
        assert bound["bound"] >= bound["deviation"] > 0
    assert summarize_recall(lines_of(config.out) * 2)["calls"] == 9


def test_shards_and_legs(config):
    one = study_recall(config, shard=Shard(0, 2))
    assert (one["missing"], one["other_shards_missing"]) == (0, 3)
    late = study_recall(config, shard=Shard(1, 2), deadline=Deadline(1e-9))
    assert (late["missing"], late["other_shards_missing"]) == (3, 0)
    assert study_recall(config)["done"] == 9
    files = [line["file"] for line in lines_of(config.out)]
    assert len(files) == len(set(files)) == 9


def test_without_the_calibrating_step_the_reason_is_given(pipe, captures, tmp_path):
    settings = captures(steps_kept=(3,), layers=(1,))
    capture(settings, pipe=pipe)
    config = RecallConfig(
        captures=settings.out, out=tmp_path / "study", block_size=16, suites=(), variants=("default", "paper")
    )
    study_recall(config)
    (line,) = lines_of(config.out)
    rows = {row["variant"]: row for row in line["rows"]}
    assert rows["default"]["skipped"] == "the step in which BA-Att calibrates was not captured"
    assert "recall" in rows["paper"]
    with pytest.raises(UserInputError, match="captures must hold steps after the warm-up"):
        study_recall(RecallConfig(captures=settings.out, out=tmp_path / "other", warmup=4))
    with pytest.raises(UserInputError, match="must hold results of a study"):
        write_report(tmp_path)


def test_promises_are_error_and_recall_of_the_calibrating_step(config):
    study_recall(config)
    line = next(line for line in lines_of(config.out) if line["layer"] == "transformer.blocks.1")
    row = next(r for r in line["rows"] if (r["variant"], r["sparsity"]) == ("base", 0.6))
    path = next(path for path in captured_files(config.captures) if "blocks.1-step000" in path.name)
    captured = read_captured(path)
    tensors = captured.query, captured.key, captured.value
    selection, rest = kernel_arguments(BAAttConfig(density=0.4, block_size=16, beta=0.5), second_order=True)
    dense = torch.nn.functional.scaled_dot_product_attention(*tensors)
    for head, name in enumerate(row["orders"]):
        out, info = ba_attention(
            *tensors, grid_thw=captured.grid_thw, orders=name, return_info=True, **selection, **rest
        )
        order = token_orders(*tensors[:2], grid_thw=captured.grid_thw, orders=name, block_size=16)
        mass = block_mass(*tensors[:2], order, block_size=16, scale=captured.scale)
        # A quarter of three blocks of queries, at least one, is measured: the middle one of the order.
        rows = torch.arange(48) if order.query is None else order.query.expand(1, HEADS, 48)[0, head]
        out_row, dense_row = out[0, head, rows[16:32]], dense[0, head, rows[16:32]]
        error = (out_row - dense_row).norm() / dense_row.norm()
        assert row["predicted"]["error"][head] == pytest.approx(float(error), rel=1e-3)
        recall = kept_share(mass, info.block_index, info.block_count)[0, head]
        assert row["predicted"]["recall"][head] == pytest.approx(float(recall), abs=1e-5)


@pytest.mark.parametrize("losses", [errors_of_orders, mass_lost_by_orders])
def test_orders_of_the_dense_run_are_those_that_lose_least(losses, pipe):
    watcher, seen = BestOrders(losses, (2,), [0.4], 16, "auto"), []
    with watching(pipe, [watcher]):
        generate(pipe, steps=4)
    with observe_attention(pipe, seen.append, steps=(2,)):
        generate(pipe, steps=4)
    table = watcher.table(0.4)["transformer"]
    assert set(table) == {f"blocks.{n}" for n in range(3)}
    calls = [call for call in seen if call.layer == "transformer.blocks.1"]
    assert len(calls) == 2  # both branches of guidance
    selection, rest = kernel_arguments(BAAttConfig(density=0.4, block_size=16), second_order=True)
    for head in range(HEADS):
        lost = dict.fromkeys(CANDIDATE_ORDERS, 0.0)
        for name in CANDIDATE_ORDERS:
            for call in calls:
                tensors = call.query, call.key, call.value
                out, info = ba_attention(
                    *tensors, grid_thw=call.grid_thw, orders=name, return_info=True, **selection, **rest
                )
                dense = torch.nn.functional.scaled_dot_product_attention(*tensors)[0, head]
                if losses is errors_of_orders:
                    lost[name] += float((out[0, head] - dense).norm() / dense.norm())
                    continue
                order = token_orders(*tensors[:2], grid_thw=call.grid_thw, orders=name, block_size=16)
                mass = block_mass(*tensors[:2], order, block_size=16, scale=tensors[0].shape[-1] ** -0.5)
                lost[name] += 1 - float(kept_share(mass, info.block_index, None)[0, head])
        assert lost[table["blocks.1"][head]] <= min(lost.values()) + 1e-6


@pytest.mark.parametrize("order", ["auto", "hilbert"])
def test_budgets_are_measured_as_in_the_pipeline(captured, tmp_path, pipe, monkeypatch, order):
    shares = Variant("an order, with shared blocks", {"order": order, "budgets": "auto"})
    monkeypatch.setitem(VARIANTS, "shares", shares)
    monkeypatch.setitem(VARIANTS, "equal", Variant("the same without", {"order": order}))
    config = RecallConfig(
        captures=captured, out=tmp_path / "study", block_size=4, suites=(), variants=("shares", "equal")
    )
    study_recall(config)
    settings = {"warmup_steps": 1, "dense_layers": (), "block_size": 4, "min_tokens": 0, "order": order}
    apply_sparse_attention(pipe, BAAttConfig(sparsity=0.5, budgets="auto", beta=0.5, **settings))
    generate(pipe, guidance=1.0)  # the branch that was captured, alone
    summary = sparsity_summary(pipe)
    lines = lines_of(config.out)
    for line in lines:
        rows = {row["variant"]: row for row in line["rows"]}
        assert tuple(rows["shares"]["budgets"]) == summary.budgets[line["layer"]]
        assert rows["shares"]["density"] == rows["equal"]["density"]
        assert "predicted" not in rows["shares"]
    assert any(len(set(row["budgets"])) > 1 for line in lines for row in line["rows"] if "budgets" in row)
