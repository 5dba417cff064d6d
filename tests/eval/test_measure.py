"""All metrics in one walk: equal to each alone, whatever the chunks, in little memory; the svg-compatible column."""

import importlib
import math
import weakref

import numpy as np
import pytest
import skimage.data
import torch
from safetensors.torch import save_file
from scipy import ndimage

from diffsieve.compare.video import write_mp4
from diffsieve.errors import UserInputError
from diffsieve.eval import load_lpips, lpips, measure, ms_ssim, psnr, psnr_from_mean_mse, ssim, temporal_flickering
from diffsieve.eval.clips import ClipReader
from diffsieve.eval.lpips_net import Lpips
from diffsieve.eval.ssim import similarity_maps
from diffsieve.eval.svg_compatible import box_ssim_per_frame
from diffsieve.eval.walk import default_chunk, walk_pair

# The package has functions of the same names.
ms_ssim_module, ssim_module = (importlib.import_module(f"diffsieve.eval.{name}") for name in ("ms_ssim", "ssim"))


@pytest.fixture(scope="module")
def random_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random-backbone")
    models = {}
    for net in ("alex", "vgg"):
        torch.manual_seed(0)
        save_file(Lpips(net).state_dict(), folder / f"{net}.safetensors")
        models[net] = load_lpips(net, weights=folder / f"{net}.safetensors")
    return models


def test_random_backbone_one_walk_equals_each_metric_alone(clip_pair, random_models):
    results = measure(*clip_pair, lpips=random_models)
    alone = [metric(*clip_pair) for metric in (psnr, psnr_from_mean_mse, ssim, ms_ssim)]
    alone += [lpips(*clip_pair, model=model) for model in random_models.values()]
    assert list(results) == [result.name for result in alone]
    for expected in alone:
        found = results[expected.name]
        assert found.per_frame == pytest.approx(expected.per_frame, rel=1e-6)
        assert (found.unit, found.direction, found.reason) == (expected.unit, expected.direction, expected.reason)


def test_random_backbone_the_chunk_size_does_not_change_the_results(clip_pair, random_models):
    names = ("psnr", "ssim", "lpips", "svg-compatible", "temporal_flickering")
    whole, *others = (measure(*clip_pair, metrics=names, lpips=random_models, chunk_size=n) for n in (7, 1, 3))
    for other in others:
        assert list(other) == list(whole)
        for name, result in whole.items():
            assert other[name].per_frame == pytest.approx(result.per_frame, rel=1e-5 if "lpips" in name else 1e-13)


def test_ssim_and_ms_ssim_share_the_finest_scale(generator, monkeypatch):
    clip_pair = [torch.rand(5, 3, 176, 180, generator=generator) for _ in range(2)]
    computed = []

    def counted(x, y):
        computed.append(tuple(x.shape[-2:]))
        return similarity_maps(x, y)

    monkeypatch.setattr(ms_ssim_module, "similarity_maps", counted)
    monkeypatch.setattr(ssim_module, "similarity_maps", counted)
    both = measure(*clip_pair, metrics=("ms_ssim", "psnr", "ssim"), chunk_size=3)
    chunks = -(-len(clip_pair[0]) // 3)
    assert len(computed) == 5 * chunks
    assert list(both) == ["ms_ssim", "psnr", "psnr_from_mean_mse", "ssim"]
    for name in ("ssim", "ms_ssim"):
        assert both[name] == measure(*clip_pair, metrics=(name,), chunk_size=3)[name]


class CountedClip(ClipReader):
    """Makes its frames when they are asked for, and counts how many are alive."""

    alive = 0
    most = 0

    def frames(self):
        for number in range(300):
            frame = torch.full((3, 16, 16), (number % 200) / 255)
            type(self).alive += 1
            type(self).most = max(self.most, self.alive)
            weakref.finalize(frame, self.forget)
            yield frame

    def forget(self) -> None:
        type(self).alive -= 1


def test_the_memory_does_not_grow_with_the_number_of_frames():
    pair = [CountedClip(name, "tensor", torch.empty(0)) for name in ("a", "b")]
    count = sum(len(x) for x, _ in walk_pair(*pair, chunk_size=4, device=torch.device("cpu")))
    assert count == 300
    assert CountedClip.most <= 2 * 2 * 4 + 2  # two clips, the chunk in work and the one being read
    CountedClip.most = 0
    results = measure(*pair, metrics=("psnr", "ssim", "temporal_flickering"), chunk_size=4)
    assert len(results["ssim"].per_frame) == 300
    assert CountedClip.most <= 2 * 2 * 4 + 2


def test_chunks_get_smaller_with_larger_frames():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert default_chunk(64, 64, cpu) == 16
    assert default_chunk(720, 1280, cpu) == 1
    assert default_chunk(720, 1280, gpu) == 9
    assert default_chunk(4320, 7680, gpu) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda clip: clip[:6], "reference and test must have the same number of frames, got 7 and 6", id="n"
        ),
        pytest.param(lambda clip: clip[..., :35], "same size, got 36 x 40 and 35 x 40", id="size"),
        pytest.param(lambda clip: clip.float(), "inside \\[0, 1\\]", id="range"),
        pytest.param(lambda clip: clip / 255 * math.nan, "test must be finite", id="nan"),
        pytest.param(lambda clip: clip.long(), "uint8 or floating", id="int64"),
    ],
)
def test_clips_that_do_not_fit_together_are_refused(clip_pair, change, message):
    reference, test = clip_pair
    with pytest.raises(UserInputError, match=message):
        measure(reference, change(test), metrics=("psnr",), chunk_size=3)


def test_arguments_are_checked(clip_pair):
    with pytest.raises(UserInputError, match=r"metrics must be some of .* got vmaf"):
        measure(*clip_pair, metrics=("psnr", "vmaf"))
    with pytest.raises(UserInputError, match="metrics must be"):
        measure(*clip_pair, metrics=())
    with pytest.raises(UserInputError, match="chunk_size must be at least 1, got 0"):
        measure(*clip_pair, chunk_size=0)
    with pytest.raises(UserInputError, match="lpips must have keys"):
        measure(*clip_pair, lpips={"inception": "x"})


def test_metrics_that_cannot_run_say_why(clip_pair):
    results = measure(*clip_pair, lpips={"alex": "no weights here"})
    assert results["lpips[alex]"].reason == "no weights here"
    assert results["ms_ssim"].reason.startswith("MS-SSIM needs")
    small = torch.zeros(2, 3, 8, 8)
    assert measure(small, small, metrics=("ssim",))["ssim"].reason.startswith("SSIM needs at least 11 x 11")


def box_ssim(x: np.ndarray, y: np.ndarray) -> float:
    """One channel, with scipy: zeros around, always divided by 121."""

    def mean(image: np.ndarray) -> np.ndarray:
        return ndimage.uniform_filter(image, 11, mode="constant")

    mx, my = mean(x), mean(y)
    vx, vy, cxy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    values = (2 * mx * my + 1e-4) * (2 * cxy + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    return float(values.mean())


def test_the_svg_compatible_ssim_is_the_one_with_a_padded_box():
    image = skimage.data.astronaut() / 255.0
    blurred = ndimage.gaussian_filter(image, (1, 1, 0))
    expected = np.mean([box_ssim(image[..., c], blurred[..., c]) for c in range(3)])
    x, y = (torch.from_numpy(a).permute(2, 0, 1)[None] for a in (image, blurred))
    assert box_ssim_per_frame(x, y) == pytest.approx([expected], abs=1e-12)
    assert expected == pytest.approx(0.9508939, abs=1e-7)


def test_random_backbone_the_svg_compatible_column_says_where_frames_came_from(clip_pair, random_models, tmp_path):
    raw = measure(*clip_pair, metrics=("svg-compatible",), lpips=random_models)
    label = "svg-compatible (raw frames)"
    assert list(raw) == [f"{label} psnr", f"{label} ssim", f"{label} lpips[vgg]"]
    for name, frames in zip(("a", "b"), clip_pair, strict=True):
        write_mp4(tmp_path / f"{name}.mp4", frames, fps=12)
    paths = tmp_path / "a.mp4", tmp_path / "b.mp4"
    decoded = measure(*paths, metrics=("svg-compatible", "psnr", "lpips"), lpips={"vgg": random_models["vgg"]})
    assert "svg-compatible psnr" in decoded
    assert decoded["svg-compatible psnr"].mean == pytest.approx(decoded["psnr"].mean)
    # Inputs in [0, 1] there, in [-1, 1] in the standard value.
    assert decoded["svg-compatible lpips[vgg]"].mean != pytest.approx(decoded["lpips[vgg]"].mean, rel=1e-3)


def test_the_svg_compatible_psnr_has_no_bound():
    frames = torch.zeros(2, 3, 16, 16)
    result = measure(frames, frames, metrics=("svg-compatible",))["svg-compatible (raw frames) psnr"]
    assert result.mean is None
    assert "2 identical frames" in result.reason


@pytest.mark.parametrize(
    ("levels", "expected"),
    [((7, 7, 7), 1.0), ((0, 255, 0, 255), 0.0), ((0, 51, 0), 0.8), ((200, 100), 155 / 255), ((100, 200), 155 / 255)],
    ids=["still", "black-white", "fifth", "wrap-down", "wrap-up"],
)
def test_temporal_flickering_by_hand(levels, expected):
    clip = torch.stack([torch.full((3, 8, 8), level, dtype=torch.uint8) for level in levels])
    assert temporal_flickering(clip).mean == pytest.approx(expected, abs=1e-12)
    assert temporal_flickering(clip / 255.0).mean == pytest.approx(expected, abs=1e-12)
    both = measure(clip.flip(0), clip, metrics=("temporal_flickering",), chunk_size=1)
    assert [result.mean for result in both.values()] == pytest.approx([expected, expected], abs=1e-12)


def test_temporal_flickering_needs_two_frames():
    assert "at least two frames" in temporal_flickering(torch.zeros(1, 3, 8, 8)).reason


@pytest.mark.gpu
def test_random_backbone_a_gpu_gives_the_same_values(clip_pair, tmp_path):
    torch.manual_seed(0)
    save_file(Lpips("alex").state_dict(), tmp_path / "a.safetensors")
    names = ("psnr", "ssim", "lpips")
    cpu, gpu = (
        measure(
            *clip_pair,
            metrics=names,
            device=device,
            lpips={"alex": load_lpips("alex", weights=tmp_path / "a.safetensors", device=device)},
        )
        for device in ("cpu", "cuda")
    )
    for name, result in cpu.items():
        assert gpu[name].per_frame == pytest.approx(result.per_frame, rel=1e-5 if "lpips" in name else 1e-11)
