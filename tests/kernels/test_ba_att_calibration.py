"""Choice of an order per head, and the study of orders on synthetic heads in small."""

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import (
    CANDIDATE_ORDERS,
    block_scores,
    block_statistics,
    calibrate_orders,
    choose_orders,
    gather_tokens,
    kept_blocks,
    select_blocks,
    token_orders,
)
from diffsieve.kernels.ba_att.reference import orders_of_head, scores_of_head, select_row
from diffsieve.kernels.ba_att.synthetic import SYNTHETIC_HEADS, attention_by_block, kept_mass, synthetic_head

GRID = (5, 9, 10)
SMALL, BLOCK, WINDOW = (5, 16, 24), 64, 320


def reference_recall(query, key, order, density, block, probes, window):
    """Recall of one head by its definition, token by token."""
    order_q, order_k = orders_of_head(query, key, order, GRID, window, True)
    query, key = query[order_q], key[order_k]
    options = {"beta": 0.5, "center_keys": True, "log_count": True, "second_order": True, "scale": key.shape[1] ** -0.5}
    scores = scores_of_head(query, key, block, score="moments", **options)
    attention = torch.softmax(options["scale"] * query @ key.T, dim=-1)
    kept_count = max(1, int(density * len(scores[0]) + 0.5))
    shares = []
    for g in probes:
        rows = attention[g * block : (g + 1) * block]
        kept = select_row(scores[g], kept_count)
        shares.append(sum(rows[:, h * block : (h + 1) * block].sum() for h in kept) / len(rows))
    return sum(shares) / len(shares)


def test_matches_definition(generator):
    query, key = (1.5 * torch.randn(2, 450, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    query, key = query.transpose(1, 2), (key + 0.5).transpose(1, 2)
    recall = calibrate_orders(query, key, grid_thw=GRID, density=0.3, block_size=32, window=64, probe_blocks=4)
    # 14 whole blocks in 4 equal parts: their middles.
    probes = [1, 5, 8, 12]
    for h in range(2):
        for c, name in enumerate(CANDIDATE_ORDERS):
            expected = [reference_recall(query[b, h], key[b, h], name, 0.3, 32, probes, 64) for b in range(2)]
            assert abs(recall[h, c] - sum(expected) / 2) < 1e-6


def test_batch_is_averaged_and_text_left_out(generator):
    query, key = (torch.randn(2, 3, 450, 8, generator=generator) for _ in range(2))
    make = {"grid_thw": GRID, "density": 0.3, "block_size": 32}
    both = calibrate_orders(query, key, **make)
    each = torch.stack([calibrate_orders(query[b : b + 1], key[b : b + 1], **make) for b in range(2)])
    torch.testing.assert_close(both, each.mean(0), rtol=0, atol=1e-6)
    text = torch.randn(2, 3, 20, 8, generator=generator)
    with_text = [torch.cat([text[:, :, :5], x, text[:, :, 5:]], dim=2) for x in (query, key)]
    torch.testing.assert_close(calibrate_orders(*with_text, text_prefix=5, text_suffix=15, **make), both)


def test_shared_key_heads(generator):
    query, key = torch.randn(1, 4, 450, 8, generator=generator), torch.randn(1, 2, 450, 8, generator=generator)
    make = {"grid_thw": GRID, "density": 0.3, "block_size": 32}
    expanded = calibrate_orders(query, key.repeat_interleave(2, dim=1), **make)
    torch.testing.assert_close(calibrate_orders(query, key, **make), expanded, rtol=0, atol=1e-6)


def test_chunks_agree(generator, monkeypatch):
    query, key = (torch.randn(1, 3, 450, 8, generator=generator) for _ in range(2))
    make = {"grid_thw": GRID, "density": 0.3, "block_size": 32, "score": "halfk"}
    whole = calibrate_orders(query, key, **make)
    monkeypatch.setattr("diffsieve.kernels.ba_att.calibration._CHUNK", 1)
    torch.testing.assert_close(calibrate_orders(query, key, **make), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 1, 31), (1, 5, 13), (5, 9, 10)], ids=str)
def test_any_length_and_full_density(grid, generator):
    length = grid[0] * grid[1] * grid[2]
    query, key = (torch.randn(1, 2, length, 8, generator=generator) for _ in range(2))
    recall = calibrate_orders(query, key, grid_thw=grid, density=1.0, block_size=32)
    torch.testing.assert_close(recall, torch.ones(2, 5), rtol=0, atol=1e-5)


def test_without_a_grid_only_raster_and_norm_sort_can_win(generator):
    query, key = (torch.randn(1, 3, 450, 8, generator=generator) for _ in range(2))
    recall = calibrate_orders(query, key, grid_thw=None, density=0.3, block_size=32)
    assert recall[:, [1, 2, 3]].isneginf().all()
    assert set(choose_orders(recall).tolist()) <= {0, 4}


def test_deterministic(generator):
    query, key = (torch.randn(1, 3, 450, 8, generator=generator) for _ in range(2))
    first, second = (calibrate_orders(query, key, grid_thw=GRID, density=0.3, block_size=32) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("recall", "order"),
    [
        ([0.5, 0.5, 0.5, 0.5, 0.5], 0),
        ([0.50, 0.504, 0.40, 0.4, 0.4], 0),  # less than half a point is a tie
        ([0.50, 0.506, 0.51, 0.4, 0.4], 1),
        ([0.10, 0.2, 0.3, 0.4, 0.5], 4),
        ([0.10, float("-inf"), float("-inf"), float("-inf"), 0.5], 4),
        ([float("nan")] * 5, 0),
        ([0.1, float("nan"), 0.2, 0.3, 0.4], 0),
    ],
)
def test_choice(recall, order):
    assert choose_orders(torch.tensor([recall])).tolist() == [order]


def test_choice_without_margin():
    assert choose_orders(torch.tensor([[0.5, 0.5001, 0.5001, 0.4, 0.3]]), tie_margin=0).tolist() == [1]


def test_structure_is_recognised():
    # Attention within a narrow column of pixels over all frames: no frame-wise order can gather it, raster neither.
    frames, height, width = 8, 16, 16
    grid = (frames, height, width)
    y, x = (axis.flatten().repeat(frames) for axis in torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
    near = torch.stack([(2 * torch.pi * k * axis / 32 + p) for axis in (x, y) for k in (1, 2, 3) for p in (0, 0)])
    sign = torch.tensor([0.0, torch.pi / 2]).repeat(6)[:, None]
    tokens = 4 * (near + sign).cos().T[None, None]
    recall = calibrate_orders(tokens, tokens, grid_thw=grid, density=0.2, block_size=64)[0]
    assert recall[2] > recall[0] + 0.1
    assert choose_orders(recall[None])[0] in (2, 3)


def test_nan_does_not_hang(generator):
    query, key = (torch.randn(1, 2, 450, 8, generator=generator) for _ in range(2))
    key[0, 0, 5] = torch.nan
    chosen = choose_orders(calibrate_orders(query, key, grid_thw=GRID, density=0.3, block_size=32))
    assert 0 <= chosen.min() <= chosen.max() < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"probe_blocks": 0}, "probe_blocks must be at least 1, got 0"),
        ({"grid_thw": (5, 9, 9)}, "grid_thw must have as many points"),
        ({"window": 40}, "window must be a positive multiple"),
    ],
)
def test_bad_input(options, message, generator):
    tokens = torch.randn(1, 2, 450, 8, generator=generator)
    with pytest.raises(UserInputError, match=message):
        calibrate_orders(tokens, tokens, **{"grid_thw": GRID, "density": 0.3, "block_size": 32, **options})


def recall_of(query, key, orders, density, *, descending=True, **score):
    order = token_orders(
        query, key, grid_thw=SMALL, orders=orders, block_size=BLOCK, window=WINDOW, descending=descending
    )
    stats = [block_statistics(gather_tokens(x, p), BLOCK) for x, p in zip((query, key), order, strict=True)]
    scores = block_scores(*stats, **score)
    mass = attention_by_block(query, key, order, BLOCK)
    kept = kept_blocks(scores.shape[-1], density)
    return kept_mass(mass, select_blocks(scores, kept)), kept_mass(mass, select_blocks(mass, kept))


@pytest.mark.parametrize("flat", [False, True], ids=["var", "flat"])
def test_default_keeps_more_mass_than_the_paper(flat):
    paper_options = {"descending": False, "beta": 1.0, "center_keys": False, "log_count": False}
    default, paper, oracle = [], [], []
    for name in ("local3d", "semantic", "temporal") if flat else ("local3d", "semantic", "sinksmall"):
        query, key, _ = synthetic_head(name, SMALL, flat=flat)
        found = recall_of(query, key, "hilbert_window", 0.25)
        default.append(found[0])
        oracle.append(found[1])
        paper.append(recall_of(query, key, "norm_sort", 0.25, **paper_options)[0])
    gain = (sum(default) - sum(paper)) / 3
    assert gain > (0.15 if flat else 0.03)
    assert (sum(oracle) - sum(default)) / 3 < 0.04


def test_calibration_picks_a_good_order_on_synthetic_heads():
    regrets = []
    for name in ("local3d", "semantic", "temporal"):
        for flat in (False, True):
            query, key, _ = synthetic_head(name, SMALL, flat=flat)
            table = calibrate_orders(query, key, grid_thw=SMALL, density=0.25, block_size=BLOCK, window=WINDOW)
            chosen = CANDIDATE_ORDERS[choose_orders(table)[0]]
            recalls = {order: recall_of(query, key, order, 0.25)[0] for order in CANDIDATE_ORDERS}
            regrets.append(max(recalls.values()) - recalls[chosen])
    assert sum(regrets) / len(regrets) < 0.02
    assert max(regrets) < 0.06


@pytest.mark.parametrize("name", SYNTHETIC_HEADS)
def test_synthetic_head_is_what_it_says(name):
    head, grid = SYNTHETIC_HEADS[name], (3, 12, 16)
    query, key, value = synthetic_head(name, grid)
    assert query.shape == key.shape == value.shape == (1, 1, 576, 128)
    again = synthetic_head(name, grid)
    assert torch.equal(query, again[0])
    assert torch.equal(key, again[1])
    attention = torch.softmax(query[0, 0] @ key[0, 0].T / 128**0.5, dim=-1)
    if head.sink == "none":
        top = attention.topk(round(0.13 * 576), dim=-1).values.sum(-1).mean()
        assert abs(top - head.top_share) < 0.02
    elif head.sink == "frame":
        assert abs(attention[:, : 12 * 16].sum(-1).mean() - head.sink_mass) < 0.02
    else:
        assert attention.mean(0).topk(24).values.sum() > head.sink_mass - 0.02
    norms = {flat: synthetic_head(name, grid, flat=flat)[1].norm(dim=-1) for flat in (False, True)}
    spread = {flat: x.std() / x.mean() for flat, x in norms.items()}
    assert spread[True] < spread[False]
