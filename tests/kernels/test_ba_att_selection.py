"""Step 6 of BA-Att: top-k and top-p over block scores."""

import re

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import block_mask, kept_blocks, select_blocks, select_blocks_top_p
from diffsieve.kernels.ba_att.reference import select_row, select_row_top_p


@pytest.mark.parametrize(
    ("blocks", "density", "kept"),
    [
        (53, 0.5, 27),
        (53, 0.49, 26),
        (53, 0.25, 13),
        (53, 0.1, 5),
        (1, 0.5, 1),
        (8, 0.01, 1),
        (10, 0.25, 3),
        (7, 1.0, 7),
    ],
)
def test_kept_blocks(blocks, density, kept):
    assert kept_blocks(blocks, density) == kept


@pytest.mark.parametrize("kept", [1, 5, 12, 13])
def test_matches_reference(kept, generator):
    scores = torch.randn(2, 3, 7, 13, generator=generator)
    index = select_blocks(scores, kept)
    assert index.dtype is torch.int32
    assert index.is_contiguous()
    for row, got in zip(scores.view(-1, 13), index.view(-1, kept), strict=True):
        assert got.tolist() == select_row(row, kept)


def test_ties_go_to_the_lowest_index():
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0, -0.0, 0.0, -0.0, 0.0, -0.0], [3.0] * 6])
    assert select_blocks(scores, 3).tolist() == [[0, 1, 3], [0, 1, 2], [0, 1, 2]]
    many = torch.zeros(4, 4096)
    assert torch.equal(select_blocks(many, 100), torch.arange(100, dtype=torch.int32).expand(4, 100))
    index, count = select_blocks_top_p(torch.zeros(1, 8), 0.5)
    assert index[0, : count[0]].tolist() == [0, 1, 2, 3]


def test_nan_and_infinity_stay_in_range(generator):
    scores = torch.randn(6, 9, generator=generator)
    scores[0], scores[1, 4], scores[2, 3], scores[3, 5], scores[4] = (
        torch.nan,
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    index = select_blocks(scores, 4)
    assert (index.diff(dim=-1) > 0).all()
    assert 0 <= index.min() <= index.max() < 9
    assert 4 in index[1]  # NaN is kept, so that it shows
    assert 3 in index[2]
    assert 5 not in index[3]
    for p in (0.5, 1.0):
        index, count = select_blocks_top_p(scores, p, min_blocks=2, max_blocks=6)
        assert 0 <= index.min() <= index.max() < 9
        assert 2 <= count.min() <= count.max() <= 6


@pytest.mark.parametrize(("fewest", "most"), [(1, 13), (3, 6)])
@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 1.0])
def test_top_p_matches_reference(p, fewest, most, generator):
    scores = 2 * torch.randn(2, 3, 7, 13, generator=generator, dtype=torch.float64)
    index, count = select_blocks_top_p(scores, p, min_blocks=fewest, max_blocks=most)
    assert index.shape == (2, 3, 7, most)
    assert index.dtype is count.dtype is torch.int32
    for row, got, number in zip(scores.view(-1, 13), index.view(-1, most), count.view(-1), strict=True):
        assert got[:number].tolist() == select_row_top_p(row, p, fewest, most)
        assert (got >= 0).all()
        assert (got < 13).all()


def test_top_p_one_keeps_every_block_however_small():
    scores = torch.tensor([[0.0, -80.0, -1e4, -1e30]])
    index, count = select_blocks_top_p(scores, 1.0)
    assert index.tolist() == [[0, 1, 2, 3]]
    assert count.tolist() == [4]


def test_top_p_reaches_its_mass(generator):
    scores = 3 * torch.randn(50, 40, generator=generator, dtype=torch.float64)
    index, count = select_blocks_top_p(scores, 0.8)
    kept = block_mask(index, count, 40)
    mass = torch.softmax(scores, -1)
    reached = (mass * kept).sum(-1)
    smallest = mass.masked_fill(~kept, torch.inf).min(-1).values
    assert (reached >= 0.8 - 1e-12).all()
    assert (reached - smallest < 0.8).all()


def test_block_mask_ignores_entries_past_the_count():
    index = torch.tensor([[0, 2, 3], [1, 2, 3]], dtype=torch.int32)
    count = torch.tensor([2, 0], dtype=torch.int32)
    assert block_mask(index, count, 4).int().tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]
    assert block_mask(index, None, 4).int().tolist() == [[1, 0, 1, 1], [0, 1, 1, 1]]


SCORES = torch.zeros(1, 2, 3, 15)


@pytest.mark.parametrize("kept", [0, -1, 16, 2.0, True, None])
def test_numbers_of_blocks_that_there_are_not(kept):
    with pytest.raises(UserInputError, match=re.escape(f"kept must be a whole number in [1, 15], got {kept}")):
        select_blocks(SCORES, kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0}, "p must be in (0, 1], got 0"),
        ({"p": 1.5}, "p must be in (0, 1], got 1.5"),
        ({"p": float("nan")}, "p must be in (0, 1], got nan"),
        ({"max_blocks": 16}, "max_blocks must be a whole number in [1, 15], got 16"),
        ({"p": 1, "max_blocks": 0}, "max_blocks must be a whole number in [1, 15], got 0"),
        ({"min_blocks": 0}, "min_blocks must be a whole number in [1, 15], got 0"),
        ({"min_blocks": 4, "max_blocks": 3}, "min_blocks must be a whole number in [1, 3], got 4"),
    ],
)
def test_top_p_refuses(options, message):
    with pytest.raises(UserInputError, match=re.escape(message)):
        select_blocks_top_p(SCORES, **{"p": 0.5} | options)
