"""BAAttProcessor inside real Wan layers: dense steps bit-equal, sparse steps right."""

import pytest
import torch
from peft import LoraConfig

from diffsieve import BAAttConfig, BAAttProcessor, UserInputError, apply_sparse_attention
from diffsieve.processors import recorded_masks, sparsity_summary
from tests import tiny


def _config(**options):
    return BAAttConfig(**{"block_size": 8, "min_tokens": 0, "warmup_steps": 2, "dense_layers": ()} | options)


def _relative(actual, expected):
    assert torch.isfinite(actual).all()
    return ((actual - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()


BUILDERS = {
    "t2v": tiny.wan_pipeline,
    "i2v": tiny.wan_image_pipeline,
    "v2v": tiny.wan_video_pipeline,
    "vace": tiny.wan_vace_pipeline,
}


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_dense_steps_are_bit_equal(kind, preset):
    # All calibrating but the last one, so that calibration is shown to leave the output alone.
    pipe, latents = BUILDERS[kind](), {}

    def keep(pipeline, step, timestep, values):
        latents.setdefault(step, []).append(values["latents"].clone())
        return values

    for apply in (False, True):
        if apply:
            apply_sparse_attention(pipe, _config(preset=preset, warmup_steps=3))
        tiny.generate(pipe, steps=4, callback_on_step_end=keep)
    assert [torch.equal(*pair) for _, pair in sorted(latents.items())][:4] == [True] * 3 + [False] * (len(latents) - 3)


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_all_blocks_equal_dense_to_rounding(kind, preset):
    dense = tiny.generate(BUILDERS[kind]())
    pipe = BUILDERS[kind]()
    apply_sparse_attention(pipe, _config(preset=preset, density=1.0, warmup_steps=1))
    out = tiny.generate(pipe)
    summary = sparsity_summary(pipe)
    assert (summary.steps_dense, summary.density_overall, summary.token_density_overall) == (1, 1.0, 1.0)
    assert summary.backend == "torch", "the sparse kernel must have run"
    assert _relative(out, dense) < 1e-5


@pytest.mark.parametrize("order", ["raster", "frame_hilbert", "hilbert", "hilbert_window", "norm_sort", "auto"])
def test_each_order_is_undone(order):
    dense = tiny.generate(tiny.wan_pipeline())
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, _config(order=order, density=1.0))
    assert _relative(tiny.generate(pipe), dense) < 1e-5


def test_sparse_layer_equals_stock_attention_under_the_expanded_block_mask():
    # In raster order a pair of blocks is a rectangle of the token mask that stock attention takes.
    model = tiny.transformer(layers=1)
    stock = tiny.transformer(layers=1).blocks[0].attn1
    left_out = _config(
        order="raster", warmup_steps=0, density=0.4, block_size=9, record_masks=(0,), score="moments", compensate="none"
    )
    apply_sparse_attention(model, left_out)
    inputs = []
    model.blocks[0].attn1.register_forward_hook(lambda module, args, output: inputs.append((args, output)))
    latents = torch.randn(2, 16, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model(latents, torch.tensor([900, 900]), torch.zeros(2, 4, 16))
        (hidden_states, _, _, rotary), output = inputs[0]
        mask = recorded_masks(model)[0]
        blocks = torch.stack([torch.stack([mask.matrix(h, b) for h in range(tiny.HEADS)]) for b in range(2)])
        assert blocks.shape[2:] == (6, 6)  # 48 tokens in blocks of 9: the last has 3
        tokens = blocks.repeat_interleave(9, 2).repeat_interleave(9, 3)[..., : tiny.TOKENS, : tiny.TOKENS]
        expected = stock(hidden_states, None, tokens, rotary)
        dense = stock(hidden_states, None, None, rotary)
    assert _relative(output, expected) < 1e-5
    assert _relative(output, dense) > 1e-2


def test_cross_attention_keeps_its_processor_and_its_input():
    pipe = tiny.wan_pipeline()
    before = [block.attn2.processor for block in pipe.transformer.blocks]
    apply_sparse_attention(pipe, _config())
    assert all(
        block.attn2.processor is processor for block, processor in zip(pipe.transformer.blocks, before, strict=True)
    )
    assert all(type(block.attn1.processor) is BAAttProcessor for block in pipe.transformer.blocks)


def test_image_cross_attention_of_wan_2_1_is_untouched():
    model = tiny.transformer(layers=2, image_dim=8, added_kv_proj_dim=24)
    inputs = {
        "hidden_states": torch.ones(1, 16, 3, 8, 8),
        "timestep": torch.tensor([900]),
        "encoder_hidden_states": torch.ones(1, 512, 16),
        "encoder_hidden_states_image": torch.ones(1, 5, 8),
    }
    with torch.no_grad():
        dense = model(**inputs).sample
        apply_sparse_attention(model, _config(density=1.0, warmup_steps=0))
        assert _relative(model(**inputs).sample, dense) < 1e-5
    assert sparsity_summary(model).steps_dense == 0


@pytest.mark.parametrize("fuse_first", [True, False])
def test_fused_projections(fuse_first):
    expected = tiny.generate(_applied(tiny.wan_pipeline()))
    pipe = tiny.wan_pipeline()
    if fuse_first:
        pipe.transformer.fuse_qkv_projections()
    _applied(pipe)
    if not fuse_first:
        pipe.transformer.fuse_qkv_projections()
    fused = tiny.generate(pipe)
    assert _relative(fused, expected) < 1e-4  # one product for three rounds differently
    used = []
    pipe.transformer.blocks[1].attn1.to_qkv.register_forward_hook(lambda *_: used.append(1))
    tiny.generate(pipe)
    assert len(used) == 5 * 2  # every step and branch: the calibration takes what its step computed
    pipe.transformer.unfuse_qkv_projections()
    assert torch.equal(tiny.generate(pipe), expected)


def _applied(pipe, **options):
    apply_sparse_attention(pipe, _config(**options))
    return pipe


def _add_lora(pipe):
    torch.manual_seed(7)
    pipe.transformer.add_adapter(
        LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    )


@pytest.mark.parametrize("state", ["loaded-before", "loaded-after", "fused"])
def test_lora(state):
    reference = tiny.wan_pipeline()
    without = tiny.generate(reference)
    _add_lora(reference)
    dense = tiny.generate(reference)
    assert _relative(dense, without) > 1e-2

    pipe = tiny.wan_pipeline()
    if state != "loaded-after":
        _add_lora(pipe)
    _applied(pipe, density=1.0)
    if state == "loaded-after":
        _add_lora(pipe)
    if state == "fused":
        pipe.transformer.fuse_lora()
    assert _relative(tiny.generate(pipe), dense) < 1e-4
    assert sparsity_summary(pipe).steps_dense == 2


def test_half_precision():
    pipe = tiny.wan_pipeline().to(torch.bfloat16)
    dense = tiny.generate(pipe)
    _applied(pipe, density=1.0)
    # Rounding of 5 steps in bf16 (2^-8 each) under guidance 3.
    assert _relative(tiny.generate(pipe).float(), dense.float()) < 0.05


def test_gradients_flow_through_the_sparse_path():
    model = tiny.transformer(layers=2)
    apply_sparse_attention(model, _config(warmup_steps=0))
    latents = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    model(latents, torch.tensor([900]), torch.zeros(1, 4, 16)).sample.square().mean().backward()
    for name in ("to_q", "to_k", "to_v"):
        gradient = getattr(model.blocks[1].attn1, name).weight.grad
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


def test_inference_mode_and_plain_calls_mix():
    model = tiny.transformer(layers=2)
    arguments = (torch.ones(1, 16, 3, 8, 8), torch.tensor([900]), torch.zeros(1, 4, 16))
    with torch.inference_mode():
        apply_sparse_attention(model, _config(warmup_steps=0))
        first = model(*arguments).sample
    with torch.no_grad():
        assert torch.equal(model(*arguments).sample, first)


def test_set_on_the_transformer_directly_says_what_to_write():
    pipe = tiny.wan_pipeline()
    pipe.transformer.set_attn_processor(BAAttProcessor(sparsity=0.75))
    with pytest.raises(UserInputError, match=r"pipe\.set_attn_processor\(BAAttProcessor\(\)\)"):
        tiny.generate(pipe)


def test_nan_in_the_attention_inputs_is_an_error():
    pipe = tiny.wan_pipeline()
    _applied(pipe)
    pipe.transformer.blocks[1].attn1.to_q.weight.data[0, 0] = float("nan")
    with pytest.raises(UserInputError, match=r"finite, got NaN in transformer\.blocks\.0"):
        tiny.generate(pipe)


@pytest.mark.parametrize("options", [{"preset": "paper"}, {"order": "hilbert"}], ids=["paper", "one-order"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_an_error_after_the_first_sparse_step_where_nothing_is_calibrated(value, options):
    pipe = tiny.wan_pipeline()
    _applied(pipe, **options | {"warmup_steps": 0, "dense_layers": (0,)})
    pipe.transformer.blocks[1].attn1.to_v.weight.data[0, 0] = value
    for _ in range(2):
        with pytest.raises(UserInputError, match=r"finite, got NaN or infinity in transformer\.blocks\.1 \(step 0\)"):
            tiny.generate(pipe)
    tiny.generate(pipe, steps=1)  # no later step to raise in: the summary says it
    assert "in the output of 4 sparse calls, first in transformer.blocks.1, step 0" in sparsity_summary(pipe).notes[-1]


def test_attention_mask_runs_dense_and_is_counted():
    model = tiny.transformer(layers=1)
    apply_sparse_attention(model, _config(warmup_steps=0))
    attn = model.blocks[0].attn1
    original = attn.forward
    mask = torch.ones(tiny.TOKENS, tiny.TOKENS, dtype=torch.bool).tril()
    attn.forward = lambda hidden_states, a, b, rotary: original(hidden_states, a, mask, rotary)
    with torch.no_grad():
        model(torch.ones(1, 16, 3, 8, 8), torch.tensor([900]), torch.zeros(1, 4, 16))
    assert sparsity_summary(model).dense_reasons == {"attention mask": 1}
