"""Choice of the blocks that each head keeps: what is measured, the cheapest levels, the blocks of a level."""

import itertools

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import (
    CANDIDATE_ORDERS,
    LEVELS,
    ba_attention,
    budgets_of_levels,
    calibrate_budgets,
    calibrate_orders,
    choose_budgets,
    choose_orders,
    kept_blocks,
    measured_blocks,
)
from diffsieve.kernels.ba_att.budgets import expected_errors
from diffsieve.kernels.ba_att.reference import ba_attention_reference, orders_of_head
from diffsieve.kernels.ba_att.synthetic import synthetic_head

GRID = (5, 9, 10)
MAKE = {"grid_thw": GRID, "density": 0.3, "block_size": 32, "score": "residual", "compensate": "centroid"}
SMALL = (5, 16, 24)


@pytest.mark.parametrize("given", [False, True], ids=["", "dense given"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("score", "compensate"), [("residual", "centroid"), ("moments", "none"), ("halfk", "centroid")], ids=str
)
def test_matches_definition(score, compensate, backend, given, generator):
    tensors = (1.5 * torch.randn(2, 450, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    query, key, value = (x.transpose(1, 2) for x in tensors)
    orders = torch.tensor([0, 3, 4, 1])
    how = {"grid_thw": GRID, "density": 0.5, "block_size": 32, "score": score, "compensate": compensate, "window": 64}
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    rest = {"probe_blocks": 4, "backend": backend, "dense": dense if given else None}
    errors = calibrate_budgets(query, key, value, orders=orders, **rest, **how)
    assert errors.dtype == torch.float32
    assert measured_blocks(8, 15) == (4, 12)
    # 14 whole blocks in 4 equal parts: their middles.
    rows = torch.cat([torch.arange(32 * block, 32 * block + 32) for block in (1, 5, 8, 12)])
    for number, count in enumerate((4, 12)):
        budgets = torch.full((4,), count)
        sparse, _ = ba_attention_reference(query, key, value, orders=orders, budgets=budgets, **how)
        for head, order in enumerate(orders):
            expected = 0.0
            for item in range(2):
                of_head = query[item, head], key[item, head // 2]
                tokens = orders_of_head(*of_head, CANDIDATE_ORDERS[order], GRID, 64, True)[0][rows]
                expected += (sparse - dense)[item, head, tokens].square().sum() / 2
            assert errors[head, number] == pytest.approx(float(expected), rel=1e-5)


def test_batch_is_averaged_and_text_left_out(generator):
    tensors = [torch.randn(2, 3, 450, 8, generator=generator) for _ in range(3)]
    how = MAKE | {"orders": "hilbert", "density": 0.5}
    both = calibrate_budgets(*tensors, **how)
    each = torch.stack([calibrate_budgets(*(x[b : b + 1] for x in tensors), **how) for b in range(2)])
    torch.testing.assert_close(both, each.mean(0), rtol=1e-4, atol=0)
    text = torch.randn(2, 3, 32, 8, generator=generator)
    with_text = [torch.cat([text[:, :, :5], x, text[:, :, 5:]], dim=2) for x in tensors]
    # 16 blocks with that of the text, which every row keeps: half of them leaves 7 for the video, as 7 of 15 do.
    found = calibrate_budgets(*with_text, text_prefix=5, text_suffix=27, **how)
    torch.testing.assert_close(found, calibrate_budgets(*tensors, **how | {"density": 7 / 15}), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("kept", "blocks", "expected"),
    [
        (63, 126, (37, 89)),  # two steps of 13 either way
        (10, 15, (6, 14)),
        (11, 15, (9, 13)),  # one step, where two would keep all
        (2, 15, (1, 3)),
        (1, 15, None),
        (15, 15, None),
        (14, 15, None),
        (1, 1, None),
    ],
)
def test_numbers_of_blocks_measured(kept, blocks, expected):
    assert measured_blocks(kept, blocks) == expected


def test_nothing_is_measured_where_nothing_can_be_shared(generator):
    tensors = [torch.randn(1, 2, 450, 8, generator=generator) for _ in range(3)]
    for density in (0.01, 1.0):
        errors = calibrate_budgets(*tensors, orders="raster", **MAKE | {"density": density})
        assert torch.equal(errors, torch.zeros(2, 2))
        assert choose_budgets(errors, kept_blocks(15, density), 15).tolist() == [0, 0]


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 1, 31), (1, 5, 13), (1, 13, 13)], ids=str)
def test_any_length(grid, generator):
    length = grid[0] * grid[1] * grid[2]
    tensors = (torch.randn(1, 2, length, 8, generator=generator) for _ in range(3))
    errors = calibrate_budgets(*tensors, orders=torch.tensor([4, 3]), **MAKE | {"grid_thw": grid})
    assert errors.isfinite().all()
    blocks = -(-length // 32)
    assert choose_budgets(errors, kept_blocks(blocks, 0.3), blocks).sum() == 0


@pytest.mark.parametrize(("kept", "blocks"), [(63, 126), (25, 31), (3, 31)])
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_choice_is_the_cheapest_of_all_with_the_same_total(heads, kept, blocks, generator):
    errors = (3 * torch.randn(30, heads, 2, generator=generator)).exp().sort(dim=-1, descending=True).values
    levels = choose_budgets(errors, kept, blocks)
    assert (levels.dtype, levels.shape) == (torch.int64, (30, heads))
    assert torch.equal(levels, choose_budgets(errors, kept, blocks))
    assert levels.sum(-1).eq(0).all()
    moved = 0
    for cost, found in zip(expected_errors(errors, kept, blocks), levels.tolist(), strict=True):
        ways = [way for way in itertools.product(range(7), repeat=heads) if sum(way) == 3 * heads]
        sums = [float(sum(cost[head, i] for head, i in enumerate(way))) for way in ways]
        if min(sums) < 0.98 * float(cost[:, 3].sum()):
            got = float(sum(cost[head, LEVELS.index(level)] for head, level in enumerate(found)))
            assert got == pytest.approx(min(sums), rel=1e-12)
            assert sum(budgets_of_levels(found, kept, blocks)) == heads * kept
            moved += 1
        else:
            assert not any(found)
    assert heads == 1 or moved > 3


def test_expected_errors_go_through_those_measured_but_for_the_drift():
    errors = torch.tensor([[8.0, 2.0], [0.08, 0.02], [1.0, 1.0], [1.0, 2.0]])
    expected = expected_errors(errors, 5, 30)  # steps of one block, measured at two fewer and two more
    assert expected.shape == (4, 7)
    ratios = expected[:, 1:] / expected[:, :-1]
    flat = [1.0] * 6
    for row, ratio in zip(ratios, ([2**-0.5] * 6, [2**-0.5] * 6, flat, flat), strict=True):
        assert row.tolist() == pytest.approx(ratio)
    assert float(expected[0, 3] / expected[1, 3]) == pytest.approx(100**0.75)
    assert expected_errors(errors, 3, 30).isinf().tolist() == [[True] + [False] * 6] * 4
    assert expected_errors(errors, 25, 31).isinf().tolist() == [[False] * 5 + [True] * 2] * 4


NOTHING_TO_GAIN = {
    "zeros": torch.zeros(4, 2),
    "ones": torch.ones(4, 2),
    "all alike": torch.tensor([9.0, 3.0]).expand(4, 2),
    "more blocks are worse": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0], [1.0, 1.0]]),
    "nan": torch.tensor([[9.0, 1.0], [0.1, 0.1], [torch.nan, 1.0], [3.0, 2.0]]),
}


@pytest.mark.parametrize("name", NOTHING_TO_GAIN)
def test_budgets_stay_equal_where_nothing_is_gained(name):
    assert choose_budgets(NOTHING_TO_GAIN[name], 15, 30).tolist() == [0] * 4


def test_a_layer_with_nan_does_not_touch_others():
    errors = torch.tensor([[9.0, 1.0], [0.9, 0.8]])
    alone = choose_budgets(errors, 15, 30)
    assert alone.tolist() == [3, -3]
    both = choose_budgets(torch.stack([torch.full_like(errors, torch.nan), errors]), 15, 30)
    assert both.tolist() == [[0, 0], [3, -3]]


def test_an_error_of_zero_is_a_small_one():
    assert choose_budgets(torch.tensor([[0.0, 0.0], [9.0, 1.0]]), 15, 30).tolist() == [-3, 3]
    levels = choose_budgets(torch.tensor([[1e-3, 0.0], [9.0, 1.0]]), 15, 30)
    assert levels[1] > 0


@pytest.mark.parametrize(
    ("levels", "kept", "blocks", "expected"),
    [
        ([0, 0, 0], 15, 30, [15, 15, 15]),
        ([3, -1, -2], 63, 126, [102, 50, 37]),  # steps of 13
        ([1, -1], 1, 5, [1, 1]),  # no head keeps fewer than one block
        ([3, 3, -3, -3], 10, 12, [12, 12, 8, 8]),
        ([2, -1, -1], 5, 5, [5, 5, 5]),
        ([3, 0, -3], 2, 30, [3, 2, 1]),
    ],
)
def test_blocks_of_levels_keep_the_total(levels, kept, blocks, expected):
    found = budgets_of_levels(levels, kept, blocks)
    assert found == expected
    assert sum(found) == kept * len(levels)
    assert 1 <= min(found) <= max(found) <= blocks


def test_total_is_kept_whatever_the_levels(generator):
    for _ in range(300):
        blocks, heads = (int(torch.randint(1, high, (), generator=generator)) for high in (40, 9))
        kept = int(torch.randint(1, blocks + 1, (), generator=generator))
        levels = torch.randint(-3, 4, (heads,), generator=generator).tolist()
        found = budgets_of_levels(levels, kept, blocks)
        assert sum(found) == kept * heads
        assert 1 <= min(found) <= max(found) <= blocks


@pytest.mark.parametrize(("density", "most"), [(0.5, 0.8), (0.25, 0.95)])
def test_error_falls_where_heads_differ(density, most):
    """Of four synthetic heads, also in other tokens than those that were measured."""
    kinds = (("local3d", False), ("semantic", True), ("temporal", False), ("sinksmall", False))
    heads = [synthetic_head(name, SMALL, flat=flat) for name, flat in kinds]
    query, key, value = (torch.cat(parts, dim=1) for parts in zip(*heads, strict=True))
    how = {"grid_thw": SMALL, "density": density, "block_size": 64, "score": "residual", "compensate": "centroid"}
    orders = choose_orders(calibrate_orders(query, key, value, **how))
    kept = kept_blocks(30, density)
    levels = choose_budgets(calibrate_budgets(query, key, value, orders=orders, **how), kept, 30)
    budgets = torch.tensor(budgets_of_levels(levels.tolist(), kept, 30))
    assert len(set(budgets.tolist())) > 1
    assert budgets.sum() == 4 * kept
    generator = torch.Generator().manual_seed(3)
    for noise in (0.0, 0.1):
        tensors = [x + noise * x.std() * torch.randn(x.shape, generator=generator) for x in (query, key, value)]
        dense = torch.nn.functional.scaled_dot_product_attention(*tensors)
        equal, shared = (
            (ba_attention(*tensors, orders=orders, budgets=x, **how) - dense).square().sum() for x in (None, budgets)
        )
        assert shared < most * equal


def test_deterministic_and_deaf_to_autocast(generator):
    tensors = [torch.randn(1, 3, 450, 8, generator=generator) for _ in range(3)]
    how = MAKE | {"orders": torch.tensor([4, 3, 0])}
    expected = calibrate_budgets(*tensors, **how)
    assert torch.equal(calibrate_budgets(*tensors, **how), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(calibrate_budgets(*tensors, **how), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"probe_blocks": 0}, "probe_blocks must be at least 1, a whole number, or None, got 0"),
        ({"orders": "zigzag"}, "orders must be one of"),
        ({"orders": torch.tensor([0, 9])}, r"orders must hold ids of .* got 9"),
        ({"dense": torch.zeros(1, 2, 449, 8)}, r"dense must have the shape of query, \(1, 2, 450, 8\)"),
    ],
)
def test_bad_input(options, message, generator):
    tokens = torch.randn(1, 2, 450, 8, generator=generator)
    with pytest.raises(UserInputError, match=message):
        calibrate_budgets(tokens, tokens, tokens, **MAKE | {"orders": "hilbert"} | options)


@pytest.mark.parametrize("kept", [0, 6])
def test_blocks_kept_are_some_of_the_sequence(kept):
    with pytest.raises(UserInputError, match=rf"kept must be in \[1, 5\], the blocks of the sequence, got {kept}"):
        budgets_of_levels([0, 0], kept, 5)
    with pytest.raises(UserInputError, match=rf"got {kept}"):
        choose_budgets(torch.ones(2, 2), kept, 5)


def test_errors_to_choose_by_come_in_pairs():
    with pytest.raises(UserInputError, match=r"errors must have the shape \(\.\.\., H, 2\), got \(4, 5\)"):
        choose_budgets(torch.ones(4, 5), 3, 10)
