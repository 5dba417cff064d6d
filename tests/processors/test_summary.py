"""The summary's numbers against counts by hand."""

import json

import pytest
import torch

from diffsieve import BAAttConfig, UserInputError, apply_sparse_attention, sparsity_summary
from diffsieve.processors.controller import DENSE_LAYER, WARMUP
from diffsieve.processors.timing import StageTimer
from tests import tiny


def _run(config, steps=5, pipe=None, **options):
    pipe = pipe or tiny.wan_pipeline()
    apply_sparse_attention(pipe, config)
    tiny.generate(pipe, steps=steps, **options)
    return sparsity_summary(pipe)


def test_numbers_by_hand():
    # 48 tokens in blocks of 10: 5 blocks, the last with 8 tokens. Density 0.4 keeps 2 of 5 key blocks per row.
    # 5 steps x 2 branches x 3 layers; 2 warm-up steps; layer 0 always dense.
    summary = _run(
        BAAttConfig(density=0.4, block_size=10, min_tokens=0, warmup_steps=2, order="raster", dense_layers=(0,))
    )
    assert (summary.steps_total, summary.steps_dense, summary.target_density) == (5, 2, 0.4)
    assert summary.dense_reasons == {WARMUP: 2 * 2 * 3, DENSE_LAYER: 3 * 2}
    assert summary.layers == {"transformer.blocks.0": 1.0, "transformer.blocks.1": 0.4, "transformer.blocks.2": 0.4}
    assert summary.density_sparse_steps == pytest.approx((1 + 0.4 + 0.4) / 3)
    assert summary.density_overall == pytest.approx((2 * 3 + 3 * (1 + 0.4 + 0.4)) / 15)
    assert [step.dense for step in summary.steps] == [True, True, False, False, False]
    assert [step.density for step in summary.steps] == pytest.approx([1, 1, 0.6, 0.6, 0.6])
    assert summary.steps[4].layers == {"blocks.0": 1.0, "blocks.1": 0.4, "blocks.2": 0.4}
    assert (summary.backend, summary.orders_from, summary.notes) == ("torch", "setting", ())
    # A row keeps 20 keys without the short block and 18 with it: between 18 / 48 and 20 / 48 in each sparse layer.
    low, high = ((1 + 2 * keys / 48) / 3 for keys in (18, 20))
    assert low <= summary.token_density_sparse_steps <= high
    sparse = summary.token_density_sparse_steps
    assert summary.token_density_overall == pytest.approx((2 + 3 * sparse) / 5)


def test_top_p_is_measured_not_assumed():
    config = BAAttConfig(
        density=1.0, top_p=0.5, block_size=8, min_tokens=0, warmup_steps=0, order="raster", dense_layers=()
    )
    density = _run(config).density_sparse_steps
    assert 1 / 6 < density < 1


def test_before_the_first_generation():
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe)
    summary = sparsity_summary(pipe)
    assert (summary.steps_total, summary.density_overall, summary.backend) == (0, None, None)
    assert str(summary) == "sparse attention: nothing has run yet"


def test_short_sequences_run_dense_and_say_so():
    dense = tiny.generate(tiny.wan_pipeline())
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, BAAttConfig(block_size=8, min_tokens=49))
    assert torch.equal(tiny.generate(pipe), dense)
    summary = sparsity_summary(pipe)
    assert summary.dense_reasons == {"short sequence (48 < 49 tokens)": 5 * 2 * 3}
    assert summary.notes == ("every step ran dense: short sequence (48 < 49 tokens)",)
    assert _run(BAAttConfig(block_size=8, min_tokens=48)).steps_dense == 1


def test_text_and_json():
    summary = _run(BAAttConfig(block_size=8, min_tokens=0))
    values = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert values["steps_dense"] == 1
    assert values["steps"][0]["dense"] is True
    text = str(summary)
    for part in (
        "5 steps, 1 dense",
        "asked for 50.0%",
        "kernel                torch (cpu tensors: triton",
        "warm-up 6, dense layer 8",
    ):
        assert part in text


def test_summary_in_the_middle_of_a_generation_counts_what_ran():
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, BAAttConfig(block_size=8, min_tokens=0, warmup_steps=2))
    seen = []

    def look(pipeline, step, timestep, values):
        seen.append((pipeline.sparsity_summary().steps_total, pipeline.sparsity_summary().steps_dense))
        return values

    tiny.generate(pipe, steps=4, callback_on_step_end=look)
    assert seen == [(1, 1), (2, 2), (3, 2), (4, 2)]


def test_cpu_time_of_both_stages_is_measured():
    summary = _run(BAAttConfig(block_size=8, min_tokens=0))
    assert 0 < summary.attention_seconds < 60
    assert 0 < summary.selection_seconds < 60


def test_timer_adds_up():
    timer = StageTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.stage("selection"):
            pass
    assert list(timer.seconds()) == ["selection"]
    assert timer.seconds()["selection"] > 0


def test_two_transformers_are_told_apart():
    summary = _run(BAAttConfig(block_size=8, min_tokens=0, order="raster"), steps=8, pipe=tiny.wan_pipeline(two=True))
    assert {name.rsplit(".", 2)[0] for name in summary.layers} == {"transformer", "transformer_2"}


def test_not_applied():
    with pytest.raises(UserInputError, match=r"pipe\.set_attn_processor\(BAAttProcessor\(\)\)"):
        sparsity_summary(tiny.wan_pipeline())
