"""LLSAProcessor inside real Wan pipelines: what it computes, training, installing and removing, the summary."""

import copy
import json
import logging

import pytest
import torch

from diffsieve import (
    BAAttConfig,
    BAAttProcessor,
    LLSAConfig,
    LLSAProcessor,
    LLSASummary,
    UserInputError,
    apply_sparse_attention,
    remove_sparse_attention,
    save_orders,
    sparse_attention,
    sparsity_summary,
)
from diffsieve.kernels.llsa import hierarchical_topk, llsa_attention
from diffsieve.kernels.llsa.reference import token_weights
from diffsieve.kernels.orders import frame_hilbert_order, hilbert_order, morton_order, raster_order
from diffsieve.processors import recorded_masks
from diffsieve.processors.llsa_summary import keys_per_query
from tests import tiny

ORDERS = {
    "hilbert": hilbert_order,
    "frame_hilbert": frame_hilbert_order,
    "morton": morton_order,
    "raster": raster_order,
}


def forward(model, latents=None):
    generator = torch.Generator().manual_seed(0)
    if latents is None:
        latents = torch.randn(1, 16, 3, 8, 8, generator=generator)
    text = torch.randn(1, 6, 16, generator=generator)
    return model(latents, torch.tensor([500.0]), text, return_dict=False)[0]


def relative(actual, expected):
    assert torch.isfinite(actual).all()
    return ((actual - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()


@pytest.mark.parametrize("order", ORDERS)
def test_keeping_all_in_the_disjoint_form_equals_dense(order):
    """48 tokens: the order is undone, and nothing is lost or counted twice."""
    dense = tiny.generate(tiny.wan_pipeline())
    pipe = tiny.wan_pipeline()
    pipe.set_attn_processor(LLSAProcessor(block_size=4, topk=48, levels=2, disjoint=True, order=order))
    assert relative(tiny.generate(pipe), dense) < 1e-5  # bit for bit in raster order: the same kernel of PyTorch
    assert {block.attn1.processor._backend for block in pipe.transformer.blocks} == {"torch"}


@pytest.mark.parametrize("order", ORDERS)
def test_a_layer_attends_in_its_order(order, monkeypatch):
    model = tiny.transformer()
    apply_sparse_attention(model, LLSAConfig(block_size=8, topk=2, order=order, dense_layers=(1, 2)))
    attn, seen = model.blocks[0].attn1, {}
    attn.register_forward_hook(
        lambda module, args, kwargs, out: seen.update(args=args, kwargs=kwargs, out=out), with_kwargs=True
    )
    forward(model)
    hidden, _, _, rotary = seen["args"]
    family, permutation = attn.processor._family, ORDERS[order](tiny.GRID)
    query, key, value = (x.transpose(1, 2)[:, :, permutation] for x in family.project(attn, hidden, rotary))
    indices = hierarchical_topk(query, key, block_size=8, topk=2, levels=1)
    weights = token_weights(indices, length=48, block_size=8, enrich=True, disjoint=False)
    k, v = (torch.cat([x, x.unflatten(2, (6, 8)).mean(3)], dim=2) for x in (key, value))
    mask = torch.cat(weights, dim=-1).float().log()
    attended = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask)
    attended = attended[:, :, permutation.argsort()].transpose(1, 2)
    torch.testing.assert_close(seen["out"], family.output(attn, attended))


@pytest.mark.parametrize(
    "build", [tiny.wan_pipeline, tiny.wan_image_pipeline, tiny.wan_video_pipeline, tiny.wan_vace_pipeline]
)
def test_pipelines_run_and_removal_restores_every_bit(build):
    pipe = build()
    dense = tiny.generate(pipe, steps=2)
    processors = list(pipe.transformer.attn_processors.values())
    pipe.set_attn_processor(LLSAProcessor(block_size=4, topk=2))
    sparse = tiny.generate(pipe, steps=2)
    assert torch.isfinite(sparse).all()
    assert not torch.equal(sparse, dense)
    assert torch.equal(tiny.generate(pipe, steps=2), sparse)
    remove_sparse_attention(pipe)
    assert all(a is b for a, b in zip(pipe.transformer.attn_processors.values(), processors, strict=True))
    assert not pipe.transformer._forward_pre_hooks
    assert "_diffsieve_controller" not in pipe.transformer.__dict__
    assert torch.equal(tiny.generate(pipe, steps=2), dense)


def test_both_transformers_and_another_size():
    pipe = tiny.wan_pipeline(two=True)
    pipe.set_attn_processor(LLSAProcessor(block_size=4, topk=2, dense_layers=(0, -1)))
    tiny.generate(pipe, steps=3)
    tiny.generate(pipe, steps=2, height=48, width=32)
    summary = sparsity_summary(pipe)
    assert summary.layers == ("transformer.blocks.1", "transformer_2.blocks.1")
    assert len(summary.dense_layers) == 4
    assert summary.tokens == 3 * 6 * 4


def test_gradients_reach_all_weights_and_training_matches_the_definition():
    grads = []
    for backend in ("torch", "reference"):
        model = tiny.transformer(layers=2).train()
        apply_sparse_attention(model, LLSAConfig(block_size=4, topk=2, levels=2, backend=backend))
        model.enable_gradient_checkpointing()
        forward(model).square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if "attn1" in name})
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads[0].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-3, atol=1e-5)


def test_compiled_model_equals_eager():
    model = tiny.transformer(layers=2)
    apply_sparse_attention(model, LLSAConfig(block_size=4, topk=2))
    expected = forward(model)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(forward(model), expected, rtol=1e-4, atol=1e-5)


def test_after_inference_mode_the_model_trains():
    model = tiny.transformer(layers=1)
    apply_sparse_attention(model, LLSAConfig(block_size=4, topk=2))
    with torch.inference_mode():
        forward(model)
    forward(model).sum().backward()


def test_methods_replace_each_other():
    pipe = tiny.wan_pipeline()
    before = list(pipe.transformer.attn_processors.values())
    pipe.set_attn_processor(BAAttProcessor(BAAttConfig(block_size=8, min_tokens=0)))
    pipe.set_attn_processor(LLSAProcessor(block_size=4))
    assert isinstance(pipe.transformer.blocks[0].attn1.processor, LLSAProcessor)
    with sparse_attention(pipe, BAAttConfig(block_size=8, min_tokens=0)):
        assert isinstance(pipe.transformer.blocks[0].attn1.processor, BAAttProcessor)
    assert pipe.transformer.blocks[0].attn1.processor.config == LLSAConfig(block_size=4)
    remove_sparse_attention(pipe)
    assert all(a is b for a, b in zip(pipe.transformer.attn_processors.values(), before, strict=True))


def test_the_warning_comes_once(caplog):
    pipe = tiny.wan_pipeline()
    with caplog.at_level(logging.WARNING, "diffsieve"):
        pipe.set_attn_processor(LLSAProcessor())
        pipe.set_attn_processor(LLSAProcessor(topk=4))
        tiny.generate(pipe, steps=2)
    warnings = [record.message for record in caplog.records if "LLSA" in record.message]
    assert len(warnings) == 1
    assert "changes the output of a model that was not trained with it" in warnings[0]


def test_summary():
    pipe = tiny.wan_pipeline()
    pipe.set_attn_processor(LLSAProcessor(block_size=4, topk=2, levels=2, order="morton", dense_layers=(0,)))
    empty = pipe.sparsity_summary()
    assert (empty.tokens, empty.levels, empty.keys_per_query, empty.backend) == (None, None, None, None)
    assert "nothing has run yet" in str(empty)
    tiny.generate(pipe, steps=2)
    summary = pipe.sparsity_summary()
    assert isinstance(summary, LLSASummary)
    assert (summary.tokens, summary.levels, summary.tokens_per_level) == (48, 2, (48, 12, 3))
    assert summary.keys_per_query == 2 * 4 + 2 * 4 + 3
    assert summary.density == pytest.approx(19 / 48)
    assert summary.layers == ("transformer.blocks.1", "transformer.blocks.2")
    assert summary.dense_layers == ("transformer.blocks.0",)
    assert summary.backend == "torch"
    assert json.loads(json.dumps(summary.to_dict())) == summary.to_dict()
    assert "keys per query        19 of 48 (39.6%)" in str(summary)


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (16_384, {"levels": 2}, 320),
        (16_384, {}, 1_152),
        (65_536, {}, 512),
        (65_536, {"levels": 3}, 400),
        (262_144, {}, 448),
        (10, {}, 10),
        (16_384, {"enrich": False}, 128),
        (100, {"topk": 99}, 107),
    ],
)
def test_keys_per_query(tokens, options, expected):
    assert keys_per_query(tokens, LLSAConfig(**options)) == expected


def test_other_models_attend_without_installing():
    query, key, value = torch.randn(3, 1, 2, 70, 8, generator=torch.Generator().manual_seed(0))
    out = LLSAProcessor(block_size=4, topk=(2, 3), levels=2).attend(query, key, value)
    assert torch.equal(out, llsa_attention(query, key, value, block_size=4, topk=(2, 3), levels=2))


def test_what_needs_blocks_of_ba_att_says_so():
    pipe = tiny.wan_pipeline()
    pipe.set_attn_processor(LLSAProcessor(block_size=4))
    tiny.generate(pipe, steps=1)
    with pytest.raises(UserInputError, match="no block mask is recorded"):
        recorded_masks(pipe)
    with pytest.raises(UserInputError, match="not applied"):
        save_orders(pipe, "never-written.json")


def test_a_deep_copy_follows_its_own_grid():
    model = tiny.transformer(layers=2)
    apply_sparse_attention(model, LLSAConfig(block_size=4, topk=1))
    other_grid = torch.randn(1, 16, 3, 4, 16, generator=torch.Generator().manual_seed(1))
    copied = copy.deepcopy(model)
    before = forward(model)
    expected = forward(model, other_grid)
    assert not torch.equal(expected, forward(tiny.transformer(layers=2), other_grid))
    assert torch.equal(forward(model), before)
    assert torch.equal(forward(copied, other_grid), expected)


def test_a_processor_on_the_transformer_directly_explains_itself():
    model = tiny.transformer(layers=1)
    model.set_attn_processor(LLSAProcessor())
    with pytest.raises(UserInputError, match="LLSAProcessor cannot be set on a transformer directly"):
        forward(model)


def test_masks_are_refused():
    model = tiny.transformer(layers=1)
    apply_sparse_attention(model, LLSAConfig())
    attn = model.blocks[0].attn1
    with pytest.raises(UserInputError, match="attention_mask must be None"):
        attn(torch.randn(1, 48, 24), attention_mask=torch.ones(48, 48, dtype=torch.bool))


def test_levels_that_do_not_fit_are_an_error_of_the_forward():
    model = tiny.transformer(layers=1)
    apply_sparse_attention(model, LLSAConfig(block_size=16, levels=3))
    with pytest.raises(UserInputError, match="levels must be at most 2 for 48 tokens in blocks of 16"):
        forward(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size must be an int >= 2, got 1"),
        ({"topk": 0}, "topk must be an int >= 1, or one per level, got 0"),
        ({"topk": (3, 3)}, "topk must be one number for each of levels='auto', got "),
        ({"levels": 5}, r"levels must be an int in \[1, 4\], \"auto\" or \"paper\", got 5"),
        ({"enrich": 1}, "enrich must be True or False, got 1"),
        ({"enrich": False, "disjoint": True}, "disjoint must be False where enrich is False, got True"),
        ({"order": "snake"}, "order must be one of hilbert, frame_hilbert, morton, raster, got 'snake'"),
        ({"dense_layers": 3}, "dense_layers must be a tuple of layer numbers, got 3"),
        ({"backend": "cuda"}, "backend must be one of auto, reference, torch, triton, got 'cuda'"),
        ({"blocks": 3}, "unknown option 'blocks'"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(UserInputError, match=message):
        LLSAProcessor(**options)


def test_settings_that_do_not_fit_the_model_or_the_call():
    pipe = tiny.wan_pipeline()
    with pytest.raises(UserInputError, match=r"dense_layers must name layers of the model \(3 layers\), got 7"):
        pipe.set_attn_processor(LLSAProcessor(dense_layers=(7,)))
    with pytest.raises(UserInputError, match="config must be an LLSAConfig, got BAAttConfig"):
        LLSAProcessor(BAAttConfig())
    with pytest.raises(UserInputError, match="give a config or options, not both"):
        LLSAProcessor(LLSAConfig(), topk=3)
    with pytest.raises(UserInputError, match="config must be a BAAttConfig, BAAttProcessor, LLSAConfig or LLSAProc"):
        apply_sparse_attention(pipe, "llsa")


def test_settings_survive_json():
    config = LLSAConfig(topk=(3, 2), levels=2, dense_layers=(0,), order="morton")
    assert LLSAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
