"""Research selections against definitions written out pair by pair."""

import math

import pytest
import torch

from diffsieve.kernels.ba_att import (
    CustomSelection,
    TokenOrders,
    ba_attention,
    block_mask,
    token_orders,
)
from diffsieve.study.bound import bound_and_deviation, correlation
from diffsieve.study.mass import block_mass, kept_share
from diffsieve.study.selections import (
    antidiagonal,
    head_budgets,
    one_sided_sort,
    oracle,
    random_blocks,
    select_by_head,
)

SHAPES = [(1, 2, 2, 40, 8), (2, 4, 2, 45, 6), (1, 1, 1, 7, 4)]
BLOCK = 8


def tensors(shape, generator):
    batch, heads, key_heads, length, dim = shape
    return [torch.randn(batch, h, length, dim, generator=generator) for h in (heads, key_heads, key_heads)]


def blocks_of(length):
    return [slice(i, min(i + BLOCK, length)) for i in range(0, length, BLOCK)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_mass_is_the_sum_of_attention_weights(shape, generator):
    q, k, _ = tensors(shape, generator)
    order = token_orders(q, k, orders="norm_sort")
    scale = 0.3
    mass = block_mass(q, k, order, block_size=BLOCK, scale=scale)
    for batch in range(shape[0]):
        for head in range(shape[1]):
            kv = head // (shape[1] // shape[2])
            a = q[batch, head][order.query[batch, head]]
            b = k[batch, kv][order.key[batch, kv]]
            weights = torch.softmax(scale * a @ b.T, dim=-1)
            for i, rows in enumerate(blocks_of(shape[3])):
                for j, columns in enumerate(blocks_of(shape[3])):
                    assert mass[batch, head, i, j] == pytest.approx(weights[rows, columns].sum().item(), abs=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_selection_keeps_more_mass_than_the_oracle(shape, generator):
    q, k, _ = tensors(shape, generator)
    same = TokenOrders(None, None)
    scale = shape[-1] ** -0.5
    mass = block_mass(q, k, same, block_size=BLOCK, scale=scale)
    columns = mass.shape[-1]
    arguments = {"kept": max(1, columns // 2), "block_size": BLOCK, "scale": scale}
    best = kept_share(mass, *oracle().select(q, k, **arguments))
    for other in (random_blocks(0), antidiagonal(4), antidiagonal(8)):
        index, count = other.select(q, k, **arguments)
        assert index.shape == (*mass.shape[:3], arguments["kept"])
        assert (index.diff(dim=-1) > 0).all()
        assert (kept_share(mass, index, count) <= best + 1e-6).all()
    everything = oracle().select(q, k, **arguments | {"kept": columns})
    torch.testing.assert_close(kept_share(mass, *everything), torch.ones(shape[:2]))


def test_antidiagonal_scores_are_the_means_over_antidiagonals(generator):
    q, k, _ = tensors((1, 1, 1, 32, 4), generator)
    stride, scale = 4, 0.5
    logits = scale * q[0, 0] @ k[0, 0].T
    coarse = torch.empty(8, 8)
    for a in range(8):
        for b in range(8):
            pairs = [logits[a * stride + stride - 1 - r, b * stride + r] for r in range(stride)]
            coarse[a, b] = sum(pairs) / stride
    weights = torch.softmax(coarse, dim=-1)
    expected = weights.view(4, 2, 4, 2).sum((1, 3))
    index, count = antidiagonal(stride).select(q, k, kept=2, block_size=BLOCK, scale=scale)
    assert count is None
    assert torch.equal(index[0, 0].long(), expected.topk(2, dim=-1).indices.sort(dim=-1).values)


def test_random_blocks_repeat_by_their_start_and_change_by_call(generator):
    q, k, _ = tensors((1, 2, 2, 80, 4), generator)
    arguments = {"kept": 5, "block_size": BLOCK, "scale": 1.0}
    one, other = random_blocks(3), random_blocks(3)
    first, second = one.select(q, k, **arguments)[0], one.select(q, k, **arguments)[0]
    assert torch.equal(first, other.select(q, k, **arguments)[0])
    assert not torch.equal(first, second)


def test_budgets_of_heads_go_where_attention_is_spread_and_keep_the_total():
    peaked = torch.tensor([8.0, 0, 0, 0, 0, 0])
    flat = torch.tensor([0.0, 0, 0, 0, 0, 0])
    scores = torch.stack([peaked, flat]).expand(3, 2, 6).transpose(0, 1)[None].contiguous()  # (1, 2, 3, 6)
    index, count = select_by_head(scores, scores.logsumexp(-1), 3)
    assert count[0, :, 0].tolist() == [1, 5] or count[0, :, 0].tolist() == [2, 4]
    assert int(count.sum()) == 2 * 3 * 3
    mask = block_mask(index, count, 6)
    assert torch.equal(mask.sum(-1), count.long())
    assert mask[0, 0, :, 0].all()


def test_budgets_keep_the_measured_density(generator):
    q, k, v = tensors((1, 3, 3, 45, 8), generator)
    arguments = {"orders": "raster", "density": 0.5, "block_size": BLOCK, "return_info": True}
    own, theirs = (
        ba_attention(q, k, v, custom=custom, **arguments)[1] for custom in (CustomSelection(), head_budgets())
    )
    assert int(own.kept_pairs) == int(theirs.kept_pairs)


@pytest.mark.parametrize("side", ["query", "key"])
def test_one_sided_sorts_sort_one_side(side, generator):
    q, k, _ = tensors((1, 2, 2, 20, 4), generator)
    order = one_sided_sort(side).order(q, k, None)
    sorted_one, other = (order.query, order.key) if side == "query" else (order.key, order.query)
    tokens = q if side == "query" else k
    assert other is None
    norms = tokens.norm(dim=-1).gather(-1, sorted_one)
    assert (norms.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bound_holds_and_the_deviation_is_exact(shape, generator):
    q, k, _ = tensors(shape, generator)
    order = token_orders(q, k, orders="norm_sort", descending=False)
    bound, deviation = bound_and_deviation(q, k, order, block_size=BLOCK, scale=0.4)
    assert (deviation <= bound + 1e-5).all()
    batch, head = shape[0] - 1, shape[1] - 1
    a = q[batch, head][order.query[batch, head]]
    b = k[batch, -1][order.key[batch, -1]]
    for i, rows in enumerate(blocks_of(shape[3])):
        for j, columns in enumerate(blocks_of(shape[3])):
            block = 0.4 * (a[rows].mean(0) @ b[columns].mean(0))
            largest = (0.4 * a[rows] @ b[columns].T - block).abs().max()
            assert deviation[batch, head, i, j] == pytest.approx(largest.item(), abs=1e-5)


def test_correlation_is_pearsons():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    assert correlation(x, 2 * x + 1).item() == pytest.approx(1.0)
    assert correlation(x, -x).item() == pytest.approx(-1.0)
    assert math.isnan(correlation(x, torch.ones_like(x)).item())
