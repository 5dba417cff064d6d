"""Rendering of training clips: a sprite moves over a coloured background.

A clip shifts and scales its sprite along the axes and never turns it, so drawing is separable: an antialiased
resampling matrix for the rows, one for the columns, two matrix products per frame. That is exact at any sub-pixel
position and any scale, and runs as fast as matrix products do. `video = sprite + (1 - coverage) * background`, with
premultiplied sprites.

Legend: B clips, T frames, H rows, W columns, P edge of a sprite; positions in pixels of the frame, y downwards.
"""

import math
from collections.abc import Sequence

import torch

from ...errors import UserInputError
from .captions import MOTIONS
from .specs import BACKGROUNDS, ClipSpec, SpecBatch, hash_uniform
from .sprites import Sprites

# Background colours in [0, 1], in the order of captions.COLOURS. Muted, because most sprites are vivid: a red sprite
# must stay visible over red.
COLOUR_RGB = (
    (0.60, 0.17, 0.15),
    (0.93, 0.85, 0.47),
    (0.22, 0.58, 0.30),
    (0.24, 0.40, 0.78),
    (0.48, 0.30, 0.64),
    (0.94, 0.68, 0.76),
    (0.50, 0.83, 0.84),
    (0.38, 0.39, 0.41),
)

SPRITE_SCALE = (0.42, 0.52)
# Largest last over first edge of a growing sprite, and how much of the frame it may then fill.
GROWTH = 2.6
_MAX_SCALE = 0.95 / GROWTH**0.5
BOUNCES = 2
_MARGIN = 0.02
_COLOUR_JITTER = 0.03
_WAVES = 4
# Elements of the largest intermediate tensor of one chunk of clips: 1 GiB in fp32.
_CHUNK_ELEMENTS = 2**28


@torch.no_grad()
def render_clips(
    specs: SpecBatch | Sequence[ClipSpec],
    sprites: Sprites,
    *,
    frames: int = 25,
    height: int = 192,
    width: int = 192,
    sprite_scale: tuple[float, float] = SPRITE_SCALE,
    sprite_px: tuple[float, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw clips on the device of the sprites. The motion always spans the whole clip.

    Args:
        specs: The B clips.
        sprites: Pictures of their subjects.
        frames: T, at least 2.
        height: H in pixels, at least 16.
        width: W in pixels, at least 16.
        sprite_scale: Smallest and largest edge of a sprite, as parts of the shorter side, in (0, 0.58].
        sprite_px: The same in pixels; replaces `sprite_scale`, so that a larger canvas can keep its sprites' size.

    Returns:
        Video `(B, 3, T, H, W)` in [-1, 1] and coverage of the sprite `(B, 1, T, H, W)` in [0, 1], both fp32.

    Raises:
        UserInputError: If a range above is left.
    """
    if frames < 2:
        raise UserInputError(f"frames must be at least 2, got {frames}")
    if min(height, width) < 16:
        raise UserInputError(f"height and width must be at least 16, got {height} x {width}")
    side = min(height, width)
    low, high = sprite_px if sprite_px is not None else (sprite_scale[0] * side, sprite_scale[1] * side)
    if not 1 <= low <= high <= _MAX_SCALE * side:
        argument = "sprite_px" if sprite_px is not None else "sprite_scale"
        raise UserInputError(
            f"{argument} must give edges between 1 and {_MAX_SCALE * side:.0f} pixels, smallest first, "
            f"got {low:g} to {high:g}"
        )
    batch = specs if isinstance(specs, SpecBatch) else SpecBatch.from_specs(specs, sprites)
    batch = batch.to(sprites.rgba.device)
    per_clip = frames * 4 * max(height, width, sprites.rgba.shape[-1]) ** 2
    chunk = max(1, _CHUNK_ELEMENTS // per_clip)
    # A training loop's autocast would draw in 8 bits of precision.
    with torch.autocast(batch.subject.device.type, enabled=False):
        parts = [
            _render_chunk(batch[i : i + chunk], sprites, frames, height, width, low, high)
            for i in range(0, len(batch), chunk)
        ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([video for video, _ in parts]), torch.cat([alpha for _, alpha in parts])


def _render_chunk(
    batch: SpecBatch, sprites: Sprites, frames: int, height: int, width: int, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, edge = clip_path(batch, frames, height, width, low, high)
    sprite = sprites.rgba[batch.subject]  # [B, 4, P, P]
    b, p = len(batch), sprite.shape[-1]
    reach = math.ceil(2 * max(1.0, p * GROWTH**0.5 / low))
    rows = _resampling(y, edge, height, p, reach)  # [B, T, H, P]
    columns = _resampling(x, edge, width, p, reach)  # [B, T, W, P]
    # Rows of all frames of a clip in one product: (T H, P) @ (P, 4 P).
    drawn = rows.flatten(1, 2) @ sprite.transpose(1, 2).reshape(b, p, 4 * p)
    drawn = drawn.view(b * frames, height * 4, p) @ columns.flatten(0, 1).transpose(1, 2)
    drawn = drawn.view(b, frames, height, 4, width).permute(0, 3, 1, 2, 4)  # [B, 4, T, H, W]
    # The cubic filter overshoots a little at hard edges. Dividing keeps the colour where coverage is cut to 1.
    alpha = drawn[:, 3:].clamp(0, 1)
    colour = torch.minimum((drawn[:, :3] / drawn[:, 3:].clamp_min(1)).clamp_min_(0), alpha)
    video = torch.addcmul(colour, 1 - alpha, background(batch, height, width)[:, :, None])
    return video.mul_(2).sub_(1), alpha.contiguous()


def clip_path(
    batch: SpecBatch, frames: int, height: int, width: int, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the sprite is: centre x, centre y and edge of its square, each `(B, T)` in pixels.

    The square stays inside the frame. Sprites' edges are between `low` and `high` pixels, for growing and shrinking
    ones at half time.
    """
    device = batch.subject.device
    time = torch.linspace(0, 1, frames, device=device)  # [T]
    speed, offset, phase = batch.speed[:, None], batch.offset[:, None], batch.phase[:, None]
    motion = [batch.motion[:, None] == i for i in range(len(MOTIONS))]
    right, left, up, down, circle, grows, shrinks, bounces = motion

    # Growth is geometric, so that it looks even.
    ratio = math.log(GROWTH) * (0.8 + 0.2 * speed)
    direction = grows.float() - shrinks.float()
    edge = (low + (high - low) * batch.size[:, None]) * torch.exp(direction * ratio * (time - 0.5))
    margin = _MARGIN * min(height, width)
    reach_x = (width - edge) / 2 - margin  # farthest distance of the centre from the middle
    reach_y = (height - edge) / 2 - margin
    reach = torch.minimum(reach_x, reach_y)

    # Straight motions use 75 to 100 % of the way.
    sweep = (2 * time - 1) * (0.75 + 0.25 * speed)
    turn = torch.where(phase < 0.5, 1.0, -1.0)
    angle = 2 * torch.pi * (2 * phase + turn * time)
    radius = (0.7 + 0.3 * speed) * reach
    # Parabolas between the floor and the top, starting on the floor.
    hop = (time * BOUNCES) % 1
    jump = 4 * hop * (1 - hop) * (0.7 + 0.3 * speed)

    along_x = right.float() - left.float()
    along_y = down.float() - up.float()
    across = 0.8 * offset
    still = (grows | shrinks).float()
    x = sweep * along_x * reach_x + circle * radius * torch.cos(angle)
    y = sweep * along_y * reach_y + circle * radius * torch.sin(angle) + bounces * reach_y * (1 - 2 * jump)
    x = x + (along_y.abs() + bounces.float()) * across * reach_x + still * 0.3 * across * reach_x.amin(1, keepdim=True)
    y = y + along_x.abs() * across * reach_y
    return x + width / 2, y + height / 2, edge.expand(-1, frames)


def _resampling(centre: torch.Tensor, edge: torch.Tensor, length: int, p: int, reach: int) -> torch.Tensor:
    """Antialiased resampling matrices that place P samples, `edge` pixels wide, around `centre` on an axis.

    The filter is the cubic convolution kernel with a = -1/2 (Keys, 1981), widened by the reduction factor when the
    sprite shrinks, with weights normalised as if the samples went on as zeros outside.

    Args:
        centre: `(B, T)` in pixels.
        edge: `(B, T)` in pixels, above 0.
        length: Pixels of the axis.
        p: Samples P of the sprite.
        reach: Samples that the widest filter covers on one side.

    Returns:
        `(B, T, length, P)`; a row sums to 1 inside the sprite and to 0 outside.
    """
    device = centre.device
    scale = edge[..., None] / p  # pixels per sample
    pixel = torch.arange(length, device=device) + 0.5
    position = (pixel - centre[..., None]) / scale + (p / 2 - 0.5)  # [B, T, length], in samples
    shrink = scale.clamp_max(1.0)[..., None]
    weight = _keys_kernel((position[..., None] - torch.arange(p, device=device)) * shrink)
    fraction = position - position.floor()
    around = torch.arange(-reach, reach + 2, device=device)
    total = _keys_kernel((fraction[..., None] - around) * shrink).sum(-1, keepdim=True)
    return weight / total


def _keys_kernel(distance: torch.Tensor) -> torch.Tensor:
    d = distance.abs()
    near = (1.5 * d - 2.5) * d * d + 1
    far = ((-0.5 * d + 2.5) * d - 4) * d + 2
    return torch.where(d < 1, near, torch.where(d < 2, far, 0.0))


def background(batch: SpecBatch, height: int, width: int) -> torch.Tensor:
    """`(B, 3, H, W)` in [0, 1]: the colour, slightly jittered, with a soft gradient or soft texture.

    Directions are random: shading along one fixed axis would favour a block order along that axis.
    """
    device = batch.seed.device
    u = hash_uniform(batch.seed, 5 + 3 * _WAVES)
    base = torch.tensor(COLOUR_RGB, device=device)[batch.colour] + _COLOUR_JITTER * (2 * u[:, :3] - 1)  # [B, 3]
    side = max(height, width)
    y = ((torch.arange(height, device=device) + 0.5) - height / 2) / side
    x = ((torch.arange(width, device=device) + 0.5) - width / 2) / side  # [-1/2, 1/2] along the longer side
    textured = (batch.background == BACKGROUNDS.index("texture")).float()[:, None, None]

    def ramp(angle: torch.Tensor) -> torch.Tensor:
        """`(B, H, W)`: distance along a direction."""
        turned = 2 * torch.pi * angle
        return torch.cos(turned)[:, None, None] * x + torch.sin(turned)[:, None, None] * y[:, None]

    shade = (0.05 + 0.10 * u[:, 3])[:, None, None] * ramp(u[:, 4]) * (1 - 0.5 * textured)
    for wave in range(_WAVES):
        angle, frequency, start = u[:, 5 + 3 * wave : 8 + 3 * wave].unbind(1)
        cycles = (0.4 + 0.6 * frequency)[:, None, None] * ramp(angle) + start[:, None, None]
        shade = shade + textured * 0.013 * torch.cos(2 * torch.pi * cycles)
    return (base[:, :, None, None] + shade[:, None]).clamp(0, 1)
