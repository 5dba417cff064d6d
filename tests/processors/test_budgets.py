"""Blocks shared among the heads of a layer: chosen in the last dense step, saved, loaded, equal where they must be."""

import json

import pytest
import torch

from diffsieve import BAAttConfig, UserInputError, apply_sparse_attention, sparsity_summary
from diffsieve.kernels.ba_att import (
    CustomSelection,
    ba_attention,
    budgets_of_levels,
    calibrate_budgets,
    calibrate_orders,
    choose_budgets,
    choose_orders,
    kept_blocks,
    select_blocks,
)
from diffsieve.processors import ba_att as processor
from diffsieve.processors import recorded_masks, save_orders, use_custom_selection
from diffsieve.processors.calibration import choose_all_budgets
from diffsieve.processors.install import controllers_of
from tests import tiny

# 48 tokens: 12 blocks, of which 6 are kept, with levels of one block.
BLOCK, KEPT, BLOCKS = 4, 6, 12


def _config(**options):
    return BAAttConfig(**{"block_size": BLOCK, "min_tokens": 0, "warmup_steps": 2, "budgets": "auto"} | options)


def _applied(pipe, **options):
    apply_sparse_attention(pipe, _config(**options))
    return pipe


def test_choice_is_the_mean_over_the_branches_of_the_last_dense_step():
    pipe = _applied(tiny.wan_pipeline())
    captured = []
    attn = pipe.transformer.blocks[2].attn1
    attn.register_forward_hook(lambda module, args, output: captured.append(args))
    tiny.generate(pipe)
    errors = []
    for hidden_states, _, _, rotary in captured[2:4]:  # both branches of step 1
        tensors = [x.transpose(1, 2) for x in attn.processor._family.project(attn, hidden_states, rotary)]
        how = {"density": 0.5, "block_size": BLOCK, "score": "residual", "compensate": "centroid", "beta": 1.0}
        how |= {"grid_thw": tiny.GRID}
        orders = choose_orders(calibrate_orders(*tensors, **how))
        errors.append(calibrate_budgets(*tensors, orders=orders, **how))
    levels = choose_budgets(torch.stack(errors).mean(0), KEPT, BLOCKS)
    expected = budgets_of_levels(levels.tolist(), KEPT, BLOCKS)
    assert len(set(expected)) > 1
    summary = sparsity_summary(pipe)
    assert summary.budgets["transformer.blocks.2"] == tuple(expected)
    assert summary.budgets_from == "calibration"
    assert attn.processor._budgets.tolist() == expected
    assert f"{min(expected)} to {max(expected)} a row, 6 on average (from calibration)" in str(summary)
    assert json.loads(json.dumps(summary.to_dict()))["budgets"]["transformer.blocks.2"] == expected


def test_total_and_density_are_those_of_equal_budgets():
    pipe, equal = _applied(tiny.wan_pipeline()), _applied(tiny.wan_pipeline(), budgets="equal")
    assert not torch.equal(tiny.generate(pipe), tiny.generate(equal))
    summary, expected = sparsity_summary(pipe), sparsity_summary(equal)
    assert (expected.budgets, expected.budgets_from) == ({}, None)
    assert all(sum(blocks) == 2 * KEPT for blocks in summary.budgets.values())
    assert summary.steps == expected.steps
    assert summary.density_overall == expected.density_overall
    assert summary.token_density_overall == expected.token_density_overall


def test_equal_takes_the_path_without_budgets(monkeypatch):
    given = []

    def attend(*tensors, budgets, **options):
        given.append(budgets)
        return ba_attention(*tensors, **options)

    monkeypatch.setattr(processor, "ba_attention", attend)
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, BAAttConfig(budgets="equal", block_size=BLOCK, min_tokens=0, warmup_steps=2))
    tiny.generate(pipe)
    assert given == [None] * (3 * 2 * 2)  # steps, branches, sparse layers
    assert all(layer.processor._budgets is None for layer in controllers_of(pipe)[0].layers)


def test_masks_hold_what_each_head_keeps():
    pipe = _applied(tiny.wan_pipeline(), record_masks=(2,))
    tiny.generate(pipe)
    (mask,) = recorded_masks(pipe)
    budgets = sparsity_summary(pipe).budgets["transformer.blocks.2"]
    for head, blocks in enumerate(budgets):
        assert mask.matrix(head).sum(-1).tolist() == [blocks] * BLOCKS


def test_one_order_for_all_heads_can_have_them_too():
    pipe = _applied(tiny.wan_pipeline(), order="hilbert")
    tiny.generate(pipe)
    summary = sparsity_summary(pipe)
    assert (summary.orders_from, summary.budgets_from, summary.steps_dense) == ("setting", "calibration", 2)
    assert any(len(set(blocks)) > 1 for blocks in summary.budgets.values())


def test_each_generation_measures_anew_and_any_shape_gets_its_own_numbers():
    pipe = _applied(tiny.wan_pipeline())
    tiny.generate(pipe, prompt="a dog moves right", height=48)
    taller = sparsity_summary(pipe).budgets
    assert all(sum(blocks) == 2 * kept_blocks(18, 0.5) for blocks in taller.values())
    tiny.generate(pipe)
    fresh = _applied(tiny.wan_pipeline())
    tiny.generate(fresh)
    assert sparsity_summary(pipe).budgets == sparsity_summary(fresh).budgets


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_saved_tables_give_the_same_clip_without_calibration(tmp_path, two):
    path = tmp_path / "orders.json"
    pipe = _applied(tiny.wan_pipeline(two=two))
    expected = tiny.generate(pipe, steps=8)
    budgets = sparsity_summary(pipe).budgets
    assert len({name.split(".")[0] for name in budgets}) == (2 if two else 1)
    save_orders(pipe, path)
    assert json.loads(path.read_text())["version"] == 2

    again = _applied(tiny.wan_pipeline(two=two), orders=path)
    out = tiny.generate(again, steps=8)
    summary = sparsity_summary(again)
    assert (summary.budgets_from, summary.budgets) == ("table", budgets)
    if not two:
        assert torch.equal(out, expected)
    save_orders(again, tmp_path / "copy.json")
    assert json.loads((tmp_path / "copy.json").read_text()) == json.loads(path.read_text())


def test_a_table_without_budgets_and_a_setting_without_them_mean_equal_ones(tmp_path):
    path = tmp_path / "orders.json"
    pipe = _applied(tiny.wan_pipeline(), budgets="equal")
    expected = tiny.generate(pipe)
    save_orders(pipe, path)
    assert json.loads(path.read_text())["version"] == 1  # any reader of orders takes it
    old = _applied(tiny.wan_pipeline(), orders=path)
    assert torch.equal(tiny.generate(old), expected)
    assert (sparsity_summary(old).budgets, sparsity_summary(old).budgets_from) == ({}, None)
    as_dict = _applied(tiny.wan_pipeline(), orders=json.loads(path.read_text())["transformers"])
    assert torch.equal(tiny.generate(as_dict), expected)

    tiny.generate(pipe := _applied(tiny.wan_pipeline()))
    save_orders(pipe, path)
    equal = _applied(tiny.wan_pipeline(), orders=path, budgets="equal")
    tiny.generate(equal)
    assert sparsity_summary(equal).budgets == {}


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ({"blocks.1": [1, -1]}, r"got none for 'blocks\.2'"),
        ({"blocks.1": [1, -1], "blocks.2": [0]}, r"budgets of blocks\.2 .* per head \(2\), 0 in total, got \[0\]"),
        ({"blocks.1": [1, 1], "blocks.2": [0, 0]}, r"budgets of blocks\.1 .* got \[1, 1\]"),
        ({"blocks.1": [4, -4], "blocks.2": [0, 0]}, r"budgets of blocks\.1 .* in \[-3, 3\] .* got \[4, -4\]"),
        ({"blocks.1": [True, -1], "blocks.2": [0, 0]}, r"budgets of blocks\.1 .* got \[True, -1\]"),
        ({"blocks.1": "00", "blocks.2": [0, 0]}, r"budgets of blocks\.1 .* got '00'"),
        (
            {"blocks.1": [0, 0], "blocks.2": [0, 0], "blocks.9": [0, 0]},
            r"a layer 'blocks\.9', which must be among blocks\.0, blocks\.1",
        ),
        ([], r"must hold a table for each transformer, got \[\]"),
    ],
)
def test_wrong_tables(tmp_path, budgets, message):
    content = {"format": "diffsieve-orders", "version": 2}
    content |= {"transformers": {"transformer": {"blocks.1": [0, 0], "blocks.2": [0, 0]}}}
    content |= {"budgets": budgets if isinstance(budgets, list) else {"transformer": budgets}}
    path = tmp_path / "orders.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserInputError, match=message):
        _applied(tiny.wan_pipeline(), orders=path)


def test_layers_of_a_table_may_be_numbers(tmp_path):
    content = {"format": "diffsieve-orders", "version": 2, "budgets": {"transformer": {"1": [1, -1], "2": [0, 0]}}}
    content |= {"transformers": {"transformer": {"1": [0, 0], "2": [0, 0]}}}
    path = tmp_path / "orders.json"
    path.write_text(json.dumps(content))
    pipe = _applied(tiny.wan_pipeline(), orders=path)
    tiny.generate(pipe)
    assert len(set(sparsity_summary(pipe).budgets["transformer.blocks.1"])) == 2


def test_budgets_that_are_not_chosen_yet_are_named(tmp_path):
    pipe = _applied(tiny.wan_pipeline(), order="hilbert")
    with pytest.raises(UserInputError, match=r"transformer has no budgets .*equal.* to save yet: run one generation"):
        save_orders(pipe, tmp_path / "orders.json")
    equal = _applied(tiny.wan_pipeline(), order="hilbert", budgets="equal")
    save_orders(equal, tmp_path / "orders.json")


def test_a_transformer_without_a_table_of_budgets_has_equal_ones(tmp_path):
    path = tmp_path / "orders.json"
    content = {"format": "diffsieve-orders", "version": 2, "budgets": {"transformer_2": {"blocks.1": [1, -1]}}}
    content |= {"transformers": {"transformer": {"blocks.1": [0, 0], "blocks.2": [0, 0]}}}
    path.write_text(json.dumps(content))
    pipe = _applied(tiny.wan_pipeline(), orders=path)
    tiny.generate(pipe)
    assert (sparsity_summary(pipe).orders_from, sparsity_summary(pipe).budgets) == ("table", {})


@pytest.mark.parametrize(
    "options", [{"top_p": 0.7}, {"density": 1.0}, {"density": 0.05}], ids=["top_p", "all", "one block"]
)
def test_equal_where_nothing_can_be_shared(options):
    pipe, equal = _applied(tiny.wan_pipeline(), **options), _applied(tiny.wan_pipeline(), budgets="equal", **options)
    assert torch.equal(tiny.generate(pipe), tiny.generate(equal))
    assert all(len(set(blocks)) == 1 for blocks in sparsity_summary(pipe).budgets.values())


def test_one_head_keeps_its_blocks():
    pipe = _applied(tiny.wan_pipeline(num_attention_heads=1), order="hilbert")
    equal = _applied(tiny.wan_pipeline(num_attention_heads=1), order="hilbert", budgets="equal")
    assert torch.equal(tiny.generate(pipe), tiny.generate(equal))
    assert sparsity_summary(pipe).budgets == {}


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_a_custom_selection_keeps_its_own_and_no_step_is_dense_for_budgets(two):
    def select(query, key, *, kept, block_size, scale):
        rows = *query.shape[:2], -(-query.shape[2] // block_size), -(-key.shape[2] // block_size)
        return select_blocks(torch.zeros(rows), kept), None

    results = []
    for budgets in ("auto", "equal"):
        pipe = _applied(tiny.wan_pipeline(two=two), order="raster", budgets=budgets)
        use_custom_selection(pipe, lambda layer: CustomSelection(select=select))
        results.append(tiny.generate(pipe, steps=8))
        summary = sparsity_summary(pipe)
        assert (summary.budgets, summary.budgets_from, summary.notes) == ({}, None, ())
        assert summary.steps_dense == 2
    assert torch.equal(*results)


def test_layers_that_no_step_measured_keep_equal_ones_and_the_summary_says_so():
    errors = torch.tensor([[[9.0, 1.0, 1.0], [0.1, 0.09, 1.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    levels, measured = choose_all_budgets(errors, KEPT, BLOCKS)
    assert levels[0].tolist() == [3, -3]
    assert levels[1].tolist() == [0, 0]
    assert measured.tolist() == [True, False]
    for order, told in (("auto", "use the fixed order frame_hilbert and keep equal"), ("hilbert", "and keep equal")):
        pipe = _applied(tiny.wan_pipeline(), warmup_steps=0, order=order)
        tiny.generate(pipe)
        summary = sparsity_summary(pipe)
        assert set(summary.budgets.values()) == {(KEPT, KEPT)}
        assert summary.budgets_from == "fallback"
        assert f"{told} numbers of blocks in all heads" in summary.notes[0]


def test_nan_in_the_calibrating_step_is_named():
    pipe = _applied(tiny.wan_pipeline(), order="hilbert")
    calls = []

    def break_values(module, args, output):
        calls.append(output)
        return output * torch.nan if len(calls) > 2 else output

    pipe.transformer.blocks[1].attn1.to_v.register_forward_hook(break_values)
    for _ in range(2):
        calls.clear()
        with pytest.raises(UserInputError, match=r"got NaN in transformer\.blocks\.1 \(step 1\)"):
            tiny.generate(pipe)


def test_nothing_to_save_before_they_are_measured(tmp_path):
    pipe = _applied(tiny.wan_pipeline(), order="hilbert")
    with pytest.raises(UserInputError, match="run one generation past its warm-up first"):
        save_orders(pipe, tmp_path / "orders.json")
    assert not list(tmp_path.iterdir())
