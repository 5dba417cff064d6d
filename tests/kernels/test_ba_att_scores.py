"""Steps 3 to 5 of BA-Att: the identities behind the scores, by enumerating all pairs of tokens in fp64."""

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import BlockStatistics, block_scores, block_statistics, halfk_scores, residual_scores
from diffsieve.kernels.ba_att.reference import scores_of_head
from diffsieve.kernels.ba_att.scores import _tf32_part, matmul_split, score_blocks

PAPER = {"beta": 1.0, "center_keys": False, "log_count": False}
PLAIN = {"center_keys": False, "log_count": False}


def tokens(generator, length, heads=2, dim=6, bias=0.5):
    return torch.randn(2, heads, length, dim, generator=generator, dtype=torch.float64) + bias


def pair_logits(query, key, block):
    """x_ij of every pair of blocks, {(g, h): (B, H, n_g, n_h)}."""
    scale = query.shape[-1] ** -0.5
    return {
        (g, h): scale * q @ k.transpose(-1, -2)
        for g, q in enumerate(query.split(block, dim=2))
        for h, k in enumerate(key.split(block, dim=2))
    }


def orthogonal_blocks(generator, num_blocks, spread):
    """Blocks of 16 tokens and 8 channels whose channels are exactly uncorrelated: signs of a Hadamard matrix."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)], 0)
    blocks = []
    for _ in range(num_blocks):
        columns = 1 + torch.randperm(15, generator=generator)[:8]  # column 0 is constant
        size = spread * (0.5 + torch.rand(8, generator=generator, dtype=torch.float64))
        mean = torch.randn(8, generator=generator, dtype=torch.float64)
        blocks.append(mean + size * hadamard[:, columns])
    return torch.cat(blocks)[None, None]


@pytest.mark.parametrize(("length_q", "length_k"), [(1, 1), (31, 32), (33, 70), (64, 129)])
def test_base_logit_is_the_mean_over_pairs(length_q, length_k, generator):
    query, key = tokens(generator, length_q), tokens(generator, length_k)
    scores = block_scores(block_statistics(query, 32), block_statistics(key, 32), second_order=False, **PLAIN)
    for (g, h), x in pair_logits(query, key, 32).items():
        torch.testing.assert_close(scores[:, :, g, h], x.mean(dim=(-1, -2)), rtol=0, atol=1e-12)


def test_full_variance_identity(generator):
    # Var x = (Km' Sq Km + Qm' Sk Qm + tr(Sq Sk)) / D, of which Eq. 14 is the diagonal.
    query, key = tokens(generator, 20)[0, 0], tokens(generator, 20)[0, 0]
    q_mean, k_mean = query.mean(0), key.mean(0)
    s_q, s_k = (x.T.cov(correction=0) for x in (query, key))
    expected = (k_mean @ s_q @ k_mean + q_mean @ s_k @ q_mean + (s_q @ s_k).trace()) / 6
    variance = (query @ key.T / 6**0.5).var(correction=0)
    torch.testing.assert_close(variance, expected, rtol=0, atol=1e-12)


def test_second_order_term_is_the_variance_over_pairs_of_uncorrelated_channels(generator):
    query, key = orthogonal_blocks(generator, 3, 0.7), orthogonal_blocks(generator, 4, 0.9)
    scores = block_scores(block_statistics(query, 16), block_statistics(key, 16), beta=0.5, **PLAIN)
    for (g, h), x in pair_logits(query, key, 16).items():
        expected = x.mean() + x.var(correction=0) / 2
        torch.testing.assert_close(scores[0, 0, g, h], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("beta", "order"), [(0.5, 3), (1.0, 2)])
def test_half_is_the_right_weight(beta, order):
    # log E[e^x] - E[x] - beta Var[x] vanishes with the third power of the spread (the third cumulant) at beta = 1/2,
    # but only with the second at beta = 1.
    errors = []
    for spread in (0.1, 0.05):
        query = orthogonal_blocks(torch.Generator().manual_seed(1), 3, spread)
        key = orthogonal_blocks(torch.Generator().manual_seed(2), 4, spread)
        scores = block_scores(block_statistics(query, 16), block_statistics(key, 16), beta=beta, **PLAIN)
        pairs = pair_logits(query, key, 16)
        mass = torch.stack([torch.logsumexp(x.flatten(), 0) for x in pairs.values()]) - torch.tensor(256.0).log()
        errors.append((scores.flatten() - mass).abs().mean())
    assert 2 ** (order - 0.4) < errors[0] / errors[1] < 2 ** (order + 0.4)


def test_one_product_equals_the_three_terms_of_eq_14(generator):
    query, key = (block_statistics(tokens(generator, length), 32) for length in (70, 129))
    terms = (
        query.variance @ key.mean.square().transpose(-1, -2)
        + query.mean.square() @ key.variance.transpose(-1, -2)
        + query.variance @ key.variance.transpose(-1, -2)
    )
    expected = query.mean @ key.mean.transpose(-1, -2) / 6**0.5 + terms / 6
    torch.testing.assert_close(block_scores(query, key, **PAPER), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("score", ["moments", "halfk"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        PAPER,
        {"second_order": False},
        {"log_count": False, "beta": 0.7, "scale": 0.9},
        {"center_keys": False},
    ],
    ids=["default", "paper", "mean", "scaled", "uncentred"],
)
def test_matches_reference(score, options, generator):
    options = {"beta": 0.5, "center_keys": True, "log_count": True, "second_order": True, "scale": 0.4, **options}
    query, key = tokens(generator, 70, heads=4), tokens(generator, 100, heads=2)
    stats = block_statistics(query, 32), block_statistics(key, 32)
    got = halfk_scores(*stats, key, 32, **options) if score == "halfk" else block_scores(*stats, **options)
    for b in range(2):
        for h in range(4):
            expected = scores_of_head(query[b, h], key[b, h // 2], 32, score=score, **options)
            difference = got[b, h] - expected
            if options["center_keys"]:  # centring moves a row by a constant, which no use of the scores sees
                difference = difference - difference[:, :1]
            assert difference.abs().max() < 1e-12


def test_halfk_is_exact_when_queries_are_equal(generator):
    query, key = tokens(generator, 1).expand(-1, -1, 32, -1), tokens(generator, 90)
    scores = halfk_scores(block_statistics(query, 32), block_statistics(key, 32), key, 32)
    for (_, h), x in pair_logits(query, key, 32).items():
        torch.testing.assert_close(scores[:, :, 0, h], x[:, :, 0].logsumexp(-1), rtol=0, atol=1e-12)


def test_halfk_chunks_agree(generator, monkeypatch):
    query, key = tokens(generator, 70, heads=4), tokens(generator, 100, heads=2)
    stats = block_statistics(query, 32), block_statistics(key, 32)
    whole = halfk_scores(*stats, key, 32)
    monkeypatch.setattr("diffsieve.kernels.ba_att.scores._CHUNK", 1)
    torch.testing.assert_close(halfk_scores(*stats, key, 32), whole, rtol=0, atol=1e-13)


def test_common_key_shift_moves_rows_by_a_constant_unless_as_published(generator):
    query, key = tokens(generator, 70), tokens(generator, 100)
    shift = 3 * torch.randn(6, generator=generator, dtype=torch.float64)

    def column_differences(options):
        stats = [block_statistics(x, 32) for x in (query, key, key + shift)]
        rows = block_scores(stats[0], stats[2], **options) - block_scores(stats[0], stats[1], **options)
        return (rows - rows[..., :1]).abs().max()

    assert column_differences({}) < 1e-11
    assert column_differences(PAPER) > 0.1


def test_log_count_of_the_tail(generator):
    stats = [block_statistics(tokens(generator, 80), 32) for _ in range(2)]
    with_count, without = (block_scores(*stats, log_count=flag) for flag in (True, False))
    expected = torch.tensor([32.0, 32.0, 16.0], dtype=torch.float64).log().expand_as(with_count)
    torch.testing.assert_close(with_count - without, expected, rtol=0, atol=1e-12)


def test_split_product_fits_tf32_and_keeps_fp32_accuracy(generator):
    left = torch.randn(3, 40, 96, generator=generator) * torch.logspace(-3, 3, 96)
    right = torch.randn(3, 96, 50, generator=generator)
    high = _tf32_part(left)
    low = left - high
    # TF32 keeps 11 significant bits: the high part whole, the low part (of 12 bits and a sign) but for its last bit.
    assert torch.equal(cut_to_tf32(high), high)
    assert (low.abs() <= left.abs() * 2.0**-11).all()
    assert ((low - cut_to_tf32(low)).abs() <= left.abs() * 2.0**-23).all()
    bound = left.double().abs() @ right.double().abs() * 2.0**-20
    assert ((matmul_split(left, right) - left.double() @ right.double()).abs() <= bound).all()


def test_split_product_leaves_what_its_docstring_says():
    # Mantissas at which the parts lose most, among them those just below the next multiple of 2^-10.
    fraction = torch.arange(1, 1 << 13, dtype=torch.float64) * 2.0**-23
    x = torch.cat([1 + fraction, 1 + 37 * 2.0**-10 + fraction, 1.5 + fraction, 2 - fraction]).float()
    y = x.flip(0)
    (x_high, x_low), (y_high, y_low) = ((_tf32_part(z), cut_to_tf32(z - _tf32_part(z))) for z in (x, y))
    # Products and sums exact: what is left is what the split gives up.
    kept = (x_high.double() + x_low.double()) * y_high.double() + x_high.double() * y_low.double()
    for left, right, product in ((x, y, kept), (x, x, (x_high.double() + 2 * x_low.double()) * x_high.double())):
        exact = left.double() * right.double()
        assert float(((product - exact) / exact).abs().max()) <= 2.0**-21


def cut_to_tf32(x):
    """What tensor cores read of fp32 factors: the leading 19 bits."""
    return x.view(torch.int32).bitwise_and(-(1 << 13)).view(torch.float32)


def test_statistics_in_fp32_score_in_fp32(generator):
    stats = block_statistics(tokens(generator, 70).to(torch.bfloat16), 32)
    assert isinstance(stats, BlockStatistics)
    assert block_scores(stats, stats).dtype is torch.float32


def test_residual_ranks_by_what_the_means_miss(generator):
    # Two blocks of equal mass: in one all keys are alike, so that its mean says all.
    query = torch.randn(1, 1, 16, 8, generator=generator, dtype=torch.float64)
    alike = torch.randn(1, 1, 1, 8, generator=generator, dtype=torch.float64).expand(1, 1, 16, 8)
    spread = torch.randn(1, 1, 16, 8, generator=generator, dtype=torch.float64)
    statistics = [block_statistics(x, 16) for x in (query, torch.cat([alike, spread], dim=2))]
    scores = residual_scores(*statistics)[0, 0, 0]
    assert scores[0] == -torch.inf
    assert scores[1].isfinite()


@pytest.mark.parametrize("gain", [1e-6, 1.0, 40.0])
def test_residual_is_the_log_of_mass_times_relative_spread(gain, generator):
    query, key = (gain * torch.randn(1, 2, 48, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    statistics = [block_statistics(x, 16) for x in (query, key)]
    (q_mean, q_var, _), (_, k_var, _) = statistics
    spread = (q_mean.square() + q_var) @ k_var.transpose(-1, -2) / 8
    # e^x - 1 overflows where it no longer differs from e^x.
    expected = block_scores(*statistics) + 0.5 * torch.where(spread < 40, spread.clamp(max=40).expm1().log(), spread)
    got = residual_scores(*statistics)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("score", ["moments", "residual", "halfk"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": float("nan")}, "beta must be finite, got nan"),
        ({"scale": -1.0}, "scale must be finite and above 0, or None, got -1.0"),
        ({"scale": float("inf")}, "scale must be finite and above 0, or None, got inf"),
        ({"key": (1, 3, 40, 8)}, r"key must be of shape \(1, a divisor of 2, Nk, 8\), got \(1, 3, 5, 8\)"),
        ({"key": (1, 2, 40, 4)}, r"key must be of shape \(1, a divisor of 2, Nk, 8\), got \(1, 2, 5, 4\)"),
        ({"key": None}, "key must be BlockStatistics, got NoneType"),
    ],
)
def test_scores_refuse(score, options, message):
    how = {"beta": 0.5, "scale": 0.1, "center_keys": True, "log_count": True, "second_order": True} | options
    shape = how.pop("key", (1, 2, 40, 8))
    query, tokens = torch.ones(1, 2, 40, 8), torch.ones(shape or (1, 2, 40, 8))
    key = None if shape is None else block_statistics(tokens, 8)
    with pytest.raises(UserInputError, match=message):
        score_blocks(score, block_statistics(query, 8), key, tokens, 8, **how)
