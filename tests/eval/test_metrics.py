"""Paired metrics against scikit-image on natural images, identity cases and constants worked out by hand."""

import json
import math

import numpy as np
import pytest
import skimage.data
import skimage.metrics
import torch
from scipy import ndimage

from diffsieve.errors import UserInputError
from diffsieve.eval import MetricResult, psnr, psnr_from_mean_mse, ssim, summarize


def constant(value: float, frames: int = 2, size: int = 16) -> torch.Tensor:
    return torch.full((frames, 3, size, size), value, dtype=torch.float64)


def to_clip(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]  # (1, 3, H, W)


@pytest.fixture(scope="module", params=["astronaut", "chelsea"])
def natural_pair(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """A photograph in float64 and its blurred copy; chelsea is 300 x 451, odd on one side."""
    image = getattr(skimage.data, request.param)() / 255.0
    return image, ndimage.gaussian_filter(image, (1, 1, 0))


def test_psnr_agrees_with_scikit_image(natural_pair):
    image, blurred = natural_pair
    expected = skimage.metrics.peak_signal_noise_ratio(image, blurred, data_range=1.0)
    assert psnr(to_clip(image), to_clip(blurred)).mean == pytest.approx(expected, abs=1e-9)


def test_ssim_agrees_with_scikit_image(natural_pair):
    image, blurred = natural_pair
    expected = skimage.metrics.structural_similarity(
        image, blurred, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1.0, channel_axis=-1
    )
    assert ssim(to_clip(image), to_clip(blurred)).mean == pytest.approx(expected, abs=1e-9)


def test_known_answers_on_a_photograph():
    image = skimage.data.astronaut() / 255.0
    blurred = ndimage.gaussian_filter(image, (1, 1, 0))
    assert psnr(to_clip(image), to_clip(blurred)).mean == pytest.approx(29.594827, abs=1e-6)
    assert ssim(to_clip(image), to_clip(blurred)).mean == pytest.approx(0.9251034, abs=1e-7)
    rounded = np.rint(blurred * 255.0) / 255.0
    assert psnr(to_clip(image), to_clip(rounded)).mean == pytest.approx(29.590001, abs=1e-6)
    assert ssim(to_clip(image), to_clip(1.0 - image)).mean == pytest.approx(-0.1378478, abs=1e-7)


def test_constants_by_hand():
    # MSE 0.2^2 = 0.04; SSIM of constants is its luminance factor.
    assert psnr(constant(0.4), constant(0.6)).mean == pytest.approx(10 * math.log10(1 / 0.04), abs=1e-9)
    assert ssim(constant(0.4), constant(0.6)).mean == pytest.approx((0.48 + 1e-4) / (0.52 + 1e-4), abs=1e-12)


def test_the_two_means_of_psnr_differ():
    reference = constant(0.5)
    test = torch.cat([constant(0.6, frames=1), constant(0.51, frames=1)])  # MSE 0.01 and 0.0001
    assert psnr(reference, test).per_frame == pytest.approx((20.0, 40.0))
    assert psnr(reference, test).mean == pytest.approx(30.0)
    assert psnr_from_mean_mse(reference, test).mean == pytest.approx(10 * math.log10(1 / 0.00505))


def test_identical_frames_count_100_db_and_are_reported():
    reference = constant(0.5)
    test = torch.cat([constant(0.5, frames=1), constant(0.6, frames=1)])
    result = psnr(reference, test)
    assert result.per_frame[0] == math.inf
    assert result.identical_frames == 1
    assert result.mean == pytest.approx((100.0 + 20.0) / 2)
    assert psnr(reference, reference).mean == psnr_from_mean_mse(reference, reference).mean == 100.0
    assert ssim(reference, reference).mean == pytest.approx(1.0, abs=1e-12)


def test_an_almost_identical_frame_is_never_better_than_an_identical_one():
    result = psnr(constant(0.5), constant(0.5 + 1e-7))
    assert result.per_frame[0] == pytest.approx(140.0, abs=1e-3)
    assert result.mean == 100.0
    assert result.identical_frames == 0


def test_json_has_no_infinity():
    values = psnr(constant(0.5), constant(0.5)).to_dict()
    assert values["per_frame"] == [None, None]
    json.dumps(values, allow_nan=False)


def test_uint8_is_cast_before_subtraction():
    dark, light = torch.full((1, 3, 16, 16), 10, dtype=torch.uint8), torch.full((1, 3, 16, 16), 200, dtype=torch.uint8)
    expected = 20 * math.log10(255 / 190)
    assert psnr(dark, light).mean == pytest.approx(expected, abs=1e-9)
    assert psnr(light, dark).mean == pytest.approx(expected, abs=1e-9)
    assert ssim(dark, light).mean == pytest.approx(ssim(dark / 255.0, light / 255.0).mean, abs=1e-6)


@pytest.mark.parametrize("metric", [psnr, psnr_from_mean_mse, ssim], ids=lambda metric: metric.__name__)
def test_the_chunk_size_does_not_change_the_result(metric, generator):
    reference = torch.rand(7, 3, 13, 18, generator=generator)
    test = (reference + 0.1 * torch.rand(7, 3, 13, 18, generator=generator)).clamp(0, 1)
    whole = metric(reference, test, chunk_size=16)
    for chunk_size in (1, 3):
        chunked = metric(reference, test, chunk_size=chunk_size)
        assert chunked.per_frame == pytest.approx(whole.per_frame, rel=1e-14)
        assert chunked.mean == pytest.approx(whole.mean, rel=1e-14)


def test_small_variances_do_not_cancel():
    # Bright frames with noise of 1e-4: in float32 the variances E[x^2] - E[x]^2 would be off by several per cent.
    rng = np.random.default_rng(0)
    image = 0.9 + 1e-4 * rng.standard_normal((24, 24, 3))
    other = image + 1e-4 * rng.standard_normal((24, 24, 3))
    expected = skimage.metrics.structural_similarity(
        image, other, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1.0, channel_axis=-1
    )
    assert ssim(to_clip(image), to_clip(other)).mean == pytest.approx(expected, abs=1e-12)


def test_half_precision_frames_are_computed_in_float64(generator):
    reference = torch.rand(1, 3, 16, 16, generator=generator).to(torch.bfloat16)
    test = torch.rand(1, 3, 16, 16, generator=generator).to(torch.bfloat16)
    assert psnr(reference, test).mean == psnr(reference.double(), test.double()).mean
    assert ssim(reference, test).mean == ssim(reference.double(), test.double()).mean


@pytest.mark.parametrize("metric", [psnr, psnr_from_mean_mse, ssim], ids=lambda metric: metric.__name__)
@pytest.mark.parametrize(
    ("reference", "test", "message"),
    [
        pytest.param(constant(0.5), constant(0.5, frames=1), "same shape", id="unequal-frames"),
        pytest.param(constant(0.5), constant(0.5, size=17), "same shape", id="unequal-size"),
        pytest.param(constant(0.5), constant(math.nan), "test must be finite", id="nan"),
        pytest.param(constant(math.inf), constant(0.5), "reference must be finite", id="inf"),
        pytest.param(constant(0.5), constant(1.01), "inside \\[0, 1\\]", id="range-above"),
        pytest.param(constant(-1.0), constant(0.5), "inside \\[0, 1\\]", id="range-below"),
        pytest.param(constant(0.5)[0], constant(0.5)[0], "shape \\(T, 3, H, W\\)", id="no-time-axis"),
        pytest.param(torch.zeros(0, 3, 16, 16), torch.zeros(0, 3, 16, 16), "not empty", id="no-frames"),
        pytest.param(torch.zeros(1, 3, 16, 16).long(), torch.zeros(1, 3, 16, 16), "uint8 or floating", id="int64"),
        pytest.param(np.zeros((1, 3, 16, 16)), constant(0.5), "torch.Tensor", id="numpy"),
    ],
)
def test_bad_frames_are_refused(metric, reference, test, message):
    with pytest.raises(UserInputError, match=message):
        metric(reference, test)


def test_ssim_needs_room_for_its_window():
    assert ssim(constant(0.5, size=11), constant(0.5, size=11)).mean == pytest.approx(1.0)
    with pytest.raises(UserInputError, match="at least 11 x 11"):
        ssim(constant(0.5, size=10), constant(0.5, size=10))


def test_chunk_size_must_be_positive():
    with pytest.raises(UserInputError, match="chunk_size"):
        psnr(constant(0.5), constant(0.5), chunk_size=0)


def test_statistics_use_the_sample_deviation():
    statistics = summarize([1.0, None, 3.0])
    assert (statistics.mean, statistics.n) == (2.0, 2)
    assert statistics.std == pytest.approx(math.sqrt(2.0))
    assert summarize([5.0]).to_dict() == {"mean": 5.0, "std": None, "n": 1}
    assert summarize([]).to_dict() == {"mean": None, "std": None, "n": 0}


def test_a_metric_that_did_not_run_says_why():
    assert MetricResult("x", (), None, "", "higher", reason="no weights").to_dict()["mean"] is None
    with pytest.raises(ValueError, match="exclusive"):
        MetricResult("x", (), None, "", "higher")
