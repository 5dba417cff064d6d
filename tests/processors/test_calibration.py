"""Orders per head: chosen in the last dense step, saved, loaded, validated."""

import json
from contextlib import nullcontext

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend

from diffsieve import BAAttConfig, UserInputError, apply_sparse_attention, sparsity_summary
from diffsieve.kernels.ba_att import CANDIDATE_ORDERS, calibrate_orders, choose_orders
from diffsieve.processors import ba_att as processor
from diffsieve.processors import save_orders
from diffsieve.processors.calibration import FALLBACK_ORDER, choose_all_orders
from tests import tiny


def _config(**options):
    return BAAttConfig(**{"block_size": 8, "min_tokens": 0, "warmup_steps": 2} | options)


def _applied(pipe, **options):
    apply_sparse_attention(pipe, _config(**options))
    return pipe


def test_choice_is_the_mean_over_the_branches_of_the_last_dense_step():
    pipe = _applied(tiny.wan_pipeline())
    captured = []
    attn = pipe.transformer.blocks[1].attn1
    attn.register_forward_hook(lambda module, args, output: captured.append(args))
    tiny.generate(pipe)
    errors = []
    for hidden_states, _, _, rotary in captured[2:4]:  # both branches of step 1
        project = attn.processor._family.project
        tensors = (x.transpose(1, 2) for x in project(attn, hidden_states, rotary))
        how = {"density": 0.5, "block_size": 8, "score": "residual", "compensate": "centroid"}
        errors.append(calibrate_orders(*tensors, grid_thw=tiny.GRID, **how))
    expected = choose_orders(torch.stack(errors).mean(0)).tolist()
    assert sparsity_summary(pipe).orders["transformer.blocks.1"] == tuple(CANDIDATE_ORDERS[i] for i in expected)
    assert attn.processor._orders.tolist() == expected


@pytest.mark.parametrize("plain", [True, False], ids=["", "another backend chosen"])
def test_measures_against_the_dense_call_of_the_step_where_that_is_plain_attention(plain, monkeypatch):
    pipe, given = _applied(tiny.wan_pipeline()), []

    def calibrate(*tensors, dense, **options):
        given.append((tensors, dense))
        return calibrate_orders(*tensors, dense=dense, **options)

    monkeypatch.setattr(processor, "calibrate_orders", calibrate)
    with nullcontext() if plain else attention_backend("_native_math"):
        tiny.generate(pipe)
    assert len(given) == 2 * (len(pipe.transformer.blocks) - 1)  # branches; the first layer is always dense
    for tensors, dense in given:
        if plain:
            assert torch.equal(dense, torch.nn.functional.scaled_dot_product_attention(*tensors))
        else:
            assert dense is None


def test_each_generation_calibrates_anew():
    pipe = _applied(tiny.wan_pipeline())
    tiny.generate(pipe, prompt="a dog moves right")
    tiny.generate(pipe)
    fresh = _applied(tiny.wan_pipeline())
    tiny.generate(fresh)
    assert sparsity_summary(pipe).orders == sparsity_summary(fresh).orders


def test_unmeasured_layers_take_the_fallback():
    errors = torch.zeros(2, 3, len(CANDIDATE_ORDERS) + 1)
    errors[1, :, :-1], errors[1, :, 2], errors[1, :, -1] = 0.8, 0.2, 2.0  # two calls
    chosen, measured = choose_all_orders(errors)
    assert measured.tolist() == [False, True]
    assert chosen.tolist() == [[CANDIDATE_ORDERS.index(FALLBACK_ORDER)] * 3, [2] * 3]


@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
def test_saved_orders_give_the_same_clip_without_calibration(tmp_path, two):
    path = tmp_path / "orders.json"
    pipe = _applied(tiny.wan_pipeline(two=two))
    expected = tiny.generate(pipe, steps=8)
    orders = sparsity_summary(pipe).orders
    save_orders(pipe, path)
    assert [file.name for file in tmp_path.iterdir()] == ["orders.json"]

    again = _applied(tiny.wan_pipeline(two=two), orders=path)
    out = tiny.generate(again, steps=8)
    summary = sparsity_summary(again)
    assert (summary.orders_from, summary.orders) == ("table", orders)
    assert summary.steps_dense == 2  # no dense step for the second transformer either
    if not two:
        assert torch.equal(out, expected)

    content = json.loads(path.read_text())["transformers"]["transformer"]
    as_dict = _applied(tiny.wan_pipeline(), orders=content)
    tiny.generate(as_dict)
    assert sparsity_summary(as_dict).orders["transformer.blocks.1"] == tuple(content["blocks.1"])


def test_orders_by_number_without_warmup():
    pipe = _applied(tiny.wan_pipeline(), orders={1: [0, 2], 2: ["norm_sort", 4]}, warmup_steps=0)
    tiny.generate(pipe)
    summary = sparsity_summary(pipe)
    assert summary.orders["transformer.blocks.1"] == ("raster", "hilbert")
    assert summary.orders["transformer.blocks.2"] == ("norm_sort", "norm_sort")
    assert (summary.steps_dense, summary.notes) == (0, ())


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ({1: [0, 0]}, r"no|none for 'blocks\.2'"),
        ({1: [0, 0], 2: [0]}, r"blocks\.2 .* one entry per head \(2\), got 1 entries"),
        ({1: [0, 0], 2: [0, 9]}, r"blocks\.2 .* got 9"),
        ({1: [0, 0], 2: [0, "zigzag"]}, r"blocks\.2 .* got 'zigzag'"),
        ({1: [0, 0], 2: "raster"}, r"blocks\.2 .* got 'raster'"),
        ({1: [0, 0], 2: [0, 0], 7: [0, 0]}, r"layer 'blocks\.7' that the model does not have"),
        ({"transformer_2": {"blocks.1": [0, 0]}}, "table for transformer, got transformer_2"),
        ("missing.json", "no such file: .*missing.json"),
    ],
)
def test_wrong_tables(orders, message):
    with pytest.raises(UserInputError, match=message):
        _applied(tiny.wan_pipeline(), orders=orders)


@pytest.mark.parametrize(
    "content", ["{", '{"format": "other"}', "[1]", "[" * 100_000], ids=["half", "other", "list", "deep"]
)
def test_wrong_files(tmp_path, content):
    path = tmp_path / "orders.json"
    path.write_text(content)
    with pytest.raises(UserInputError, match="orders"):
        _applied(tiny.wan_pipeline(), orders=path)


def test_nothing_to_save_yet(tmp_path):
    pipe = _applied(tiny.wan_pipeline())
    with pytest.raises(UserInputError, match="no orders to save yet"):
        save_orders(pipe, tmp_path / "orders.json")
    assert not list(tmp_path.iterdir())


def test_unwritable_target_leaves_nothing(tmp_path):
    pipe = _applied(tiny.wan_pipeline())
    tiny.generate(pipe)
    with pytest.raises(UserInputError, match=r"path must be .*, got .*/missing/orders\.json: No such file"):
        save_orders(pipe, tmp_path / "missing" / "orders.json")
    (tmp_path / "orders.json").mkdir()
    with pytest.raises(UserInputError, match=r"path must be .*, got .*/orders\.json: Is a directory"):
        save_orders(pipe, tmp_path / "orders.json")
    assert [file.name for file in tmp_path.iterdir()] == ["orders.json"]
