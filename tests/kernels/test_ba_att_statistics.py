"""Step 2 of BA-Att: block moments with true counts."""

import pytest
import torch

from diffsieve import UserInputError
from diffsieve.kernels.ba_att import block_statistics
from diffsieve.kernels.ba_att.reference import statistics_of_head
from diffsieve.kernels.ba_att.statistics import block_means

LENGTHS = [1, 127, 128, 129, 450]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_matches_reference(length, heads, generator):
    tokens = torch.randn(2, length, heads, 5, generator=generator, dtype=torch.float64).transpose(1, 2)
    got = block_statistics(tokens, 128)
    for b in range(2):
        for h in range(heads):
            mean, variance, size = statistics_of_head(tokens[b, h], 128)
            torch.testing.assert_close(got.mean[b, h], mean, rtol=0, atol=1e-12)
            torch.testing.assert_close(got.variance[b, h], variance, rtol=0, atol=1e-12)
            assert torch.equal(got.size, size)
    assert torch.equal(block_means(tokens, 128), got.mean)


@pytest.mark.parametrize("length", LENGTHS)
def test_nothing_beyond_the_end_is_read(length, generator):
    padded = torch.full((2, 3, length + 200, 8), torch.nan)
    padded[:, :, :length] = torch.randn(2, 3, length, 8, generator=generator)
    view, copy = padded[:, :, :length], padded[:, :, :length].clone()
    for one, other in zip(block_statistics(view, 128), block_statistics(copy, 128), strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


def test_tail_counts():
    assert block_statistics(torch.zeros(1, 1, 300, 2), 128).size.tolist() == [128, 128, 44]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_reduced_in_fp32(dtype, generator):
    tokens = torch.randn(1, 2, 300, 16, generator=generator).to(dtype)
    got, exact = block_statistics(tokens, 128), block_statistics(tokens.double(), 128)
    assert got.mean.dtype is torch.float32
    torch.testing.assert_close(got.mean.double(), exact.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(got.variance.double(), exact.variance, rtol=1e-5, atol=0)


def test_variance_survives_a_channel_bias(generator):
    # E[x²] - E[x]² in fp32 would be off by about 1000² * 2^-24 = 0.06 here.
    noise = torch.randn(1, 1, 256, 8, generator=generator)
    tokens = noise + 1000
    exact = block_statistics(tokens.double(), 128).variance
    torch.testing.assert_close(block_statistics(tokens, 128).variance.double(), exact, rtol=1e-3, atol=0)


def test_heads_are_independent_of_how_they_are_chunked(generator, monkeypatch):
    tokens = torch.randn(1, 5, 300, 16, generator=generator)
    whole = block_statistics(tokens, 64)
    monkeypatch.setattr("diffsieve.kernels.ba_att.statistics._CHUNK_CPU", 2 * 300 * 16)
    assert torch.equal(block_statistics(tokens, 64).variance, whole.variance)


@pytest.mark.parametrize(
    ("tokens", "block_size", "message"),
    [
        (torch.ones(1, 2, 40, 8), 0, "block_size must be a whole number >= 1, got 0"),
        (torch.ones(1, 2, 40, 8), 8.0, "block_size must be a whole number >= 1, got 8.0"),
        (torch.ones(2, 40, 8), 8, r"tokens must be 4-dimensional, got \(2, 40, 8\)"),
        (torch.ones(1, 2, 0, 8), 8, r"tokens must be not empty, got \(1, 2, 0, 8\)"),
    ],
)
def test_statistics_refuse(tokens, block_size, message):
    with pytest.raises(UserInputError, match=message):
        block_statistics(tokens, block_size)
