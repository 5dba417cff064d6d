from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from diffsieve.errors import UserInputError
from diffsieve.pipelines.training.captions import COLOURS, MOTIONS
from diffsieve.pipelines.training.clips import COLOUR_RGB, background, clip_path, render_clips
from diffsieve.pipelines.training.sheets import contact_sheet, save_sheet
from diffsieve.pipelines.training.specs import (
    ClipSpec,
    SpecBatch,
    caption,
    hash_uniform,
    held_out_table,
    sample_spec_batch,
    sample_specs,
)
from diffsieve.pipelines.training.sprites import Sprites
from tests.shapes import shape_sprites

SPRITES = shape_sprites()
GRIDS = [
    pytest.param(25, 64, 64, id="T25-H64-W64"),
    pytest.param(9, 40, 72, id="T9-H40-W72"),
    pytest.param(14, 75, 41, id="T14-H75-W41"),
    pytest.param(2, 32, 32, id="T2-H32-W32"),
]


def centroid(alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre x, y `(B, T)` in pixels of coverage `(B, 1, T, H, W)`."""
    alpha = alpha[:, 0].double()
    total = alpha.sum((2, 3))
    y = torch.arange(alpha.shape[2]) + 0.5
    x = torch.arange(alpha.shape[3]) + 0.5
    return (alpha.sum(2) @ x.double()) / total, (alpha.sum(3) @ y.double()) / total


# Specs


def test_a_clip_depends_on_its_number_alone():
    whole = sample_spec_batch(12, SPRITES, seed=3, start=5)
    parts = [*sample_spec_batch(5, SPRITES, seed=3, start=5), *sample_spec_batch(7, SPRITES, seed=3, start=10)]
    assert list(whole) == parts == sample_specs(12, SPRITES, seed=3, start=5)
    assert list(whole[2:4]) == parts[2:4]
    assert parts != sample_specs(12, SPRITES, seed=4, start=5)


def test_a_batch_survives_the_way_through_specs():
    batch = sample_spec_batch(20, SPRITES)
    again = SpecBatch.from_specs(list(batch), SPRITES)
    for field in fields(SpecBatch):
        assert field.name == "names" or torch.equal(getattr(again, field.name), getattr(batch, field.name))
    assert batch.captions() == [caption(spec) for spec in batch]


def test_known_numbers():
    # Written down once: a change of the hash changes every training set.
    expected = torch.tensor([[3063174, 1442882], [11911594, 6918849], [13985025, 14911636]]) / 2**24
    assert torch.equal(hash_uniform(torch.tensor([0, 1, 2**31 - 1]), 2), expected)
    first = sample_specs(1, SPRITES)[0]
    assert (first.subject, first.motion, first.colour, first.seed) == ("disc", "down", "cyan", 429433856)


def test_hashed_numbers_look_uniform_and_independent():
    u = hash_uniform(torch.arange(20_000), 6).double()
    # Five standard deviations of a mean, a variance and a correlation of 20,000 numbers.
    tolerance = 5 / 20_000**0.5
    assert (u.mean(0) - 0.5).abs().max() < tolerance * 12**-0.5
    assert (u.var(0) * 12 - 1).abs().max() < 1.5 * tolerance
    assert torch.corrcoef(u.T).fill_diagonal_(0).abs().max() < tolerance
    assert torch.corrcoef(torch.cat([u[1:], u[:-1]], 1).T).fill_diagonal_(0).abs().max() < tolerance


def test_splits_share_no_triple_and_cover_all():
    table = held_out_table(SPRITES.names)
    assert table.shape == (8, 8, 8)
    # 512 draws at 10 %: five standard deviations are 34.
    assert 51 - 34 < table.sum() < 51 + 34
    drawn = {split: sample_spec_batch(4000, SPRITES, split=split) for split in ("train", "heldout", "all")}
    triples = {
        k: set(zip(*(column.tolist() for column in (b.subject, b.motion, b.colour)), strict=True))
        for k, b in drawn.items()
    }
    assert triples["heldout"] == {tuple(row) for row in table.nonzero().tolist()}
    assert not triples["train"] & triples["heldout"]
    assert len(triples["all"]) == 512 == len(triples["train"]) + len(triples["heldout"])


def test_the_held_out_triples_depend_on_the_words_alone():
    table = held_out_table(SPRITES.names)
    assert torch.equal(held_out_table(SPRITES.names[3:]), table[3:])
    # `printf "disc|right|cyan" | sha256sum` starts with dade69b4, "disc|right|red" with 05d331d1.
    assert 0xDADE69B4 % 10 == 0
    assert table[0, MOTIONS.index("right"), COLOURS.index("cyan")]
    assert 0x05D331D1 % 10 != 0
    assert not table[0, MOTIONS.index("right"), COLOURS.index("red")]


def test_random_values_cover_their_ranges():
    batch = sample_spec_batch(2000, SPRITES)
    for values, low, high in ((batch.size, 0, 1), (batch.offset, -1, 1), (batch.speed, 0, 1), (batch.phase, 0, 1)):
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
    assert 900 < batch.background.sum() < 1100
    for values in (batch.subject, batch.motion, batch.colour):
        assert torch.bincount(values).min() > 190


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"motion": "sideways"}, "motion must be one of right, .* got 'sideways'"),
        ({"colour": "beige"}, "colour must be one of red, .* got 'beige'"),
        ({"background": "photo"}, "background must be one of gradient, texture, got 'photo'"),
        ({"size": 1.5}, r"size must be in \[0, 1\], got 1.5"),
        ({"offset": -2}, r"offset must be in \[-1, 1\], got -2"),
        ({"speed": float("nan")}, r"speed must be in \[0, 1\], got nan"),
        ({"phase": -0.1}, r"phase must be in \[0, 1\], got -0.1"),
        ({"seed": 2**31}, r"seed must be in \[0, 2\*\*31\), got 2147483648"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_spec_is_refused(change, message):
    with pytest.raises(UserInputError, match=message):
        ClipSpec(**{"subject": "disc", "motion": "right", "colour": "red"} | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"seed": -1}, "seed must be in .*, got -1"),
        ({"start": 2**31 - 3}, "start must be in .*, got 2147483645"),
        ({"split": "test"}, "split must be one of train, heldout, all, got 'test'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_sampling_options_are_refused(options, message):
    with pytest.raises(UserInputError, match=message):
        sample_spec_batch(**{"count": 4, "sprites": SPRITES} | options)


# Rendering


@pytest.mark.parametrize(("frames", "height", "width"), GRIDS)
def test_shapes_ranges_and_a_free_border(frames, height, width):
    batch = sample_spec_batch(32, SPRITES, split="all")
    video, alpha = render_clips(batch, SPRITES, frames=frames, height=height, width=width)
    assert video.shape == (32, 3, frames, height, width)
    assert alpha.shape == (32, 1, frames, height, width)
    assert video.dtype == alpha.dtype == torch.float32
    assert -1 <= video.min() < video.max() <= 1
    assert alpha.min() == 0
    assert alpha.amax((1, 3, 4)).min() > 0.9  # the sprite is there in every frame
    border = torch.ones(height, width, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    assert alpha[..., border].max() < 0.02


@pytest.mark.parametrize(("frames", "height", "width"), GRIDS)
@pytest.mark.parametrize("motion", MOTIONS)
def test_the_sprite_moves_as_the_caption_says(motion, frames, height, width):
    side = min(height, width)
    specs = [
        ClipSpec("disc", motion, "blue", size=size, offset=offset, speed=speed, phase=phase)
        for size, offset, speed, phase in ((0, -1, 0, 0.1), (1, 1, 1, 0.6), (0.5, 0, 0.5, 0.9))
    ]
    _, alpha = render_clips(specs, SPRITES, frames=frames, height=height, width=width)
    x, y = centroid(alpha)
    area = alpha.sum((1, 3, 4))
    dx, dy = x[:, -1] - x[:, 0], y[:, -1] - y[:, 0]
    if motion in ("grows", "shrinks"):
        # At least 2.6 ** 0.8 in edge, so 4.6 in area, and its logarithm is 1.53.
        growth = (area[:, -1] / area[:, 0]).log() * (1 if motion == "grows" else -1)
        assert growth.min() > 1.4
        assert torch.maximum(dx.abs(), dy.abs()).max() < 0.02 * side
        return
    assert ((area.amax(1) / area.amin(1)) < 1.02).all()
    if motion in ("right", "left"):
        assert ((dx if motion == "right" else -dx) > 0.3 * side).all()
        assert (x.diff(dim=1).sign() == dx.sign()[:, None]).all()
        assert dy.abs().max() < 0.01 * side
    elif motion in ("up", "down"):
        assert ((dy if motion == "down" else -dy) > 0.3 * side).all()
        assert (y.diff(dim=1).sign() == dy.sign()[:, None]).all()
        assert dx.abs().max() < 0.01 * side
    elif motion == "circle":
        radius = torch.hypot(x - width / 2, y - height / 2)
        assert (radius > 0.14 * side).all()
        assert ((radius.amax(1) - radius.amin(1)) < 0.02 * side).all()
        assert torch.maximum(dx.abs(), dy.abs()).max() < 0.02 * side  # one whole turn
        clockwise = ((x[:, 0] - width / 2) * y.diff(dim=1)[:, 0] - (y[:, 0] - height / 2) * x.diff(dim=1)[:, 0]) > 0
        assert frames == 2 or clockwise.tolist() == [True, False, False]
    else:
        assert (x.amax(1) - x.amin(1)).max() < 0.01 * side
        assert torch.maximum(dx.abs(), dy.abs()).max() < 0.02 * side
        if frames > 4:
            assert ((y[:, 0] - y.amin(1)) > 0.2 * side).all()
            middle = y[:, frames // 2]
            # Down again at half time, up in between.
            assert ((middle - y.amin(1)) > 0.6 * (y.amax(1) - y.amin(1))).all()


def test_the_motion_spans_clips_of_any_length():
    spec = [ClipSpec("disc", "right", "blue")]
    ends = []
    for frames in (2, 25, 57):
        x, _ = centroid(render_clips(spec, SPRITES, frames=frames, height=48, width=48)[1])
        ends.append((x[0, 0], x[0, -1]))
    assert torch.tensor(ends).std(0).max() < 1e-3


@pytest.mark.parametrize("subject", ["disc", "plank", "arch"])
def test_position_and_area_are_right_below_the_pixel(subject):
    # Edges change with `size` and positions with `offset`: none of the 24 falls on whole pixels.
    specs = [ClipSpec(subject, m, "red", i / 23, i / 12 - 1, 0.3, i / 24) for i, m in enumerate(MOTIONS * 3)]
    batch = SpecBatch.from_specs(specs, SPRITES)
    _, alpha = render_clips(batch, SPRITES, frames=7, height=64, width=80)
    x, y, edge = clip_path(batch, 7, 64, 80, 0.42 * 64, 0.52 * 64)
    sprite = SPRITES.rgba[SPRITES.index(subject), 3][None, None, None]
    p = sprite.shape[-1]
    sx, sy = (c.item() / p - 0.5 for c in centroid(sprite))
    got_x, got_y = centroid(alpha)
    assert (got_x - (x + sx * edge)).abs().max() < 0.03
    assert (got_y - (y + sy * edge)).abs().max() < 0.03
    expected = sprite.sum() * (edge / p) ** 2
    assert (alpha.sum((1, 3, 4)) / expected - 1).abs().max() < 0.01


@pytest.mark.parametrize("edge", [20, 33, 48, 60])
def test_drawing_agrees_with_torch_interpolate(edge):
    # Half time of a growing sprite with offset 0: centred, `edge` pixels wide, on whole pixels.
    side = 3 * edge
    specs = [ClipSpec(name, "grows", "green") for name in SPRITES.names]
    video, alpha = render_clips(specs, SPRITES, frames=3, height=side, width=side, sprite_px=(edge, edge))
    # Padded to three times its size: torch normalises by the samples that exist, we as if zeros went on outside.
    padded = F.pad(SPRITES.rgba, (SPRITES.rgba.shape[-1],) * 4)
    expected = F.interpolate(padded, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    coverage = expected[:, 3:].clamp(0, 1)
    colour = torch.minimum((expected[:, :3] / expected[:, 3:].clamp_min(1)).clamp_min(0), coverage)
    torch.testing.assert_close(alpha[:, :, 1], coverage, atol=1e-5, rtol=0)
    ground = background(SpecBatch.from_specs(specs, SPRITES), side, side)
    torch.testing.assert_close((video[:, :, 1] + 1) / 2, colour + (1 - coverage) * ground, atol=1e-5, rtol=0)


def test_no_fringe_between_sprite_and_background():
    # Wherever coverage is partial, the pixel lies between the sprite's colour and the background's.
    rgba = SPRITES.rgba[:1].clone()
    rgba[:, :3] = rgba[:, 3:] * 0.8
    plain = Sprites(rgba, SPRITES.names[:1])
    batch = SpecBatch.from_specs([ClipSpec("disc", m, c) for m in MOTIONS for c in COLOURS[:3]], plain)
    video, alpha = render_clips(batch, plain, frames=5, height=48, width=48)
    ground = background(batch, 48, 48)[:, :, None]
    value = (video + 1) / 2
    assert ((alpha > 0.1) & (alpha < 0.9)).any()
    assert (value >= ground.clamp_max(0.8) - 1e-5).all()
    assert (value <= ground.clamp_min(0.8) + 1e-5).all()
    untouched = (alpha == 0).expand_as(value)
    torch.testing.assert_close(value[untouched], ground.expand_as(value)[untouched], atol=1e-6, rtol=0)


def test_sprite_px_keeps_the_pixel_size_on_a_larger_canvas():
    specs = sample_specs(8, SPRITES)
    areas = [
        render_clips(specs, SPRITES, frames=3, height=side, width=side, sprite_px=(20, 26))[1].sum((1, 3, 4))
        for side in (48, 96)
    ]
    assert (areas[0] / areas[1] - 1).abs().max() < 0.02
    x, _ = centroid(
        render_clips([ClipSpec("disc", "right", "red")], SPRITES, frames=3, height=96, width=96, sprite_px=(20, 26))[1]
    )
    assert x[0, -1] - x[0, 0] > 0.5 * 96  # the way grows with the canvas


def test_backgrounds_have_their_colour_and_no_preferred_direction():
    specs = [replace(spec, colour=COLOURS[i % 8]) for i, spec in enumerate(sample_specs(512, SPRITES))]
    batch = SpecBatch.from_specs(specs, SPRITES)
    ground = background(batch, 24, 24)
    error = (ground.mean((2, 3)) - torch.tensor(COLOUR_RGB)[batch.colour]).norm(dim=1)
    assert error.max() < 0.08
    assert torch.cdist(torch.tensor(COLOUR_RGB), torch.tensor(COLOUR_RGB)).fill_diagonal_(9).min() > 0.25
    # Variation along rows and along columns is equal on average, and both are there.
    vertical, horizontal = (ground.mean(axis).std(-1).square().mean() for axis in (3, 2))
    assert 0.8 < vertical / horizontal < 1.25
    assert vertical.sqrt() > 0.01


def test_chunks_do_not_change_the_result(monkeypatch):
    specs = sample_specs(7, SPRITES)
    whole = render_clips(specs, SPRITES, frames=3, height=32, width=32)
    monkeypatch.setattr("diffsieve.pipelines.training.clips._CHUNK_ELEMENTS", 2 * 3 * 4 * 48**2)
    for a, b in zip(whole, render_clips(specs, SPRITES, frames=3, height=32, width=32), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_autocast_does_not_change_the_result():
    specs = sample_specs(4, SPRITES)
    plain = render_clips(specs, SPRITES, frames=3, height=32, width=32)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(render_clips(specs, SPRITES, frames=3, height=32, width=32)[0], plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 1}, "frames must be at least 2, got 1"),
        ({"height": 8}, "height and width must be at least 16, got 8 x 64"),
        ({"sprite_scale": (0.5, 0.4)}, "sprite_scale must give edges .* got 32 to 25.6"),
        ({"sprite_scale": (0.4, 0.9)}, "sprite_scale must give edges between 1 and 38 pixels"),
        ({"sprite_px": (0, 20)}, "sprite_px must give edges .* got 0 to 20"),
        ({"sprite_px": (20, 60)}, "sprite_px must give edges between 1 and 38 pixels"),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_bad_rendering_options_are_refused(options, message):
    with pytest.raises(UserInputError, match=message):
        render_clips(sample_specs(1, SPRITES), SPRITES, **{"height": 64, "width": 64} | options)


def test_an_unknown_subject_is_refused():
    with pytest.raises(UserInputError, match="subject must be one of the 8 sprite names, got 'zebra'"):
        render_clips([ClipSpec("zebra", "right", "red")], SPRITES)


@pytest.mark.gpu
def test_the_gpu_draws_the_same_clips():
    on_gpu = SPRITES.to("cuda")
    batch, batch_gpu = sample_spec_batch(16, SPRITES), sample_spec_batch(16, SPRITES, device="cuda")
    assert list(batch) == list(batch_gpu)
    for a, b in zip(render_clips(batch, SPRITES), render_clips(batch_gpu, on_gpu), strict=True):
        # Products may run in TF32, with 11 bits of precision.
        torch.testing.assert_close(a, b.cpu(), atol=4e-3, rtol=0)


# Contact sheets


def test_a_contact_sheet_shows_the_frames(tmp_path):
    specs = sample_specs(2, SPRITES)
    video, _ = render_clips(specs, SPRITES, frames=9, height=32, width=64)
    sheet = contact_sheet(video, [caption(spec) for spec in specs], columns=3, frame_px=32)
    assert sheet.size == (3 * 68 + 4, 2 * 50 + 4)
    # Third frame shown of the second clip is the last of the video.
    expected = ((video[1, :, -1] + 1) * 127.5).round().to(torch.uint8)
    shown = sheet.crop((4 + 2 * 68, 50 + 14, 4 + 2 * 68 + 64, 50 + 14 + 32))
    assert torch.equal(torch.tensor(np.asarray(shown)).permute(2, 0, 1), expected)
    save_sheet(tmp_path / "new" / "sheet.png", video, ["a", "b"])
    with Image.open(tmp_path / "new" / "sheet.png") as picture:
        assert picture.format == "PNG"


def test_a_contact_sheet_refuses_what_does_not_fit():
    video = torch.zeros(2, 3, 5, 16, 16)
    with pytest.raises(UserInputError, match=r"video must have shape \(B, 3, T, H, W\), got \(3, 5, 16, 16\)"):
        contact_sheet(video[0], ["a"])
    with pytest.raises(UserInputError, match=r"captions must have one text per clip \(2\), got 1"):
        contact_sheet(video, ["a"])
    with pytest.raises(UserInputError, match="columns must be at least 1, got 0"):
        contact_sheet(video, ["a", "b"], columns=0)
