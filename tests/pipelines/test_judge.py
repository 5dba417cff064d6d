from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from diffsieve.errors import UserInputError
from diffsieve.pipelines.training.captions import COLOURS, MOTIONS
from diffsieve.pipelines.training.clips import background, render_clips
from diffsieve.pipelines.training.judge import classify_motion, estimate_background, judge_clips
from diffsieve.pipelines.training.specs import SpecBatch, sample_spec_batch, sample_specs
from diffsieve.pipelines.training.sprites import Sprites
from tests.shapes import shape_sprites

SPRITES = shape_sprites()


def render(specs, **options) -> torch.Tensor:
    """Clips `(B, 3, T, H, W)` in [0, 1]."""
    return (render_clips(specs, SPRITES, **{"frames": 13, "height": 64, "width": 64} | options)[0] + 1) / 2


@pytest.fixture(scope="module")
def batch() -> SpecBatch:
    return sample_spec_batch(48, SPRITES, split="all")


@pytest.fixture(scope="module")
def video(batch) -> torch.Tensor:
    return render(batch)


@pytest.mark.parametrize(
    ("frames", "height", "width", "sprite_px"),
    [
        pytest.param(25, 64, 64, None, id="T25-H64-W64"),
        pytest.param(5, 64, 64, None, id="T5-H64-W64"),
        pytest.param(13, 56, 100, None, id="T13-H56-W100"),
        pytest.param(13, 101, 57, None, id="T13-H101-W57"),
        pytest.param(13, 96, 96, (30, 38), id="T13-H96-W96-small"),
    ],
)
def test_true_clips_are_right(frames, height, width, sprite_px):
    specs = sample_specs(48, SPRITES, seed=1, split="all")
    clips = render(specs, frames=frames, height=height, width=width, sprite_px=sprite_px)
    result = judge_clips(clips, specs, SPRITES)
    assert result.valid.all()
    assert result.colour.all()
    # Five frames cannot show two bounces (frames 1, 2 and 4 of them are at the floor or at the same height).
    judged = torch.tensor([spec.motion != "bounces" or frames > 5 for spec in specs])
    assert result.motion[judged].all()
    assert result.subject.all()


def test_verdicts_are_what_was_seen_against_the_caption(batch, video):
    result = judge_clips(video, batch, SPRITES)
    assert torch.equal(result.seen_subject, batch.subject)
    assert torch.equal(result.seen_motion, batch.motion)
    assert torch.equal(result.seen_colour, batch.colour)
    assert result.rates() == {"subject": 1, "motion": 1, "colour": 1, "valid": 1, "all": 1}
    # The same clips under other captions: only coincidences are right.
    specs = list(batch)
    others = specs[1:] + specs[:1]
    result = judge_clips(video, others, SPRITES)
    for name in ("subject", "motion", "colour"):
        same = torch.tensor([getattr(a, name) == getattr(b, name) for a, b in zip(specs, others, strict=True)])
        assert torch.equal(getattr(result, name), same)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda v, ground: ground.expand_as(v), id="empty"),
        pytest.param(lambda v, ground: torch.zeros_like(v), id="black"),
        pytest.param(lambda v, ground: v * float("nan"), id="nan"),
        pytest.param(lambda v, ground: torch.rand(v.shape, generator=torch.Generator().manual_seed(0)), id="noise"),
        pytest.param(lambda v, ground: torch.cat([v[:, :, :5], ground.expand_as(v)[:, :, 5:]], 2), id="vanishes"),
    ],
)
def test_clips_without_a_subject_are_never_right(spoil, batch, video):
    ground = background(batch, 64, 64)[:, :, None]
    result = judge_clips(spoil(video, ground), batch, SPRITES)
    for verdict in (result.subject, result.motion, result.colour, result.valid):
        assert not verdict.any()


def test_a_frozen_clip_has_no_motion(batch, video):
    result = judge_clips(video[:, :, 6:7].expand_as(video), batch, SPRITES)
    assert not result.motion.any()
    assert (result.seen_motion == -1).all()
    assert result.subject.all()


def test_a_clip_played_backwards_moves_the_other_way(batch, video):
    result = judge_clips(video.flip(2), batch, SPRITES)
    opposite = {"right": "left", "left": "right", "up": "down", "down": "up", "grows": "shrinks", "shrinks": "grows"}
    expected = [MOTIONS.index(opposite.get(MOTIONS[m], MOTIONS[m])) for m in batch.motion.tolist()]
    assert result.seen_motion.tolist() == expected


def test_a_mirrored_subject_is_not_taken_for_its_original():
    rgba = torch.cat([SPRITES.rgba, SPRITES.rgba.flip(3)])
    both = Sprites(rgba, (*SPRITES.names, *(f"mirrored {name}" for name in SPRITES.names)))
    batch = sample_spec_batch(48, both, split="all")
    clips = (render_clips(batch, both, frames=9, height=64, width=64)[0] + 1) / 2
    result = judge_clips(clips, batch, both)
    assert torch.equal(result.seen_subject, batch.subject)


@pytest.mark.parametrize(
    "degrade",
    [
        pytest.param(lambda v, g: v + 0.08 * torch.randn(v.shape, generator=g), id="noise"),
        pytest.param(lambda v, g: v + 0.05 * torch.randn(*v.shape[:2], 1, 64, 64, generator=g), id="still-noise"),
        pytest.param(lambda v, g: F.avg_pool3d(v, (1, 3, 3), 1, (0, 1, 1), count_include_pad=False), id="blur"),
        pytest.param(lambda v, g: v * 0.95 + 0.02, id="contrast"),
    ],
)
def test_a_codecs_errors_are_forgiven(degrade, batch, video, generator):
    result = judge_clips(degrade(video, generator), batch, SPRITES)
    # One clip in 48 may be lost.
    assert min(result.rates().values()) >= 47 / 48


def test_the_background_is_found_under_a_sprite_at_the_border():
    specs = [replace(spec, motion="right", background="gradient") for spec in sample_specs(8, SPRITES)]
    batch = SpecBatch.from_specs(specs, SPRITES)
    clips = render(batch)
    clips[..., 20:44, :12] = 0.9  # stays at the left border for the whole clip
    error = estimate_background(clips) - background(batch, 64, 64)
    assert error.abs().max() < 0.03


def test_the_shade_of_the_background_does_not_count_against_the_subject(batch):
    shades = []
    for seed in range(3):
        specs = [replace(spec, background="gradient", seed=seed) for spec in batch]
        shades.append(judge_clips(render(specs, frames=5), specs, SPRITES).distance)
    assert torch.stack(shades).std(0).mean() < 0.0025


def test_paths_that_are_none_of_the_motions():
    t = torch.linspace(0, 1, 21)
    zero = torch.zeros_like(t)
    paths = {
        "diagonal": (t * 0.5, t * 0.5),
        "there and back": ((0.5 - (t - 0.5).abs()) * 0.8, zero),
        "half a circle": (0.25 * torch.cos(torch.pi * t), 0.25 * torch.sin(torch.pi * t)),
        "rocking": (0.25 * torch.cos(3 * torch.sin(torch.pi * t)), 0.25 * torch.sin(3 * torch.sin(torch.pi * t))),
        "zigzag": (0.4 * t, 0.2 * torch.sin(20 * t)),
        "jitter": (0.03 * torch.sin(40 * t), 0.03 * torch.cos(31 * t)),
        "sideways bounces": (0.3 * torch.sin(2 * torch.pi * t).abs(), zero),
    }
    centre = torch.stack([torch.stack(path, -1) for path in paths.values()]) + 0.5
    area = torch.full(centre.shape[:2], 0.1)
    motion = classify_motion(area, centre, torch.ones_like(area, dtype=torch.bool))
    assert dict(zip(paths, motion.tolist(), strict=True)) == dict.fromkeys(paths, -1)


def test_colours_are_told_apart_at_any_jitter():
    specs = [replace(spec, colour=COLOURS[i % 8]) for i, spec in enumerate(sample_specs(128, SPRITES, seed=2))]
    assert judge_clips(render(specs, frames=5), specs, SPRITES).colour.all()


def test_what_does_not_fit_is_refused(batch, video):
    with pytest.raises(UserInputError, match=r"video must have shape \(B, 3, T >= 5, H, W\), got \(48, 3, 4, 64, 64\)"):
        judge_clips(video[:, :, :4], batch, SPRITES)
    with pytest.raises(UserInputError, match=r"specs must have one entry per clip \(2\), got 48"):
        judge_clips(video[:2], batch, SPRITES)
    other = Sprites(SPRITES.rgba[:4], SPRITES.names[:4])
    with pytest.raises(UserInputError, match="specs and sprites must list the same subjects"):
        judge_clips(video, batch, other)


@pytest.mark.gpu
def test_the_gpu_judges_alike(batch, video):
    on_gpu = judge_clips(video.cuda(), batch, SPRITES.to("cuda"))
    assert on_gpu.valid.is_cuda
    assert on_gpu.rates() == judge_clips(video, batch, SPRITES).rates()
