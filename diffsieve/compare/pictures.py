"""The side-by-side clip and the picture of differences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw

from ..eval import MetricResult
from .canvas import (
    FAINT,
    FRAME,
    PAPER,
    colour_scale,
    draw_text,
    enlarge,
    fit_text,
    magnification,
    text_size,
    to_image,
)

_PANEL = 384  # pixels that a panel of the side-by-side clip aims at
_THUMBNAIL = 224
_MAX_THUMBNAIL = 480
_SHOWN_FRAMES = 5
_SCALE_ENDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_LEGEND_WIDTH = 500
_BAND = (20, 23, 28)


def side_by_side(dense: torch.Tensor, sparse: torch.Tensor, *, labels: tuple[str, str]) -> torch.Tensor:
    """Put two clips beside each other under a band with their labels.

    Small clips are enlarged by a whole number (each pixel repeated), never interpolated.

    Args:
        dense: (T, 3, H, W) uint8.
        sparse: same shape.
        labels: of the left and the right half.

    Returns:
        (T, 3, H', W') uint8 with even sides.
    """
    factor = magnification(dense.shape[-1], _PANEL)
    big = [clip.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1) for clip in (dense, sparse)]
    frames, _, height, width = big[0].shape
    size = max(12, width // 20)
    band = 2 * round(size * 0.9)
    gap = 4
    picture = Image.new("RGB", (2 * width + gap, band + height), _BAND)
    draw = ImageDraw.Draw(picture)
    for start, label in zip((0, width + gap), labels, strict=True):
        draw_text(
            draw, (start + width / 2, band / 2), fit_text(label, size, width - 8), size, colour=PAPER, anchor="mm"
        )
    canvas = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].repeat(frames, 1, 1, 1)
    canvas[..., band:, :width] = big[0]
    canvas[..., band:, width + gap :] = big[1]
    return canvas[..., : canvas.shape[-2] // 2 * 2, :] if height % 2 == 0 else canvas


def difference_picture(
    dense: torch.Tensor,
    sparse: torch.Tensor,
    *,
    title: str,
    labels: tuple[str, str],
    psnr: MetricResult,
    ssim: MetricResult | None = None,
    numbers: Sequence[int] | None = None,
) -> Image.Image:
    """Draw several frames of both runs, and under them the absolute difference on a colour scale with its legend.

    Args:
        dense: raw frames (T, 3, H, W) in [0, 1].
        sparse: same shape.
        title: first line, usually prompt and seed.
        labels: of the two runs.
        psnr: values per frame, written under the frames.
        ssim: the same.
        numbers: when `dense` and `sparse` hold only the frames to show, their numbers in the clip; see `shown_frames`.
    """
    if numbers is None:
        shown = shown_frames(len(dense))
        dense, sparse = dense[shown], sparse[shown]
    else:
        shown = list(numbers)
    difference = (dense - sparse).abs().mean(dim=1).numpy()  # (n, H, W)
    end = _scale_end(difference)
    if len(psnr.per_frame) == 1:
        panels = [to_image((clip[0] * 255.0).round().to(torch.uint8)) for clip in (dense, sparse)]
        panels.append(Image.fromarray(colour_scale(difference[0] / end)))
        figures = [_decibel(psnr.per_frame[0])]
        if ssim is not None and ssim.mean is not None:
            figures.append(f"SSIM {ssim.mean:.3f}")
        return _one_frame(panels, [*labels, "|difference|"], title, ", ".join(figures), end)
    rows = [
        [_thumbnail(to_image((clip[i] * 255.0).round().to(torch.uint8))) for i in range(len(shown))]
        for clip in (dense, sparse)
    ]
    rows.append([_thumbnail(Image.fromarray(colour_scale(image / end))) for image in difference])

    width, height = rows[0][0].size
    margin, gap, size = 24, 8, 15
    names = [labels[0], labels[1], "|difference|"]
    gutter = max(text_size(name, size)[0] for name in names) + 14
    line = text_size("x", size)[1]
    top = margin + 2 * line + 22
    under = 2 * line if ssim is not None else line
    legend = 70
    total = (
        2 * margin + gutter + len(shown) * (width + gap) - gap,
        top + 3 * (height + gap) + under + legend + margin,
    )
    picture = Image.new("RGB", total, PAPER)
    draw = ImageDraw.Draw(picture)
    draw_text(draw, (margin, margin), fit_text(title, 18, total[0] - 2 * margin), 18)
    for row, (name, images) in enumerate(zip(names, rows, strict=True)):
        y = top + row * (height + gap)
        draw_text(draw, (margin, y + height / 2), name, size, anchor="lm")
        for column, image in enumerate(images):
            x = margin + gutter + column * (width + gap)
            picture.paste(image, (x, y))
            if row == 0:
                draw_text(draw, (x + width / 2, y - 6), f"frame {shown[column]}", 13, colour=FAINT, anchor="mb")
    y = top + 3 * (height + gap)
    for column, index in enumerate(shown):
        middle = margin + gutter + column * (width + gap) + width / 2
        draw_text(draw, (middle, y), _decibel(psnr.per_frame[index]), 13, colour=FAINT, anchor="ma")
        if ssim is not None:
            draw_text(draw, (middle, y + line), f"SSIM {ssim.per_frame[index]:.3f}", 13, colour=FAINT, anchor="ma")
    _draw_legend(picture, draw, (margin + gutter, y + under + 14), end)
    return picture


def _one_frame(
    panels: Sequence[Image.Image], names: Sequence[str], title: str, figures: str, end: float
) -> Image.Image:
    """Draw the panels of a single picture beside each other."""
    images = [_thumbnail(panel) for panel in panels]
    width, height = images[0].size
    margin, gap, size = 24, 8, 15
    line = text_size("x", size)[1]
    total = max(len(images) * (width + gap) - gap, _LEGEND_WIDTH) + 2 * margin
    top = margin + 2 * line + 22
    picture = Image.new("RGB", (total, top + height + line + 84 + margin), PAPER)
    draw = ImageDraw.Draw(picture)
    draw_text(draw, (margin, margin), fit_text(title, 18, total - 2 * margin), 18)
    for column, (name, image) in enumerate(zip(names, images, strict=True)):
        x = margin + column * (width + gap)
        picture.paste(image, (x, top))
        draw_text(draw, (x + width / 2, top - 6), fit_text(name, size, width), size, anchor="mb")
    draw_text(draw, (margin, top + height + 6), figures, size, colour=FAINT)
    _draw_legend(picture, draw, (margin, top + height + line + 22), end)
    return picture


def difference_clip(dense: torch.Tensor, sparse: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Draw the absolute difference of every frame, mean of R, G and B, on the colour scale.

    Args:
        dense: raw frames (T, 3, H, W) in [0, 1].
        sparse: same shape.

    Returns:
        (T, 3, H, W) uint8, and the difference that has the last colour.
    """
    difference = (dense - sparse).abs().mean(dim=1).numpy()
    end = _scale_end(difference)
    # Frame by frame: the colours are interpolated in float64.
    frames = [torch.from_numpy(colour_scale(image / end)).permute(2, 0, 1) for image in difference]
    return torch.stack(frames), end


def shown_frames(count: int) -> list[int]:
    """Return which frames of a clip the picture of differences shows: at most five, the first and the last too."""
    shown = min(_SHOWN_FRAMES, count)
    return sorted({round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)})


def _scale_end(difference: np.ndarray) -> float:
    """Return the smallest round end of scale that at most 0.5 % of the pixels exceed."""
    bulk = float(np.quantile(difference, 0.995))
    return next(end for end in _SCALE_ENDS if bulk <= end or end == _SCALE_ENDS[-1])


def _thumbnail(image: Image.Image) -> Image.Image:
    if image.width > _MAX_THUMBNAIL:
        height = round(image.height * _MAX_THUMBNAIL / image.width)
        return image.resize((_MAX_THUMBNAIL, height), Image.Resampling.BOX)
    return enlarge(image, magnification(image.width, _THUMBNAIL))


def _decibel(value: float) -> str:
    return "identical" if value == float("inf") else f"{value:.1f} dB"


def _draw_legend(picture: Image.Image, draw: ImageDraw.ImageDraw, corner: tuple[int, int], end: float) -> None:
    x, y = corner
    width, height = 320, 16
    bar = np.repeat(colour_scale(np.linspace(0.0, 1.0, width))[None], height, axis=0)
    picture.paste(Image.fromarray(bar), (x, y))
    draw.rectangle((x - 1, y - 1, x + width, y + height), outline=FRAME)
    for share in (0.0, 0.5, 1.0):
        draw_text(draw, (x + share * width, y + height + 4), f"{share * end:g}", 13, colour=FAINT, anchor="ma")
    note = f"absolute difference, mean of R, G, B (values 0 to 1), amplified x{1 / end:g}; larger ones are clipped"
    room = picture.width - x - width - 40
    if text_size(note, 13)[0] > room:
        note = f"absolute difference, x{1 / end:g}"
    draw_text(draw, (x + width + 18, y + height / 2), note, 13, colour=FAINT, anchor="lm")
