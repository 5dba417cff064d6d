"""The warm-up in whole pipelines: which steps run dense, in every situation that could confuse the count."""

import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import FirstBlockCacheConfig, MagCacheConfig, UniPCMultistepScheduler, WanVideoToVideoPipeline
from diffusers.modular_pipelines import WanBlocks

from diffsieve import BAAttConfig, BAAttProcessor, UserInputError, apply_sparse_attention, sparsity_summary
from diffsieve.processors.controller import CALIBRATION, DENSE_LAYER, WARMUP
from tests import tiny

PIPELINES = {
    "t2v": (tiny.wan_pipeline, "context"),
    "i2v": (tiny.wan_image_pipeline, "scheduler"),
    "v2v": (lambda: tiny.wan_video_pipeline(), "scheduler"),
    "vace": (tiny.wan_vace_pipeline, "scheduler"),
}
# Video to video runs 80 % of the steps by default; all of them make the pipelines comparable.
_ALL_STEPS = {"v2v": {"strength": 1.0}}


def _config(**options):
    return BAAttConfig(**{"block_size": 8, "min_tokens": 0, "warmup_steps": 2, "dense_layers": ()} | options)


def _sparse(pipe, **options):
    apply_sparse_attention(pipe, _config(**options))
    return pipe


def _dense(pipe):
    """Steps of the latest generation that ran dense, and the number of all steps."""
    summary = sparsity_summary(pipe)
    return [step.step for step in summary.steps if step.dense], summary.steps_total


@pytest.fixture(params=PIPELINES)
def kind(request):
    return request.param


@pytest.fixture
def pipe(kind):
    return _sparse(PIPELINES[kind][0]())


def _generate(pipe, kind, steps, **options):
    return tiny.generate(pipe, steps=steps, **_ALL_STEPS.get(kind, {}) | options)


def test_warmup_then_sparse_and_again(pipe, kind):
    first = _generate(pipe, kind, 5)
    assert _dense(pipe) == ([0, 1], 5)
    assert sparsity_summary(pipe).step_source == PIPELINES[kind][1]
    _generate(pipe, kind, 4)
    assert _dense(pipe) == ([0, 1], 4)
    assert torch.equal(_generate(pipe, kind, 5), first)  # nothing carries over from one generation to the next


def test_applied_after_a_dense_generation(kind):
    # diffusers caches which modules listen to the context at the first call.
    pipe = PIPELINES[kind][0]()
    _generate(pipe, kind, 2)
    _generate(_sparse(pipe), kind, 5)
    assert _dense(pipe) == ([0, 1], 5)
    assert sparsity_summary(pipe).step_source == PIPELINES[kind][1]


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_exception_in_between(pipe, kind, stop):
    expected = _generate(pipe, kind, 5)

    def fail(pipeline, step, timestep, values):
        if step == stop:
            raise RuntimeError("stopped by the test")
        return values

    with pytest.raises(RuntimeError, match="stopped"):
        _generate(pipe, kind, 5, callback_on_step_end=fail)
    assert torch.equal(_generate(pipe, kind, 5), expected)
    assert _dense(pipe) == ([0, 1], 5)


def test_exception_inside_a_forward(pipe, kind):
    expected = _generate(pipe, kind, 5)
    block, calls = pipe.transformer.blocks[1], []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 5:  # the first branch of step 2
            raise RuntimeError("stopped by the test")

    handle = block.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stopped"):
        _generate(pipe, kind, 5)
    handle.remove()
    assert torch.equal(_generate(pipe, kind, 5), expected)


def test_interrupt(pipe, kind):
    expected = _generate(pipe, kind, 5)

    def interrupt(pipeline, step, timestep, values):
        pipeline._interrupt = step >= 2
        return values

    _generate(pipe, kind, 5, callback_on_step_end=interrupt)
    assert _dense(pipe) == ([0, 1], 3)
    assert torch.equal(_generate(pipe, kind, 5), expected)


@pytest.mark.parametrize(("guidance", "branches"), [(1.0, 1), (3.0, 2)])
def test_guidance_runs_steps_twice_not_more_of_them(pipe, kind, guidance, branches):
    _generate(pipe, kind, 5, guidance=guidance)
    assert _dense(pipe) == ([0, 1], 5)
    layers = 5 if kind == "vace" else 3
    assert sparsity_summary(pipe).dense_reasons == {WARMUP: 2 * layers * branches}


def test_scheduler_swapped_afterwards(pipe, kind):
    _generate(pipe, kind, 5)
    pipe.scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    _generate(pipe, kind, 6)
    assert _dense(pipe) == ([0, 1], 6)


@pytest.mark.parametrize(("warmup", "dense"), [(0.2, [0]), (3, [0, 1, 2]), (0.0, [])])
def test_strength_below_one(warmup, dense):
    pipe = _sparse(tiny.wan_video_pipeline(), warmup_steps=warmup)
    tiny.generate(pipe, steps=10, strength=0.5)  # runs 5 of the 10 steps
    assert _dense(pipe) == (dense, 5)


def test_warmup_until_sigma_with_strength_below_one():
    pipe = tiny.wan_video_pipeline()
    pipe.scheduler.set_timesteps(10)
    sigmas = pipe.scheduler.sigmas.tolist()
    _sparse(pipe, warmup_steps=0, warmup_until_sigma=(sigmas[6] + sigmas[7]) / 2)
    tiny.generate(pipe, steps=10, strength=0.5)  # steps 5 to 9 of the schedule: 5 and 6 are above the limit
    assert _dense(pipe) == ([0, 1], 5)
    assert sparsity_summary(pipe).orders_from == "calibration"


def test_a_pipeline_made_from_another_counts_its_own_steps():
    pipe = _sparse(tiny.wan_pipeline(), warmup_steps=0.2)
    tiny.generate(pipe, steps=5)
    other = WanVideoToVideoPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    tiny.generate(other, steps=20, strength=0.5)  # 10 steps; the first pipeline still says 5
    assert _dense(other) == ([0, 1], 10)


@pytest.mark.parametrize(("kind", "layers"), [("t2v", 3), ("i2v", 3), ("vace", 5)])
def test_two_transformers(kind, layers):
    build, source = PIPELINES[kind]
    pipe = _sparse(build(two=True))
    tiny.generate(pipe, steps=8)  # sigmas 1, .95, .9, .83, ...: three steps of the first, five of the second
    summary = sparsity_summary(pipe)
    assert summary.step_source == source
    by_transformer = [(step.transformer, step.step, step.dense) for step in summary.steps]
    first = [("transformer", i, i < 2) for i in range(3)]
    # The second starts after the warm-up: its first step is dense to calibrate it.
    assert by_transformer == first + [("transformer_2", i, i == 3) for i in range(3, 8)]
    assert (summary.steps_total, summary.steps_dense) == (8, 3)
    assert summary.dense_reasons == {WARMUP: 2 * layers * 2, CALIBRATION: layers * 2}
    assert {name.split(".")[0] for name in summary.orders} == {"transformer", "transformer_2"}


def test_two_transformers_with_a_fixed_order_need_no_second_dense_step():
    pipe = _sparse(tiny.wan_pipeline(two=True), order="hilbert", budgets="equal")
    tiny.generate(pipe, steps=8)
    assert _dense(pipe) == ([0, 1], 8)


@pytest.mark.parametrize("density", [0.5, 0.05, 0.95, 1.0])
def test_a_second_dense_step_is_for_what_it_can_measure(density):
    pipe = _sparse(tiny.wan_pipeline(two=True), order="hilbert", density=density)
    tiny.generate(pipe, steps=8)
    assert _dense(pipe) == ([0, 1, 3] if density == 0.5 else [0, 1], 8)
    assert (sparsity_summary(pipe).budgets == {}) == (density != 0.5)


def test_warmup_into_the_second_transformer():
    pipe = _sparse(tiny.wan_pipeline(two=True), warmup_steps=5)
    tiny.generate(pipe, steps=8)
    summary = sparsity_summary(pipe)
    assert [step.step for step in summary.steps if step.dense] == [0, 1, 2, 3, 4]
    assert (summary.orders_from, summary.notes) == ("calibration", ())


def test_first_block_cache_skips_layers_not_steps():
    pipe = tiny.wan_pipeline(layers=4)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.05))
    _sparse(pipe)
    for _ in range(2):
        tiny.generate(pipe, steps=12)
        summary = sparsity_summary(pipe)
        assert (summary.steps_total, summary.steps_dense) == (12, 2)
        skipped = [step for step in summary.steps if len(step.layers) == 1]
        assert skipped  # the cache did something: steps in which only the first block ran
        assert all(0.4 < step.density < 0.6 for step in summary.steps if not step.dense)


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_a_cache_that_skips_all_layers_skips_no_step(kind):
    build, source = PIPELINES[kind]
    pipe = _sparse(build())
    pipe.transformer.enable_cache(MagCacheConfig(num_inference_steps=12, mag_ratios=[1.0] * 12))
    for _ in range(2):
        tiny.generate(pipe, steps=12)
        summary = sparsity_summary(pipe)
        assert _dense(pipe) == ([0, 1], 12)
        assert (summary.step_source, summary.orders_from, summary.notes) == (source, "calibration", ())
        assert [step.density for step in summary.steps].count(None) > 3  # nothing ran in them


def test_a_step_that_the_cache_left_to_a_dense_layer_is_not_dense():
    pipe = tiny.wan_pipeline(layers=4)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.05))
    _sparse(pipe, dense_layers=(0,))
    tiny.generate(pipe, steps=12)
    assert [len(step.layers) for step in sparsity_summary(pipe).steps].count(1) > 1  # the first block alone ran
    assert _dense(pipe) == ([0, 1], 12)
    assert sparsity_summary(pipe).steps_dense == 2


def test_first_block_cache_enabled_afterwards():
    pipe = _sparse(tiny.wan_pipeline(layers=4))
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.05))
    tiny.generate(pipe, steps=12)
    assert _dense(pipe) == ([0, 1], 12)
    pipe.transformer.disable_cache()
    tiny.generate(pipe, steps=6)
    assert _dense(pipe) == ([0, 1], 6)


@pytest.mark.parametrize("before", [True, False], ids=["applied-before-offload", "applied-after-offload"])
def test_model_cpu_offload(before):
    # accelerate's hooks with the CPU as the execution device: they replace `forward` and are set anew after each call.
    pipe = tiny.wan_pipeline()
    expected = tiny.generate(_sparse(tiny.wan_pipeline()), steps=5)
    if before:
        _sparse(pipe)
    pipe.enable_model_cpu_offload(device="cpu:0")
    if not before:
        _sparse(pipe)
    for _ in range(3):
        assert torch.equal(tiny.generate(pipe, steps=5), expected)
        assert _dense(pipe) == ([0, 1], 5)
        assert sparsity_summary(pipe).step_source == "context"
    remove_hook_from_module(pipe.transformer)


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_group_offload(offload_type):
    expected = tiny.generate(_sparse(tiny.wan_pipeline()))
    pipe = _sparse(tiny.wan_pipeline())
    options = {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type=offload_type, **options)
    for _ in range(2):
        assert torch.equal(tiny.generate(pipe), expected)
        assert _dense(pipe) == ([0, 1], 5)


def test_single_step_generations_of_a_transformer_without_its_pipeline():
    pipe = tiny.wan_video_pipeline()
    _sparse(pipe.transformer)
    for _ in range(2):  # the same timestep again: only the end of the pipeline call tells them apart
        tiny.generate(pipe, steps=1, strength=1.0)
        assert sparsity_summary(pipe).dense_reasons == {WARMUP: 2 * 3}


def test_transformer_without_its_pipeline():
    pipe = tiny.wan_pipeline()
    _sparse(pipe.transformer)  # the context of WanPipeline tells the step
    tiny.generate(pipe, steps=5)
    assert _dense(pipe) == ([0, 1], 5)

    pipe = tiny.wan_video_pipeline()
    _sparse(pipe.transformer)  # no context: timesteps are counted
    for _ in range(2):
        tiny.generate(pipe, steps=5, strength=1.0)
        assert _dense(pipe) == ([0, 1], 5)
    assert sparsity_summary(pipe).step_source == "timestep"


def test_share_of_unknown_steps_is_an_error():
    pipe = tiny.wan_video_pipeline()
    _sparse(pipe.transformer, warmup_steps=0.2)
    for _ in range(2):
        with pytest.raises(UserInputError, match="warmup_steps"):
            tiny.generate(pipe)


def test_noise_level_of_unknown_steps_is_an_error():
    pipe = tiny.wan_video_pipeline()
    _sparse(pipe.transformer, warmup_until_sigma=0.9)
    for _ in range(2):
        with pytest.raises(UserInputError, match="warmup_until_sigma"):
            tiny.generate(pipe)


@pytest.mark.parametrize(("warmup", "note"), [(9, "warmup_steps=9 covers all 5"), (1.0, "warmup_steps=1.0 covers")])
def test_warmup_longer_than_the_steps_is_all_dense_and_said(warmup, note, caplog):
    dense = tiny.generate(tiny.wan_pipeline())
    pipe = _sparse(tiny.wan_pipeline(), warmup_steps=warmup)
    assert torch.equal(tiny.generate(pipe), dense)
    summary = sparsity_summary(pipe)
    assert (summary.steps_dense, summary.density_overall, summary.density_sparse_steps) == (5, 1.0, None)
    assert summary.notes[0].startswith(note)
    assert note in str(summary)
    assert note in caplog.text


def test_warmup_until_sigma_beyond_the_end_is_said():
    pipe = _sparse(tiny.wan_pipeline(), warmup_steps=0, warmup_until_sigma=0.0)
    tiny.generate(pipe, steps=3)
    assert _dense(pipe) == ([0, 1, 2], 3)
    assert "every step ran dense" in sparsity_summary(pipe).notes[0]


def test_no_warmup_falls_back_to_a_fixed_order_and_says_so():
    pipe = _sparse(tiny.wan_pipeline(), warmup_steps=0, dense_layers=(0,))
    tiny.generate(pipe)
    summary = sparsity_summary(pipe)
    assert (summary.steps_dense, summary.orders_from) == (0, "fallback")
    assert summary.dense_reasons == {DENSE_LAYER: 5 * 2}
    assert set(summary.orders) == {"transformer.blocks.1", "transformer.blocks.2"}
    assert {name for names in summary.orders.values() for name in names} == {"frame_hilbert"}
    assert "2 of 2 sparse layers were not calibrated" in summary.notes[0]


def test_change_of_resolution_between_generations():
    pipe = _sparse(tiny.wan_pipeline())
    small = tiny.generate(pipe)
    tiny.generate(pipe, height=48, width=32, num_frames=5)
    assert sparsity_summary(pipe).density_sparse_steps == pytest.approx(0.5, abs=0.1)
    assert torch.equal(tiny.generate(pipe), small)


def test_timesteps_per_token():
    # Wan 2.2 TI2V: the first frame may be clean, so every token has a timestep of its own.
    pipe = tiny.wan_pipeline()
    pipe.register_to_config(expand_timesteps=True)
    _sparse(pipe)
    tiny.generate(pipe)
    assert _dense(pipe) == ([0, 1], 5)


def test_modular_pipeline():
    parts = tiny.wan_pipeline().components
    pipe = WanBlocks().init_pipeline()
    names = ("tokenizer", "text_encoder", "transformer", "scheduler", "vae")
    pipe.update_components(**{name: parts[name] for name in names})
    pipe.set_attn_processor(BAAttProcessor(_config()))
    for steps in (5, 4):
        pipe(
            prompt="a cat moves left",
            height=tiny.SIZE,
            width=tiny.SIZE,
            num_frames=tiny.FRAMES,
            num_inference_steps=steps,
            max_sequence_length=16,
            output="latents",
        )
        assert pipe.sparsity_summary().step_source == "scheduler"
        assert _dense(pipe) == ([0, 1], steps)


def test_batch_of_prompts():
    pipe = _sparse(tiny.wan_pipeline())
    tiny.generate(pipe, prompt=["a cat moves left", "a dog moves right"], negative_prompt=["bad", "bad"])
    assert _dense(pipe) == ([0, 1], 5)
