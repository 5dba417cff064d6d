"""Choices of keys that LLSA records: the same ones that it attends with, by layer, and nothing changed by looking."""

import pytest
import torch

from diffsieve import LLSAConfig, LLSAProcessor, UserInputError, apply_sparse_attention
from diffsieve.kernels.llsa import hierarchical_topk
from diffsieve.kernels.orders import hilbert_order
from diffsieve.processors import recorded_selections
from tests import tiny, tiny_pixels

OPTIONS = {"block_size": 4, "topk": 2, "levels": 2}


def test_recording_changes_no_bit_and_keeps_what_was_chosen():
    plain, recorded = tiny.wan_pipeline(), tiny.wan_pipeline()
    apply_sparse_attention(plain, LLSAConfig(**OPTIONS))
    apply_sparse_attention(recorded, LLSAConfig(**OPTIONS, record_masks=(0, -1)))
    attn, seen = recorded.transformer.blocks[0].attn1, {}
    attn.register_forward_pre_hook(lambda module, args: seen.update(args=args))
    assert torch.equal(tiny.generate(recorded), tiny.generate(plain))
    first, last = recorded_selections(recorded)
    assert (first.layer, last.layer) == ("transformer.blocks.0", "transformer.blocks.2")
    assert (first.grid_thw, first.block_size, first.order) == (tiny.GRID, 4, "hilbert")
    assert torch.equal(first.raster_index, hilbert_order(tiny.GRID))
    hidden, _, _, rotary = seen["args"]
    query, key, _ = attn.processor._family.project(attn, hidden, rotary)
    query, key = (x.transpose(1, 2)[:, :, first.raster_index] for x in (query, key))
    for kept, expected in zip(first.indices, hierarchical_topk(query, key, **OPTIONS), strict=True):
        assert torch.equal(kept, expected)


def test_the_order_is_the_one_in_which_the_blocks_are_counted():
    pipe = tiny_pixels.pipeline()  # in Hilbert order by itself
    for order in ("hilbert", "raster"):
        apply_sparse_attention(pipe, LLSAConfig(block_size=8, order=order, record_masks=(1,)))
        tiny_pixels.generate(pipe)
        (found,) = recorded_selections(pipe)
        assert found.grid_thw == (1, 16, 16)
        assert (found.raster_index is None) == (order == "raster")


def test_nothing_recorded_is_an_error():
    pipe = tiny.wan_pipeline()
    dense = LLSAConfig(**OPTIONS, dense_layers=(0,), record_masks=(0,))
    for config in (LLSAConfig(**OPTIONS), LLSAConfig(block_size=64, record_masks=(0,)), dense):
        apply_sparse_attention(pipe, config)
        tiny.generate(pipe)
        with pytest.raises(UserInputError, match=r"no selection is recorded.* layers that are not dense"):
            recorded_selections(pipe)
    with pytest.raises(UserInputError, match="record_masks must name layers of the model"):
        apply_sparse_attention(pipe, LLSAConfig(record_masks=(9,)))
    with pytest.raises(UserInputError, match="record_masks must be a tuple of layer numbers"):
        LLSAConfig(record_masks=(True,))


def test_recording_changes_no_bit_under_autocast():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 2_048, 16, generator=generator) for _ in range(3))
    plain, recording = LLSAProcessor(**OPTIONS), LLSAProcessor(**OPTIONS)
    recording._record = True
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(recording.attend(query, key, value), plain.attend(query, key, value))
