"""MS-SSIM against a direct computation with scipy, known answers, and its smallest frame."""

import numpy as np
import pytest
import skimage.data
import torch
from scipy import ndimage

from diffsieve.eval import ms_ssim


def to_clip(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]


def scipy_ms_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """One channel (H, W), written from the definition with scipy's filters."""
    product = 1.0
    for scale, weight in enumerate((0.0448, 0.2856, 0.3001, 0.2363, 0.1333)):

        def mean(image: np.ndarray) -> np.ndarray:
            return ndimage.gaussian_filter(image, 1.5, truncate=5 / 1.5)[5:-5, 5:-5]

        mx, my = mean(x), mean(y)
        vx, vy, cxy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
        term = (2 * cxy + 9e-4) / (vx + vy + 9e-4)
        if scale == 4:
            term = term * (2 * mx * my + 1e-4) / (mx * mx + my * my + 1e-4)
        product *= max(term.mean(), 0.0) ** weight
        height, width = x.shape[0] // 2 * 2, x.shape[1] // 2 * 2
        x, y = (image[:height, :width].reshape(height // 2, 2, width // 2, 2).mean(axis=(1, 3)) for image in (x, y))
    return product


@pytest.mark.parametrize("name", ["astronaut", "chelsea"])  # 512 x 512; 300 x 451, odd sides on the way
def test_ms_ssim_agrees_with_scipy(name):
    image = getattr(skimage.data, name)() / 255.0
    noisy = np.clip(image + 0.1 * np.random.default_rng(0).standard_normal(image.shape), 0, 1)
    expected = np.mean([scipy_ms_ssim(image[..., c], noisy[..., c]) for c in range(3)])
    assert ms_ssim(to_clip(image), to_clip(noisy)).mean == pytest.approx(expected, abs=1e-10)


def test_known_answers():
    image = skimage.data.astronaut() / 255.0
    # piq 0.8.0, multi_scale_ssim(data_range=1.0), gives 0.9892585127714727.
    blurred = ms_ssim(to_clip(image), to_clip(ndimage.gaussian_filter(image, (1, 1, 0))))
    assert blurred.mean == pytest.approx(0.9892585127714727, abs=1e-12)
    assert ms_ssim(to_clip(image), to_clip(1.0 - image)).mean == 0.0
    assert ms_ssim(to_clip(image), to_clip(image)).mean == pytest.approx(1.0, abs=1e-12)


def test_the_chunk_size_does_not_change_the_result_and_order_does_not_matter(generator):
    reference = torch.rand(3, 3, 177, 176, generator=generator)
    test = (reference + 0.1 * torch.rand(reference.shape, generator=generator)).clamp(0, 1)
    whole = ms_ssim(reference, test)
    assert ms_ssim(reference, test, chunk_size=1).per_frame == pytest.approx(whole.per_frame, rel=1e-13)
    assert ms_ssim(test, reference).per_frame == pytest.approx(whole.per_frame, rel=1e-13)


def test_frames_below_176_pixels_have_no_value_but_a_reason():
    frames = torch.zeros(1, 3, 175, 300)
    result = ms_ssim(frames, frames)
    assert result.mean is None
    assert "at least 176 x 176 pixels, got 175 x 300" in result.reason
    larger = torch.zeros(1, 3, 176, 176)
    assert ms_ssim(larger, larger).mean == 1.0
