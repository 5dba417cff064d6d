"""Choice of an order per head, and the study of orders on synthetic heads in small."""

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import (
    CANDIDATE_ORDERS,
    ba_attention,
    block_scores,
    block_statistics,
    calibrate_orders,
    choose_orders,
    gather_tokens,
    kept_blocks,
    select_blocks,
    token_orders,
)
from diffsieve.kernels.ba_att.probing import probe_count
from diffsieve.kernels.ba_att.reference import attention_of_head, orders_of_head, scores_of_head, select_row
from diffsieve.kernels.ba_att.synthetic import SYNTHETIC_HEADS, attention_by_block, kept_mass, synthetic_head

GRID = (5, 9, 10)
MAKE = {"grid_thw": GRID, "density": 0.3, "block_size": 32, "score": "residual", "compensate": "centroid"}
SMALL, BLOCK, WINDOW = (5, 16, 24), 64, 320


def reference_error(query, key, value, order, block, probes, window, *, density, score, compensate):
    """Squared relative error of one head by its definition, token by token."""
    order_q, order_k = orders_of_head(query, key, order, GRID, window, True)
    query, key, value = query[order_q], key[order_k], value[order_k]
    options = {"beta": 0.5, "center_keys": True, "log_count": True, "second_order": True, "scale": key.shape[1] ** -0.5}
    scores = scores_of_head(query, key, block, score=score, **options)
    kept = [select_row(row, max(1, int(density * len(row) + 0.5))) for row in scores]
    none = key[:0]
    sparse = attention_of_head(query, key, value, kept, block, options["scale"], compensate, none, none)
    dense = torch.softmax(options["scale"] * query @ key.T, dim=-1) @ value
    rows = torch.cat([torch.arange(g * block, (g + 1) * block) for g in probes])
    return (sparse - dense)[rows].square().sum() / dense[rows].square().sum()


@pytest.mark.parametrize("given", [False, True], ids=["", "dense given"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("score", "compensate"), [("residual", "centroid"), ("moments", "none"), ("halfk", "centroid")], ids=str
)
def test_matches_definition(score, compensate, backend, given, generator):
    tensors = (1.5 * torch.randn(2, 450, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    query, key, value = (x.transpose(1, 2) for x in tensors)
    key = key + 0.5
    how = {"density": 0.3, "score": score, "compensate": compensate}
    rest = {"grid_thw": GRID, "block_size": 32, "window": 64, "probe_blocks": 4, "backend": backend}
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value) if given else None
    errors = calibrate_orders(query, key, value, dense=dense, **rest, **how)
    assert errors.dtype == torch.float32
    # 14 whole blocks in 4 equal parts: their middles.
    probes = [1, 5, 8, 12]
    for h in range(2):
        for c, name in enumerate(CANDIDATE_ORDERS):
            heads = ((query[b, h], key[b, h], value[b, h]) for b in range(2))
            expected = [reference_error(*head, name, 32, probes, 64, **how) for head in heads]
            assert errors[h, c] == pytest.approx(float(sum(expected) / 2), rel=1e-5)


def test_batch_is_averaged_and_text_left_out(generator):
    tensors = [torch.randn(2, 3, 450, 8, generator=generator) for _ in range(3)]
    both = calibrate_orders(*tensors, **MAKE)
    each = torch.stack([calibrate_orders(*(x[b : b + 1] for x in tensors), **MAKE) for b in range(2)])
    torch.testing.assert_close(both, each.mean(0), rtol=1e-5, atol=0)
    text = torch.randn(2, 3, 20, 8, generator=generator)
    with_text = [torch.cat([text[:, :, :5], x, text[:, :, 5:]], dim=2) for x in tensors]
    torch.testing.assert_close(calibrate_orders(*with_text, text_prefix=5, text_suffix=15, **MAKE), both)


def test_dense_attention_that_is_given_is_what_errors_are_measured_against(generator):
    query, key, value = (torch.randn(1, 2, 450, 8, generator=generator) for _ in range(3))
    errors = calibrate_orders(query, key, value, dense=torch.full_like(query, 1e4), **MAKE)
    torch.testing.assert_close(errors, torch.ones(2, 5), rtol=1e-3, atol=0)


def test_dense_attention_may_be_of_the_dtype_of_autocast(generator):
    query, key, value = (torch.randn(1, 2, 450, 8, generator=generator) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        dense = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        errors = calibrate_orders(query, key, value, dense=dense, **MAKE)
    assert dense.dtype == torch.bfloat16
    torch.testing.assert_close(errors, calibrate_orders(query, key, value, **MAKE), rtol=0.05, atol=1e-4)


def test_shared_key_heads(generator):
    query = torch.randn(1, 4, 450, 8, generator=generator)
    key, value = (torch.randn(1, 2, 450, 8, generator=generator) for _ in range(2))
    expanded = calibrate_orders(query, *(x.repeat_interleave(2, dim=1) for x in (key, value)), **MAKE)
    torch.testing.assert_close(calibrate_orders(query, key, value, **MAKE), expanded, rtol=1e-5, atol=0)


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 1, 31), (1, 5, 13), (5, 9, 10)], ids=str)
def test_any_length_and_full_density(grid, generator):
    length = grid[0] * grid[1] * grid[2]
    tensors = (torch.randn(1, 2, length, 8, generator=generator) for _ in range(3))
    errors = calibrate_orders(*tensors, **MAKE | {"grid_thw": grid, "density": 1.0})
    torch.testing.assert_close(errors, torch.zeros(2, 5), rtol=0, atol=1e-10)


def test_without_a_grid_only_raster_and_norm_sort_can_win(generator):
    tensors = (torch.randn(1, 3, 450, 8, generator=generator) for _ in range(3))
    errors = calibrate_orders(*tensors, **MAKE | {"grid_thw": None})
    assert errors[:, [1, 2, 3]].isposinf().all()
    assert set(choose_orders(errors).tolist()) <= {0, 4}


def test_deterministic(generator):
    tensors = [torch.randn(1, 3, 450, 8, generator=generator) for _ in range(3)]
    assert torch.equal(calibrate_orders(*tensors, **MAKE), calibrate_orders(*tensors, **MAKE))


def test_values_of_zero_are_a_tie(generator):
    query, key = (torch.randn(1, 2, 450, 8, generator=generator) for _ in range(2))
    errors = calibrate_orders(query, key, torch.zeros_like(key), **MAKE)
    assert torch.equal(errors, torch.zeros(2, 5))
    assert choose_orders(errors).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("errors", "order"),
    [
        ([0.5, 0.5, 0.5, 0.5, 0.5], 0),
        ([0.0, 0.0, 0.0, 0.0, 0.0], 0),
        ([0.509, 0.50, 0.60, 0.6, 0.6], 0),  # less than two percent is a tie
        ([0.520, 0.509, 0.50, 0.6, 0.6], 1),
        ([5.20e-6, 5.09e-6, 5e-6, 6e-6, 6e-6], 1),
        ([0.50, 0.4, 0.3, 0.2, 0.1], 4),
        ([0.10, float("inf"), float("inf"), float("inf"), 0.05], 4),
        ([float("nan")] * 5, 0),
        ([0.4, float("nan"), 0.3, 0.2, 0.1], 0),
    ],
)
def test_choice(errors, order):
    assert choose_orders(torch.tensor([errors])).tolist() == [order]


def test_choice_without_margin():
    assert choose_orders(torch.tensor([[0.5001, 0.5, 0.5, 0.6, 0.7]]), tie_margin=0).tolist() == [1]


@pytest.mark.parametrize(("tokens", "blocks"), [(100, 1), (4_032, 7), (16_384, 32), (17_600, 32), (75_600, 32)])
def test_blocks_measured_by_default(tokens, blocks):
    assert probe_count(tokens, 128) == blocks


def test_default_leaves_the_text_out(generator):
    tokens = torch.randn(3, 1, 2, 470, 16, generator=generator)
    given = calibrate_orders(*tokens, text_suffix=20, probe_blocks=3, **MAKE)
    assert torch.equal(calibrate_orders(*tokens, text_suffix=20, **MAKE), given)


def test_error_decides_where_recall_would_choose_otherwise(generator):
    """Much of the mass lies in the first rows of the frame, which raster order keeps whole; values go by column.

    A sort by norm tells the columns apart and mixes the rows: it keeps less of the mass, but every block that it skips
    has keys of one value, which their mean gives exactly. The mean of a block in raster order gives the mean of both.
    """
    place = torch.arange(256)
    top, even = place < 64, place % 2 == 0
    query, key, value = (torch.zeros(1, 1, 256, 4) for _ in range(3))
    query[..., :2] = 2.0
    key[..., 0] = torch.where(top, 1.0, 0.0)
    key[..., 1] = torch.where(even, 0.5, -0.5)
    # No query sees these channels: norms do not tell the first rows, but the columns, and rows in any order.
    key[..., 3] = torch.where(top, 0.0, 1.0)
    key[..., 2] = torch.where(even, 3.0, 6.0) + 0.2 * torch.rand(256, generator=generator)
    value[..., 0] = torch.where(even, 1.0, -1.0)
    how = {"grid_thw": (1, 16, 16), "density": 0.25, "block_size": 32}
    how |= {"score": "moments", "compensate": "centroid"}
    recall, error = [], []
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    for name in CANDIDATE_ORDERS:
        out, info = ba_attention(query, key, value, orders=name, return_info=True, **how)
        order = token_orders(query, key, grid_thw=(1, 16, 16), orders=name, block_size=32)
        recall.append(kept_mass(attention_by_block(query, key, order, 32), info.block_index))
        error.append(float((out - dense).norm()))
    assert recall[0] == pytest.approx(max(recall))
    assert recall[0] > recall[4] + 0.05
    assert min(error) == error[4] < error[0] / 2
    assert choose_orders(calibrate_orders(query, key, value, **how)).tolist() == [4]


def test_structure_is_recognised(generator):
    # Attention within a narrow column of pixels over all frames: no frame-wise order can gather it, raster neither.
    frames, height, width = 8, 16, 16
    grid = (frames, height, width)
    y, x = (axis.flatten().repeat(frames) for axis in torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
    near = torch.stack([(2 * torch.pi * k * axis / 32 + p) for axis in (x, y) for k in (1, 2, 3) for p in (0, 0)])
    sign = torch.tensor([0.0, torch.pi / 2]).repeat(6)[:, None]
    tokens = 4 * (near + sign).cos().T[None, None]
    values = torch.randn(1, 1, tokens.shape[2], 8, generator=generator)
    values = torch.cat([values, torch.zeros(1, 1, tokens.shape[2], tokens.shape[3] - 8)], dim=-1)
    errors = calibrate_orders(tokens, tokens, values, grid_thw=grid, density=0.2, block_size=64)[0]
    assert errors[2] < errors[0] / 4
    assert choose_orders(errors[None])[0] in (2, 3)


@pytest.mark.parametrize("broken", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_does_not_hang(broken, generator):
    tensors = [torch.randn(1, 2, 450, 8, generator=generator) for _ in range(3)]
    tensors[broken][0, 0, :40] = torch.nan
    errors = calibrate_orders(*tensors, **MAKE)
    assert errors[0].isnan().any()
    assert errors[1].isfinite().all()
    chosen = choose_orders(errors)
    assert 0 <= chosen.min() <= chosen.max() < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"probe_blocks": 0}, "probe_blocks must be at least 1, a whole number, or None, got 0"),
        ({"grid_thw": (5, 9, 9)}, "grid_thw must have as many points"),
        ({"window": 40}, "window must be a positive multiple"),
        ({"dense": torch.zeros(1, 2, 449, 8)}, r"dense must have the shape of query, \(1, 2, 450, 8\)"),
        ({"dense": torch.zeros(1, 2, 450, 8), "text_suffix": 5}, "with 5 text tokens"),
        ({"dense": torch.zeros(1, 2, 450, 8, device="meta")}, "dense must be on cpu like query, got meta"),
    ],
)
def test_bad_input(options, message, generator):
    tokens = torch.randn(1, 2, 450, 8, generator=generator)
    with pytest.raises(UserInputError, match=message):
        calibrate_orders(tokens, tokens, tokens, **MAKE | options)


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
            tensors = synthetic_head(name, SMALL, flat=flat)
            how = {"grid_thw": SMALL, "density": 0.25, "block_size": BLOCK, "window": WINDOW}
            how |= {"score": "residual", "compensate": "centroid"}
            chosen = int(choose_orders(calibrate_orders(*tensors, **how))[0])
            dense = torch.nn.functional.scaled_dot_product_attention(*tensors)
            errors = [(ba_attention(*tensors, orders=order, **how) - dense).norm() for order in CANDIDATE_ORDERS]
            regrets.append(float(errors[chosen] / min(errors)))
    assert max(regrets) < 1.1


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
