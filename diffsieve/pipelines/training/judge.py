"""A judge of generated clips: does the video show the subject, motion and background colour of its caption?

It needs no network: the background is estimated from the frame's border, what differs from it is the sprite. The
sprite's centroid and area over time give the motion, its cut-out, compared with every sprite drawn on the same
background, gives the subject. It answers what it sees, blind to the caption, and the answers are compared afterwards.
It is kinder than a person: it always names the nearest subject, so look at the clips as well.

Legend: B clips, T frames, H rows, W columns, S subjects, N pixels of the border, K edge of a cut-out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...errors import UserInputError
from .captions import MOTIONS
from .clips import COLOUR_RGB
from .specs import ClipSpec, SpecBatch
from .sprites import Sprites

# Pixels whose largest channel difference to the background is below the first are background; `_RAMP` above it they
# are sprite for certain. Where the border itself is noisy, the first is `_ABOVE_NOISE` over its median difference.
_MIN_DIFFERENCE = 0.07
_RAMP = 0.10
_ABOVE_NOISE = 0.04
_MAX_NOISE = 0.2  # of the border, for it to be a background at all
_BORDER = 0.03  # of the shorter side
_MIN_AREA = 0.002  # of the frame, for a frame to count as showing something
_MAX_AREA = 0.6
_MIN_VISIBLE = 0.6  # of the frames
_MAX_BACKGROUND_ERROR = 0.20  # RGB distance of the estimated colour to the named one
_FRAMES_COMPARED = 5
_CUT_PX = 24
_BANK_PX = 64
_CUT_REACH = 2.3  # half edge of a cut-out in standard deviations of the mask
_CHUNK_ELEMENTS = 2**27

# Motion, in parts of the shorter side: what moves at all, and how straight or flat a path must be.
_MIN_TRAVEL = 0.15
_MIN_RANGE = 0.10
_MIN_LOG_GROWTH = 0.7  # natural logarithm of last over first area
_STILL_TRAVEL = 0.12
_MAX_DETOUR = 1.4
_MIN_WINDING = 0.7  # turns
_NO_MOTION = -1


@dataclass(frozen=True)
class JudgeResult:
    """Verdicts on B clips.

    Attributes:
        subject: `(B,)` bool, the nearest sprite is the caption's and the clip is valid.
        motion: `(B,)` bool, likewise.
        colour: `(B,)` bool, likewise.
        valid: `(B,)` bool, something of plausible size stands out from a plain background in enough frames.
        seen_subject: `(B,)` int64, index of the nearest sprite.
        seen_motion: `(B,)` int64, index into `MOTIONS`, -1 for none of them.
        seen_colour: `(B,)` int64, index into `COLOURS`.
        distance: `(B,)` RMS difference to the nearest sprite, in [0, 1].
    """

    subject: torch.Tensor
    motion: torch.Tensor
    colour: torch.Tensor
    valid: torch.Tensor
    seen_subject: torch.Tensor
    seen_motion: torch.Tensor
    seen_colour: torch.Tensor
    distance: torch.Tensor

    def rates(self) -> dict[str, float]:
        """Parts of the clips with subject, motion, colour and all three right, and of valid ones, in [0, 1]."""
        columns = {name: getattr(self, name) for name in ("subject", "motion", "colour", "valid")}
        columns["all"] = self.subject & self.motion & self.colour
        return {name: column.float().mean().item() for name, column in columns.items()}


@torch.no_grad()
def judge_clips(video: torch.Tensor, specs: SpecBatch | Sequence[ClipSpec], sprites: Sprites) -> JudgeResult:
    """Judge clips against the specs they should show.

    Args:
        video: `(B, 3, T, H, W)` float in [0, 1] (a rendered clip: `(video + 1) / 2`), T at least 5.
        specs: The B wanted clips.
        sprites: All subjects that an answer can name, on any device.

    Returns:
        Verdicts, on the device of `video`.

    Raises:
        UserInputError: If shapes or counts do not fit.
    """
    if video.ndim != 5 or video.shape[1] != 3 or video.shape[2] < _FRAMES_COMPARED:
        raise UserInputError(f"video must have shape (B, 3, T >= {_FRAMES_COMPARED}, H, W), got {tuple(video.shape)}")
    if len(specs) != len(video):
        raise UserInputError(f"specs must have one entry per clip ({len(video)}), got {len(specs)}")
    batch = specs if isinstance(specs, SpecBatch) else SpecBatch.from_specs(specs, sprites)
    if batch.names != sprites.names:
        raise UserInputError("specs and sprites must list the same subjects in the same order")
    chunk = max(1, _CHUNK_ELEMENTS // video[0].numel())
    with torch.autocast(video.device.type, enabled=False):
        bank = _reference_bank(sprites.to(video.device))
        seen = [_look(video[i : i + chunk].float(), bank) for i in range(0, len(video), chunk)]
    subject, motion, colour, valid, distance = (torch.cat(column) for column in zip(*seen, strict=True))
    batch = batch.to(video.device)
    return JudgeResult(
        subject=valid & (subject == batch.subject),
        motion=valid & (motion == batch.motion),
        colour=valid & (colour == batch.colour),
        valid=valid,
        seen_subject=subject,
        seen_motion=motion,
        seen_colour=colour,
        distance=distance,
    )


def _look(video: torch.Tensor, bank: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a chunk of clips shows: subject, motion, colour, valid, distance, each `(B,)`."""
    ground = estimate_background(video)  # [B, 3, H, W]
    level = ground.mean((2, 3))
    named = torch.tensor(COLOUR_RGB, device=video.device)
    error, colour = torch.cdist(level, named).min(1)
    mask, noise = _mask(video - ground[:, :, None])  # [B, T, H, W], [B]
    area, centre, spread = _moments(mask)
    present = (area > _MIN_AREA) & (area < _MAX_AREA)  # [B, T]
    finite = video.isfinite().flatten(1).all(1)
    plain = (error < _MAX_BACKGROUND_ERROR) & (noise < _MAX_NOISE)
    valid = (present.float().mean(1) >= _MIN_VISIBLE) & plain & finite
    motion = classify_motion(area, centre, present)
    # Sprites of the bank are drawn on the named colours, so move the clip's background to the named one.
    shifted = video - (ground - named[colour][:, :, None, None])[:, :, None]
    picked = _pick_frames(present)  # [B, 5]
    frame = picked[:, :, None].expand(-1, -1, 2)
    cuts = _cut_out(shifted.transpose(1, 2), picked, centre.gather(1, frame), spread.gather(1, picked))
    candidates = bank[colour]  # [B, S, 3 K K]
    squares = [(cut[:, None] - candidates).square_().mean(2) for cut in cuts.unbind(1)]
    distance, subject = torch.stack(squares).mean(0).sqrt().min(1)
    return subject, motion, colour, valid, distance


def estimate_background(video: torch.Tensor) -> torch.Tensor:
    """The clips' still background as a smooth cubic surface through the frame's border.

    The median over time drops a sprite that touches the border now and then; fits without outliers drop one that
    always does.

    Args:
        video: `(B, 3, T, H, W)`.

    Returns:
        `(B, 3, H, W)`.
    """
    height, width = video.shape[-2:]
    ring = _ring(height, width, video.device)
    y = torch.linspace(-1, 1, height, device=video.device)[:, None].expand(height, width)
    x = torch.linspace(-1, 1, width, device=video.device).expand(height, width)
    terms = [x**i * y**k for degree in range(4) for i in range(degree + 1) for k in [degree - i]]
    basis = torch.stack(terms, -1)  # [H, W, 10], by degree
    value = video[..., ring].nan_to_num().median(2).values.transpose(1, 2)  # [B, N, 3]
    surface = value.median(1, keepdim=True).values
    # Stiff first: a cubic through outliers would hide them. A plane has the first 3 terms.
    for count, tolerance in ((3, 0.25), (10, 0.12), (10, 0.06)):
        inner = basis[ring][:, :count]  # [N, count]
        weight = ((value - surface).abs().amax(2, keepdim=True) < tolerance).float()
        weighted = (inner * weight).transpose(1, 2)  # [B, count, N]
        ridge = 1e-4 * len(inner) * torch.eye(count, device=video.device)
        coefficients = torch.linalg.solve(weighted @ inner + ridge, weighted @ value)
        surface = inner @ coefficients
    return torch.einsum("hwk,bkc->bchw", basis, coefficients)


def _mask(difference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft mask of what differs from the background, and the level of the border's noise.

    Args:
        difference: `(B, 3, T, H, W)` to the background.

    Returns:
        `(B, T, H, W)` in [0, 1], and `(B,)`.
    """
    # Averaging 3 x 3 pixels keeps single noisy pixels of a decoder out of the moments.
    largest = difference.abs().amax(1).nan_to_num()
    smooth = F.avg_pool2d(largest, 3, stride=1, padding=1, count_include_pad=False)
    height, width = smooth.shape[-2:]
    noise = smooth[..., _ring(height, width, smooth.device)].flatten(1).median(1).values
    low = (noise + _ABOVE_NOISE).clamp_min(_MIN_DIFFERENCE)[:, None, None, None]
    return ((smooth - low) / _RAMP).clamp(0, 1), noise


def _ring(height: int, width: int, device: torch.device) -> torch.Tensor:
    """`(H, W)` bool: the border of the frame."""
    deep = max(1, round(_BORDER * min(height, width)))
    ring = torch.ones(height, width, dtype=torch.bool, device=device)
    ring[deep:-deep, deep:-deep] = False
    return ring


def _moments(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Area (part of the frame) `(..., )`, centroid x, y `(..., 2)` and spread `(..., )` in parts of the shorter side.

    The spread is the root of the mean of the variances along x and y.
    """
    height, width = mask.shape[-2:]
    side = min(height, width)
    y = (torch.arange(height, device=mask.device) + 0.5) / side
    x = (torch.arange(width, device=mask.device) + 0.5) / side
    total = mask.sum((-2, -1)).clamp_min(1e-6)
    columns, rows = mask.sum(-2) / total[..., None], mask.sum(-1) / total[..., None]
    centre = torch.stack([columns @ x, rows @ y], -1)
    variance = (columns @ x.square() + rows @ y.square() - centre.square().sum(-1)).clamp_min(1e-6)
    return total / (height * width), centre, (variance / 2).sqrt()


def classify_motion(area: torch.Tensor, centre: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """The motion that a path shows.

    Growth is told by the areas of the first and last fifth of the clip; straight motion by displacement along one
    axis without detours; a circle by the turns around its middle; bouncing by a flat path that goes up and down.

    Args:
        area: `(B, T)` parts of the frame.
        centre: `(B, T, 2)` x and y in parts of the shorter side.
        present: `(B, T)` bool, frames that show the sprite; the others take the place of the nearest one that does.

    Returns:
        `(B,)` int64 index into `MOTIONS`, -1 when the path is none of them.
    """
    nearest = _nearest_present(present)
    area = area.gather(1, nearest)
    path = centre.gather(1, nearest[..., None].expand(-1, -1, 2))
    frames = area.shape[1]
    part = max(1, round(frames / 8))
    growth = torch.log(area[:, -part:].mean(1) / area[:, :part].mean(1).clamp_min(1e-6))
    x, y = (path[:, -1] - path[:, 0]).unbind(1)
    range_x, range_y = (path.amax(1) - path.amin(1)).unbind(1)
    steps = path.diff(dim=1)
    length = steps.norm(dim=2).sum(1)
    travel = torch.hypot(x, y)
    around = path - (path.amax(1, keepdim=True) + path.amin(1, keepdim=True)) / 2
    a, b = around[:, :-1], around[:, 1:]
    turn = torch.atan2(a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0], (a * b).sum(2)).sum(1).abs() / (2 * torch.pi)

    still = (range_x < _STILL_TRAVEL) & (range_y < _STILL_TRAVEL)
    straight = (travel > _MIN_TRAVEL) & (length < _MAX_DETOUR * travel)
    sideways, upright = x.abs() > 2 * y.abs(), y.abs() > 2 * x.abs()
    round_trip = travel < 0.6 * torch.maximum(range_x, range_y)
    bouncing = (range_y > _MIN_RANGE) & (range_x < 0.4 * range_y) & (steps[..., 1].abs().sum(1) > 2.5 * range_y)
    circling = (range_x > _MIN_RANGE) & (range_y > _MIN_RANGE) & (turn > _MIN_WINDING)
    seen = {
        "right": straight & sideways & (x > 0),
        "left": straight & sideways & (x < 0),
        "up": straight & upright & (y < 0),
        "down": straight & upright & (y > 0),
        "circle": round_trip & circling & ~bouncing,
        "grows": still & (growth > _MIN_LOG_GROWTH),
        "shrinks": still & (growth < -_MIN_LOG_GROWTH),
        "bounces": round_trip & bouncing,
    }
    motion = torch.full_like(nearest[:, 0], _NO_MOTION)
    for name, hit in seen.items():
        motion[hit] = MOTIONS.index(name)
    return motion


def _nearest_present(present: torch.Tensor) -> torch.Tensor:
    """`(B, T)` int64: for each frame the nearest frame that is present (itself when none is)."""
    time = torch.arange(present.shape[1], device=present.device)
    gap = (time[:, None] - time).abs().expand(len(present), -1, -1)
    absent = ~present[:, None] & present.any(1)[:, None, None]
    return gap.masked_fill(absent, 2 * present.shape[1]).argmin(2)


def _pick_frames(present: torch.Tensor) -> torch.Tensor:
    """`(B, 5)` int64: evenly spaced frames, each moved to the nearest present one."""
    frames = present.shape[1]
    even = torch.linspace(0.1 * (frames - 1), 0.9 * (frames - 1), _FRAMES_COMPARED, device=present.device)
    return _nearest_present(present)[:, even.round().long()]


def _cut_out(frames: torch.Tensor, picked: torch.Tensor, centre: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Cut-outs around the sprite, scaled by its spread.

    Args:
        frames: `(B, T, 3, H, W)`.
        picked: `(B, F)` frame numbers.
        centre: `(B, F, 2)` and `spread` `(B, F)` in parts of the shorter side.

    Returns:
        `(B, F, 3 K K)`.
    """
    b, f = picked.shape
    height, width = frames.shape[-2:]
    side = min(height, width)
    picture = frames[torch.arange(b, device=frames.device)[:, None], picked].flatten(0, 1)  # [B F, 3, H, W]
    # Antialiasing: sample on a grid twice as fine and average.
    fine = 2 * _CUT_PX
    line = (torch.arange(fine, device=frames.device) + 0.5) / fine * 2 - 1  # [-1, 1]
    reach = _CUT_REACH * spread[..., None] * line  # [B, F, fine]
    x = (centre[..., :1] + reach) * (2 * side / width) - 1
    y = (centre[..., 1:] + reach) * (2 * side / height) - 1
    grid = torch.stack(torch.broadcast_tensors(x[:, :, None, :], y[:, :, :, None]), -1).flatten(0, 1)
    cut = F.grid_sample(picture, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return F.avg_pool2d(cut, 2).reshape(b, f, -1)


def _reference_bank(sprites: Sprites) -> torch.Tensor:
    """`(C, S, 3 K K)`: every sprite's cut-out on every named colour, aligned by the mask a judge would see there."""
    # About the size of a sprite in a clip, with room around it, so that a cut-out never reaches over the edge.
    small = F.interpolate(sprites.rgba, (_BANK_PX, _BANK_PX), mode="bilinear", antialias=True)
    padded = F.pad(small, (_BANK_PX // 2,) * 4).clamp(0, 1)
    banks = []
    first = torch.zeros(len(sprites), 1, dtype=torch.int64, device=padded.device)
    for rgb in torch.tensor(COLOUR_RGB, device=padded.device):
        picture = padded[:, :3] + (1 - padded[:, 3:]) * rgb[:, None, None]
        mask, _ = _mask((picture - rgb[:, None, None])[:, :, None])
        _, centre, spread = _moments(mask)
        banks.append(_cut_out(picture[:, None], first, centre, spread)[:, 0])
    return torch.stack(banks)
