"""Which attention modules the adapters take, and models that carry a copy of Wan's attention."""

import dataclasses

import pytest
import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    HeliosTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanVACETransformer3DModel,
)

from diffsieve import BAAttConfig, apply_sparse_attention, sparsity_summary
from diffsieve.processors.controller import TEXT
from diffsieve.processors.families import FAMILIES, find_family, self_attention_layers
from diffsieve.processors.install import controllers_of
from tests import tiny


def _names(model):
    return [name for name, _ in self_attention_layers(model, FAMILIES["wan"])]


def test_wan_layers():
    assert _names(tiny.transformer(layers=2)) == ["blocks.0.attn1", "blocks.1.attn1"]


def test_vace_layers():
    model = tiny.wan_vace_pipeline().transformer
    assert isinstance(model, WanVACETransformer3DModel)
    assert _names(model) == [f"blocks.{i}.attn1" for i in range(3)] + [f"vace_blocks.{i}.attn1" for i in range(2)]


def test_vace_dense_layers_count_in_both_lists():
    pipe = tiny.wan_vace_pipeline()
    apply_sparse_attention(pipe, BAAttConfig(block_size=8, min_tokens=0, warmup_steps=1, order="raster"))
    tiny.generate(pipe)
    layers = sparsity_summary(pipe).layers
    assert {name.removeprefix("transformer."): density for name, density in layers.items()} == {
        "blocks.0": 1.0,
        "blocks.1": 0.5,
        "blocks.2": 0.5,
        "vace_blocks.0": 1.0,
        "vace_blocks.1": 0.5,
    }


def test_grid_follows_the_patch_size():
    model = tiny.transformer(layers=1, patch_size=(1, 1, 1))
    assert FAMILIES["wan"].grid(model, torch.empty(1, 16, 3, 4, 5)) == (3, 4, 5)
    assert FAMILIES["wan"].grid(tiny.transformer(layers=1), torch.empty(1, 16, 3, 8, 10)) == (3, 4, 5)


def _copy_sizes():
    return tiny._sizes(2) | {"in_channels": 16}


@pytest.mark.parametrize(
    "build",
    [
        lambda: ChronoEditTransformer3DModel(**_copy_sizes()),
        lambda: SkyReelsV2Transformer3DModel(**_copy_sizes()),
    ],
    ids=["ChronoEdit", "SkyReels-V2"],
)
def test_copies_of_wan_attention_match_and_agree(build):
    torch.manual_seed(0)
    model = build().eval()
    assert _names(model) == ["blocks.0.attn1", "blocks.1.attn1"]
    generator = torch.Generator().manual_seed(5)
    latents = torch.randn(1, 16, 3, 8, 8, generator=generator)
    arguments = (latents, torch.tensor([900]), torch.randn(1, 4, 16, generator=generator))
    with torch.no_grad():
        dense = model(*arguments).sample
        apply_sparse_attention(
            model, BAAttConfig(block_size=8, min_tokens=0, warmup_steps=0, density=1.0, dense_layers=())
        )
        out = model(*arguments).sample
    assert sparsity_summary(model).steps_dense == 0
    assert ((out - dense).pow(2).mean() / dense.pow(2).mean()).sqrt() < 1e-5


def test_other_processors_of_a_copy_are_left_alone():
    # The motion and face parts of Wan-Animate cannot be made tiny; their classes need no weights to be looked at.
    with torch.device("meta"):
        model = WanAnimateTransformer3DModel(**_copy_sizes() | {"in_channels": 36}, image_dim=None)
    assert _names(model) == ["blocks.0.attn1", "blocks.1.attn1"]


def test_same_attributes_but_another_call_do_not_match():
    with torch.device("meta"):
        model = HeliosTransformer3DModel(num_layers=1)
    assert find_family(model) is None


def test_text_in_the_sequence_runs_dense_where_asked(monkeypatch):
    model = tiny.transformer(layers=1)
    config = BAAttConfig(block_size=8, min_tokens=0, warmup_steps=0, dense_layers=(), text="dense")
    apply_sparse_attention(model, config)
    # No adapter of a joint-attention family exists yet: pretend that this one has text.
    controller = controllers_of(model)[0]
    monkeypatch.setattr(controller, "family", dataclasses.replace(controller.family, text_tokens=(4, 0)))
    with torch.no_grad():
        model(torch.ones(1, 16, 3, 8, 8), torch.tensor([900]), torch.zeros(1, 4, 16))
    assert sparsity_summary(model).dense_reasons == {TEXT: 1}
