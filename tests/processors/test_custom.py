"""Orders and selections from outside run in the place of BA-Att's own."""

import pytest
import torch

from diffsieve.errors import UserInputError
from diffsieve.kernels.ba_att import CustomSelection, TokenOrders, ba_attention, select_blocks, token_orders
from diffsieve.processors import BAAttConfig, apply_sparse_attention, sparsity_summary, use_custom_selection
from tests.tiny import generate, wan_pipeline

SETTINGS = {"min_tokens": 0, "block_size": 8, "warmup_steps": 1, "dense_layers": ()}


def first_blocks(query, key, *, kept, block_size, scale):
    rows = -(-query.shape[2] // block_size)
    index = torch.arange(kept, dtype=torch.int32, device=query.device)
    return index.expand(*query.shape[:2], rows, kept).contiguous(), None


def test_a_selection_from_outside_is_what_is_attended_to(generator):
    q, k, v = (torch.randn(1, 2, 40, 8, generator=generator) for _ in range(3))
    custom = CustomSelection(select=first_blocks)
    out, info = ba_attention(
        q, k, v, orders="raster", density=0.5, block_size=8, custom=custom, return_info=True, compensate="none"
    )
    assert info.block_index.shape == (1, 2, 5, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :24], v[:, :, :24])
    torch.testing.assert_close(out, expected)


def test_an_order_from_outside_is_used(generator):
    q, k, v = (torch.randn(1, 2, 40, 8, generator=generator) for _ in range(3))

    def order(query, key, grid_thw):
        return TokenOrders(*token_orders(query, key, orders="norm_sort", descending=False))

    mine = ba_attention(q, k, v, orders="raster", density=0.4, block_size=8, custom=CustomSelection(order=order))
    own = ba_attention(q, k, v, orders="norm_sort", density=0.4, block_size=8, descending=False)
    assert torch.equal(mine, own)


def test_layers_of_a_pipeline_take_it_and_forget_it():
    pipe = wan_pipeline()
    config = BAAttConfig(order="raster", sparsity=0.5, **SETTINGS)
    apply_sparse_attention(pipe, config)
    own = generate(pipe)
    told = []
    use_custom_selection(pipe, lambda layer: told.append(layer) or CustomSelection(select=first_blocks))
    other = generate(pipe)
    assert told == [f"transformer.blocks.{n}" for n in range(3)]
    assert sparsity_summary(pipe).density_sparse_steps == pytest.approx(0.5)
    assert not torch.equal(own, other)
    apply_sparse_attention(pipe, config)
    assert torch.equal(generate(pipe), own)


def test_refusals():
    pipe = wan_pipeline()
    with pytest.raises(UserInputError, match="needs BA-Att"):
        use_custom_selection(pipe, lambda layer: None)
    apply_sparse_attention(pipe, BAAttConfig(**SETTINGS))
    custom = CustomSelection(order=lambda q, k, grid: TokenOrders(None, None))
    with pytest.raises(UserInputError, match='must not be "auto"'):
        use_custom_selection(pipe, lambda layer: custom)
    first = {"transformer.blocks.0": CustomSelection(select=first_blocks)}
    with pytest.raises(UserInputError, match='must not be "auto"'):
        use_custom_selection(pipe, lambda layer: first.get(layer, custom))
    assert all(block.attn1.processor._custom is None for block in pipe.transformer.blocks)


def test_selecting_everything_is_dense_attention(generator):
    q, k, v = (torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3))

    def everything(query, key, *, kept, block_size, scale):
        return select_blocks(torch.zeros(1, 2, 3, 3), 3), None

    out = ba_attention(q, k, v, orders="raster", density=0.1, block_size=8, custom=CustomSelection(select=everything))
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
