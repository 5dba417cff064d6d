"""Pictures show what they claim: halves are the clips, colours follow the scale, panels follow the mask."""

import numpy as np
import pytest
import torch

from diffsieve.compare import canvas
from diffsieve.compare.canvas import colour_scale, fit_text, text_size
from diffsieve.compare.mask_picture import _KEPT, _SKIPPED, mask_picture
from diffsieve.compare.pictures import difference_picture, side_by_side
from diffsieve.errors import UserInputError
from diffsieve.eval import psnr, ssim

LABELS = ("dense", "BA-Att 50 %")


def clips(generator, frames=3, height=48, width=64):
    dense = torch.rand(frames, 3, height, width, generator=generator)
    sparse = (dense + 0.05 * torch.rand(frames, 3, height, width, generator=generator)).clamp(0, 1)
    return dense, sparse


@pytest.mark.parametrize(("height", "width"), [(48, 64), (45, 63), (200, 400)], ids=["even", "odd", "large"])
def test_side_by_side_holds_both_clips_unchanged(generator, height, width):
    dense, sparse = (clip.mul(255).to(torch.uint8) for clip in clips(generator, height=height, width=width))
    both = side_by_side(dense, sparse, labels=LABELS)
    assert both.dtype == torch.uint8
    assert both.shape[-2] % 2 == both.shape[-1] % 2 == 0
    factor = max(1, round(384 / width))
    band = both.shape[-2] - factor * height - (factor * height) % 2
    for clip, start in ((dense, 0), (sparse, both.shape[-1] - factor * width)):
        shown = both[..., band : band + factor * height, start : start + factor * width]
        assert torch.equal(shown[..., ::factor, ::factor], clip)
    left, right = both[0, :, :band].chunk(2, dim=-1)
    assert left.float().std() > 1  # a label is written over each half
    assert right.float().std() > 1
    assert not torch.equal(left, right)


def test_difference_of_equal_clips_is_black(generator):
    dense, _ = clips(generator)
    picture = np.asarray(
        difference_picture(dense, dense, title="x", labels=LABELS, psnr=psnr(dense, dense), ssim=ssim(dense, dense))
    )
    black = (picture == colour_scale(np.zeros(1))[0]).all(axis=-1)
    assert black.sum() >= 3 * 48 * 64  # three frames, each enlarged


def test_difference_scale_follows_the_data(generator):
    dense, _ = clips(generator)
    dense = dense * 0.4
    small, large = dense + 0.01, dense + 0.4  # half of the scale ends 0.02 and, beyond 0.2, 0.5
    halves = []
    for sparse, share in ((small, 0.5), (large, 0.8)):
        picture = np.asarray(
            difference_picture(dense, sparse, title="x", labels=LABELS, psnr=psnr(dense, sparse))
        ).astype(int)
        colour = colour_scale(np.array([share]))[0].astype(int)
        halves.append((np.abs(picture - colour).max(axis=-1) <= 2).sum())
    assert min(halves) >= 3 * 48 * 64


def test_the_colour_scale_grows_in_lightness_and_is_cut_at_its_end():
    colours = colour_scale(np.linspace(0, 1, 50)).astype(float)
    lightness = colours @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(lightness) > 0).all()
    assert (colour_scale(np.array([1.0, 7.0])) == colour_scale(np.array([1.0]))).all()


@pytest.mark.parametrize(("heads", "blocks"), [(1, 5), (2, 36), (6, 36), (12, 40)], ids=str)
def test_mask_panels_show_the_kept_share(generator, heads, blocks):
    mask = torch.rand(heads, blocks, blocks, generator=generator) < 0.4
    mask[:, :, 0] = True
    picture = np.asarray(mask_picture(mask, title="layer 4", notes=("a note", "another")))
    kept = (picture == np.array(_KEPT)).all(axis=-1).sum()
    skipped = (picture == np.array(_SKIPPED)).all(axis=-1).sum()
    shown = mask if heads <= 8 else mask[[0, 2, 3, 5, 6, 8, 9, 11]]
    # The legend adds a square of each colour, 11 x 11 pixels inside its frame.
    assert (kept - 121) / (kept + skipped - 242) == pytest.approx(float(shown.float().mean()), abs=0.002)


def test_mask_rows_are_query_blocks():
    mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    mask[0, 2] = True  # query block 2 attends to all keys: a horizontal line
    picture = np.asarray(mask_picture(mask, title=""))
    ys, xs = np.nonzero((picture == np.array(_KEPT)).all(axis=-1))
    line = ys < ys.max() - 60  # without the legend
    assert np.ptp(xs[line]) > 5 * np.ptp(ys[line])


def test_a_mask_finer_than_pixels_is_shaded():
    mask = torch.zeros(1, 1200, 1200, dtype=torch.bool)
    mask[:, ::2] = True
    picture = np.asarray(mask_picture(mask, title=""))
    assert picture.shape[0] < 700
    panel = picture[100:400, 150:400].reshape(-1, 3)
    assert panel.mean(axis=0) == pytest.approx((np.array(_KEPT) + np.array(_SKIPPED)) / 2, abs=3)


@pytest.mark.parametrize(
    "mask", [torch.zeros(2, 4, 4), torch.zeros(4, 4, dtype=torch.bool), torch.zeros(0, 4, 4, dtype=torch.bool)], ids=str
)
def test_bad_masks_are_refused(mask):
    with pytest.raises(UserInputError, match="mask must be"):
        mask_picture(mask, title="")


def test_long_text_is_cut_to_its_room():
    text = "a very long prompt " * 20
    short = fit_text(text, 18, 300)
    assert short.endswith("...")
    assert text_size(short, 18)[0] <= 300
    assert fit_text("short", 18, 300) == "short"


def test_long_text_is_measured_a_few_times_only(monkeypatch):
    calls = []

    def counting(text, size):
        calls.append(text)
        return text_size(text, size)

    monkeypatch.setattr(canvas, "text_size", counting)
    text = "a cat moves " * 1_000
    short = fit_text(text, 18, 300)
    assert text_size(short, 18)[0] <= 300 < text_size(text[: len(short) + 2] + "...", 18)[0]
    assert len(calls) < 20
