"""Recorded block masks."""

import pytest
import torch

from diffsieve import BAAttConfig, UserInputError, apply_sparse_attention
from diffsieve.kernels.orders import hilbert_order
from diffsieve.processors import recorded_masks
from tests import tiny


def _config(**options):
    return BAAttConfig(**{"block_size": 8, "min_tokens": 0, "warmup_steps": 1, "record_masks": (1, -1)} | options)


def test_masks_of_the_chosen_layers():
    pipe = tiny.wan_pipeline(layers=4)
    apply_sparse_attention(pipe, _config(sparsity=0.5))
    tiny.generate(pipe)
    masks = recorded_masks(pipe)
    assert [mask.layer for mask in masks] == ["transformer.blocks.1", "transformer.blocks.3"]
    for mask in masks:
        assert (mask.grid_thw, mask.block_size, mask.num_blocks) == (tiny.GRID, 8, 6)
        assert mask.orders == pipe.sparsity_summary().orders[mask.layer]
        for head in range(tiny.HEADS):
            matrix = mask.matrix(head)
            assert (matrix.shape, matrix.dtype) == ((6, 6), torch.bool)
            assert matrix.sum(-1).tolist() == [3] * 6
            assert matrix[0].nonzero().flatten().tolist() == mask.block_index[0, head, 0].tolist()


def test_variable_counts():
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, _config(density=1.0, top_p=0.5, order="raster"))
    tiny.generate(pipe)
    mask = recorded_masks(pipe)[0]
    for head in range(tiny.HEADS):
        assert mask.matrix(head).sum(-1).tolist() == mask.block_count[0, head].tolist()


@pytest.mark.parametrize("options", [{"record_masks": ()}, {"warmup_steps": 9}, {"record_masks": (0,)}])
def test_nothing_recorded(options):
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, _config(**options))
    tiny.generate(pipe, steps=2)
    with pytest.raises(UserInputError, match="record_masks"):
        recorded_masks(pipe)


@pytest.mark.parametrize("order", ["raster", "hilbert", "norm_sort"])
def test_the_blocks_of_the_tokens_follow_the_order(order):
    pipe = tiny.wan_pipeline()
    apply_sparse_attention(pipe, _config(order=order))
    tiny.generate(pipe)
    mask = recorded_masks(pipe)[0]
    for head in range(tiny.HEADS):
        query, key = mask.token_blocks(head)
        assert query.bincount().tolist() == key.bincount().tolist() == [8] * 6
        if order == "raster":
            assert query.tolist() == [token // 8 for token in range(tiny.TOKENS)]
        if order == "hilbert":
            assert query.equal(key)
            assert query[hilbert_order(tiny.GRID)].tolist() == [place // 8 for place in range(tiny.TOKENS)]
        if order == "norm_sort":  # queries and keys sort by their own norms
            assert not query.equal(key)
            places = mask.query_order[0, head].tolist()
            assert [query[token].item() for token in places] == [place // 8 for place in range(tiny.TOKENS)]
