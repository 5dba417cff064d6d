"""The pixel-space DiT: the model at any size, its attention methods, and its token order."""

import copy
import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diffsieve import LLSAProcessor, UserInputError, apply_sparse_attention, remove_sparse_attention
from diffsieve.kernels.llsa import llsa_attention
from diffsieve.kernels.orders import frame_hilbert_order, morton_order
from diffsieve.pipelines.pixel_dit import PixelDiTTransformer2DModel
from diffsieve.pipelines.pixel_dit.grid import TOKEN_ORDERS, grid_tables, rotate, token_order
from diffsieve.processors import BAAttConfig, LLSAConfig, full_attention, sparsity_summary, trained_llsa
from tests import tiny_pixels

SIZES = [(1, 1), (1, 7), (5, 9), (16, 16), (12, 20)]


def inputs(height=16, width=16, batch=2):
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(batch, 3, height, width, generator=generator)
    return pictures, torch.tensor([900.0, 20.0])[:batch], torch.tensor([0, 2])[:batch]


def run(model, *arguments):
    with torch.no_grad():
        return model(*arguments, return_dict=False)[0]


@pytest.mark.parametrize("method", ["llsa", "full", "topk"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_any_size_runs(method, size):
    out = run(tiny_pixels.transformer(attention_method=method), *inputs(*size))
    assert out.shape == (2, 3, *size)
    assert out.isfinite().all()
    assert out.abs().max() > 0


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("order", ["hilbert", "morton"])
def test_full_attention_does_not_depend_on_the_order(order, size):
    """Positions travel with the tokens, and the order is undone."""
    expected = run(tiny_pixels.transformer(attention_method="full", token_order="raster"), *inputs(*size))
    actual = run(tiny_pixels.transformer(attention_method="full", token_order=order), *inputs(*size))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_llsa_depends_on_the_order():
    outputs = [run(tiny_pixels.transformer(token_order=order), *inputs()) for order in TOKEN_ORDERS]
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-4)
    assert not torch.allclose(outputs[1], outputs[2], atol=1e-4)


def test_blocks_of_16_are_squares_of_4_x_4():
    for order in ("hilbert", "morton"):
        raster = token_order(16, 24, order).view(-1, 16)
        for block in raster:
            rows, columns = block // 24, block % 24
            assert rows.max() - rows.min() == 3
            assert columns.max() - columns.min() == 3


def test_rotation_depends_on_distances_alone():
    """Turning (x, y) pairs: the product of two turned vectors depends on the difference of their positions."""
    tables = grid_tables(6, 8, "raster", 16, 100.0, None, torch.device("cpu"))
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).double()
    q, k = (rotate(x.expand(1, 48, 1, 16), tables.cos, tables.sin)[0, :, 0] for x in (query, key))
    products = q @ k.T
    torch.testing.assert_close(products[0, 9], products[18, 27], rtol=1e-5, atol=1e-5)  # one down, one right
    torch.testing.assert_close(products.diagonal(), (query @ key).expand(48), rtol=1e-5, atol=1e-5)
    assert abs(products[0, 1] - products[0, 8]) > 1e-3  # right is not down


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rotation_of_heads_in_any_memory_turns_each_pair(dtype):
    """On a CPU the pairs are multiplied as complex numbers, which need them side by side in memory."""
    tables = grid_tables(3, 5, "hilbert", 8, 100.0, None, torch.device("cpu"))
    wide = torch.randn(2, 15, 2, 25, generator=torch.Generator().manual_seed(0)).to(dtype)
    for x in (wide[..., 3:11], wide[..., :16:2], wide[..., 1:9].contiguous()):
        even, odd = x.double()[..., ::2], x.double()[..., 1::2]
        cos, sin = tables.cos.double(), tables.sin.double()
        expected = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
        before = x.clone()
        actual = rotate(x, tables.cos, tables.sin)
        assert actual.dtype == dtype
        assert torch.equal(x, before)
        torch.testing.assert_close(
            actual, expected.to(dtype), rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-6
        )


def test_positions_of_an_extent_are_those_of_the_finer_picture():
    """With an extent the centre of a coarse pixel lies in the middle of the four finer ones that it stands for."""
    angles = [
        torch.atan2(tables.sin, tables.cos)[0, :, 0]
        for tables in (grid_tables(n, n, "raster", 4, 1e4, 8, torch.device("cpu")) for n in (8, 4))
    ]
    fine, coarse = angles[0].view(8, 8, 2), angles[1].view(4, 4, 2)
    assert fine[0, :3, 1].tolist() == pytest.approx([0, 1, 2])
    assert coarse[0, :2, 1].tolist() == pytest.approx([0.5, 2.5])
    assert coarse[:2, 0, 0].tolist() == pytest.approx([0.5, 2.5])


def test_topk_is_one_level_without_pooled_tokens():
    model = tiny_pixels.transformer(attention_method="topk", levels=2)
    q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    expected = llsa_attention(q, k, v, block_size=8, topk=2, levels=1, enrich=False)
    assert torch.equal(model.blocks[0].attn.attend(q, k, v), expected)
    assert not torch.allclose(expected, scaled_dot_product_attention(q, k, v), atol=1e-3)


def test_llsa_with_all_blocks_kept_and_disjoint_is_full_attention():
    full = run(tiny_pixels.transformer(attention_method="full"), *inputs())
    llsa = run(tiny_pixels.transformer(topk=64, levels=2, disjoint=True), *inputs())
    torch.testing.assert_close(llsa, full, rtol=1e-4, atol=1e-5)


def test_a_new_model_predicts_zero():
    model = PixelDiTTransformer2DModel(num_layers=1, num_attention_heads=1, attention_head_dim=16)
    assert run(model, *inputs()[:2]).abs().max() == 0


def test_time_and_class_change_the_output():
    model = tiny_pixels.transformer()
    pictures, timestep, labels = inputs()
    out = run(model, pictures, timestep, labels)
    assert not torch.allclose(out, run(model, pictures, timestep + 50, labels), atol=1e-4)
    assert not torch.allclose(out, run(model, pictures, timestep, labels * 0 + 1), atol=1e-4)
    none = run(model, pictures, timestep, None)
    assert torch.equal(none, run(model, pictures, timestep, torch.full((2,), 3)))


def test_gradients_reach_every_parameter_and_checkpointing_keeps_them():
    grads = []
    for checkpointing in (False, True):
        model = tiny_pixels.transformer().train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        model(*inputs()).sample.square().mean().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-8)


def test_fused_projections_change_nothing():
    model = tiny_pixels.transformer()
    expected = run(model, *inputs())
    model.fuse_qkv_projections()
    torch.testing.assert_close(run(model, *inputs()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", TOKEN_ORDERS)
@pytest.mark.parametrize("wanted", ["hilbert", "morton", "raster"])
def test_llsa_processor_equals_the_own_method(own, wanted):
    """Whatever order the model has, the processor brings the tokens into its own."""
    expected = run(tiny_pixels.transformer(token_order=wanted), *inputs(12, 20))
    model = tiny_pixels.transformer(token_order=own, attention_method="full")
    before = run(model, *inputs(12, 20))
    apply_sparse_attention(model, LLSAConfig(block_size=8, topk=2, order=wanted))
    torch.testing.assert_close(run(model, *inputs(12, 20)), expected, rtol=1e-4, atol=1e-5)
    remove_sparse_attention(model)
    assert torch.equal(run(model, *inputs(12, 20)), before)


def test_set_attn_processor_of_the_pipeline():
    pipe = tiny_pixels.pipeline(attention_method="full")
    dense = tiny_pixels.generate(pipe)
    pipe.set_attn_processor(LLSAProcessor(block_size=8, topk=2, order="hilbert"))
    expected = tiny_pixels.generate(tiny_pixels.pipeline())
    torch.testing.assert_close(tiny_pixels.generate(pipe), expected, rtol=1e-4, atol=1e-5)
    assert pipe.sparsity_summary() is not None
    remove_sparse_attention(pipe)
    assert torch.equal(tiny_pixels.generate(pipe), dense)


@pytest.mark.parametrize("own", TOKEN_ORDERS)
def test_ba_att_sees_the_same_tokens_whatever_order_the_model_has(own):
    config = BAAttConfig(sparsity=0.5, warmup_steps=0, block_size=16, min_tokens=0, order="frame_hilbert")
    outputs = []
    for order in ("raster", own):
        model = tiny_pixels.transformer(attention_method="full", token_order=order)
        dense = run(model, *inputs(12, 20))
        apply_sparse_attention(model, config)
        outputs.append(run(model, *inputs(12, 20)))
        assert (outputs[-1] - dense).abs().max() > 1e-4
        remove_sparse_attention(model)
        assert torch.equal(run(model, *inputs(12, 20)), dense)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)


def test_dense_calls_of_ba_att_are_full_attention_in_a_model_trained_with_llsa():
    model = tiny_pixels.transformer()
    config = BAAttConfig(sparsity=0.5, warmup_steps=0, block_size=16, min_tokens=0, dense_layers=(0, 1))
    apply_sparse_attention(model, config)
    full = run(tiny_pixels.transformer(attention_method="full"), *inputs())
    torch.testing.assert_close(run(model, *inputs()), full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["attention_mask", "encoder_hidden_states"])
def test_all_self_attention_refuses_masks_and_other_tokens_alike(name):
    model = tiny_pixels.transformer()
    attn, hidden_states = model.blocks[0].attn, torch.randn(1, 64, 32)

    def refused():
        with pytest.raises(UserInputError, match=f"^{name} must be None: this is unmasked self-attention$"):
            attn.processor(attn, hidden_states, **{name: torch.ones(1, 64, 32)})

    refused()
    with full_attention(model):
        refused()
    apply_sparse_attention(model, LLSAConfig(block_size=8))
    refused()


@pytest.mark.parametrize("method", ["llsa", "topk"])
def test_dense_layers_of_llsa_are_full_attention_in_a_model_trained_with_it(method):
    model = tiny_pixels.transformer(attention_method=method)
    own, processors = run(model, *inputs()), dict(model.attn_processors)
    config = trained_llsa(model)
    apply_sparse_attention(model, dataclasses.replace(config, dense_layers=(0, 1)))
    full = run(tiny_pixels.transformer(attention_method="full"), *inputs())
    torch.testing.assert_close(run(model, *inputs()), full, rtol=1e-4, atol=1e-5)
    apply_sparse_attention(model, dataclasses.replace(config, dense_layers=(1,)))
    assert sparsity_summary(model).dense_layers == ("transformer.blocks.1",)
    assert (run(model, *inputs()) - full).abs().max() > 1e-4
    remove_sparse_attention(model)
    assert model.attn_processors == processors
    assert torch.equal(run(model, *inputs()), own)


@pytest.mark.parametrize("method", ["llsa", "topk", "full"])
def test_full_attention_for_a_while(method):
    model = tiny_pixels.transformer(attention_method=method)
    own, processors = run(model, *inputs()), dict(model.attn_processors)
    full = run(tiny_pixels.transformer(attention_method="full"), *inputs())
    with full_attention(model):
        torch.testing.assert_close(run(model, *inputs()), full, rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError), full_attention(model):
            raise RuntimeError
        torch.testing.assert_close(run(model, *inputs()), full, rtol=1e-4, atol=1e-5)
    assert model.attn_processors == processors
    assert torch.equal(run(model, *inputs()), own)
    apply_sparse_attention(model, LLSAConfig(block_size=8))
    with pytest.raises(UserInputError, match="must not have sparse attention"), full_attention(model):
        pass


@pytest.mark.parametrize(
    "options",
    [{"topk": [3, 2], "levels": 2}, {"disjoint": True, "token_order": "morton"}, {"attention_method": "topk"}, {}],
)
def test_the_settings_that_a_model_was_trained_with_repeat_it_bit_for_bit(options, caplog):
    model = tiny_pixels.transformer(**options)
    own = run(model, *inputs())
    config = trained_llsa(model)
    with full_attention(model):
        apply_sparse_attention(model, dataclasses.replace(config, record_masks=(0,)))
        assert torch.equal(run(model, *inputs()), own)
        remove_sparse_attention(model)
    assert caplog.messages == [], "nothing to warn of"
    apply_sparse_attention(model, dataclasses.replace(config, block_size=4))
    assert "changes the output of a model that was not trained with it" in caplog.text
    assert trained_llsa(tiny_pixels.transformer(attention_method="full")) is None


def test_the_published_orders():
    assert torch.equal(token_order(5, 9, "hilbert"), frame_hilbert_order((1, 5, 9)))
    assert torch.equal(token_order(5, 9, "morton"), morton_order((1, 5, 9)))
    assert token_order(5, 9, "raster") is None


def test_a_copy_is_independent():
    model = tiny_pixels.transformer()
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.proj_out.weight)
    torch.nn.init.zeros_(other.proj_out.bias)
    assert run(other, *inputs()).abs().max() == 0
    assert run(model, *inputs()).abs().max() > 0


def test_inference_mode_leaves_nothing_behind_that_training_cannot_use():
    model = tiny_pixels.transformer()
    with torch.inference_mode():
        model(*inputs(11, 13))
    model(*inputs(11, 13)).sample.mean().backward()


@pytest.mark.parametrize("size", [(32, 32), (25, 41), (45, 46)], ids=["1024", "1025", "2070"])
def test_tokens_in_slices_are_those_of_all_at_once(size):
    """Without gradients a CPU takes some tokens after the other through the two-layer network."""
    model = tiny_pixels.transformer()
    pictures, *conditions = inputs(*size)
    before = pictures.clone()
    whole = model(pictures, *conditions).sample.detach()
    torch.testing.assert_close(run(model, pictures, *conditions), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(pictures, before)


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_blocks_equal_eager():
    model = tiny_pixels.transformer()
    expected = run(model, *inputs())
    model.compile_repeated_blocks(dynamic=False, fullgraph=True)
    torch.testing.assert_close(run(model, *inputs()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_method": "sparse"}, "attention_method must be one of llsa, full, topk, got 'sparse'"),
        ({"token_order": "spiral"}, "token_order must be one of hilbert, morton, raster, got 'spiral'"),
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"sample_size": 1.5}, "sample_size must be a positive integer, got 1.5"),
        ({"attention_head_dim": 10}, "attention_head_dim must be a multiple of 4, got 10"),
        ({"num_classes": -1}, "num_classes must be 0 or a positive integer, got -1"),
        ({"mlp_ratio": 0}, "mlp_ratio must be positive, got 0"),
        ({"topk": 0}, "topk must be an int >= 1"),
        ({"attention_method": "topk", "topk": (2, 2), "levels": 2}, "topk must be one number for attention_method"),
        ({"enrich": False, "disjoint": True}, "disjoint must be False where enrich is False"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(UserInputError, match=message):
        tiny_pixels.transformer(**options)


def test_wrong_inputs_are_named():
    model = tiny_pixels.transformer()
    pictures, timestep, labels = inputs()
    with pytest.raises(UserInputError, match=r"hidden_states must have shape \(B, 3, H, W\), got \(2, 1, 16, 16\)"):
        model(pictures[:, :1], timestep, labels)
    with pytest.raises(UserInputError, match=r"class_labels must have shape \(2,\), got \(1,\)"):
        model(pictures, timestep, labels[:1])
    with pytest.raises(UserInputError, match="class_labels must be None for a model without classes"):
        tiny_pixels.transformer(num_classes=0)(pictures, timestep, labels)
    with pytest.raises(UserInputError, match="levels must be at most"):
        tiny_pixels.transformer(levels=4)(pictures, timestep, labels)
