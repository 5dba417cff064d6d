"""The picture of a block mask: which key blocks each query block attends to, head by head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw

from ..errors import UserInputError
from .canvas import FAINT, FRAME, INK, PAPER, draw_text, fit_text, text_size

MASK_LEGEND = "computed", "skipped"
_KEPT = (31, 95, 176)
_SKIPPED = (233, 237, 242)
_SIDE = 264  # pixels that a panel aims at
_MAX_SIDE = 396
_MAX_HEADS = 8


def mask_picture(
    mask: torch.Tensor,
    *,
    title: str,
    notes: Sequence[str] = (),
    names: Sequence[str] | None = None,
    legend: tuple[str, str] = MASK_LEGEND,
    first_head: int = 0,
) -> Image.Image:
    """Draw the mask of one layer.

    Args:
        mask: (H, Nq, Nk) bool, True where the block pair is computed.
        title: first line.
        notes: lines under the panels.
        names: one a head, for instance its token order; default none.
        legend: what True and False stand for.
        first_head: number of the first head of `mask`.

    Raises:
        UserInputError: mask of another shape or without heads.
    """
    if mask.ndim != 3 or 0 in mask.shape or mask.dtype != torch.bool:
        raise UserInputError(f"mask must be (H, Nq, Nk) bool, not empty, got {tuple(mask.shape)} {mask.dtype}")
    heads = mask.shape[0]
    count = min(heads, _MAX_HEADS)
    shown = sorted({round(i * (heads - 1) / max(count - 1, 1)) for i in range(count)})
    panels = [_panel(mask[head].numpy()) for head in shown]

    width, height = panels[0].size
    margin, left, gap, small = 26, 56, 26, 13
    line = text_size("x", small)[1]
    above, below = line + 8, 2 * line + 12
    columns = len(shown) if len(shown) <= 4 else -(-len(shown) // 2)
    rows = -(-len(shown) // columns)
    top = margin + text_size("x", 18)[1] + 18
    inner = columns * (left + width) + (columns - 1) * gap
    total = max(inner, 460) + 2 * margin, top + rows * (above + height + below) + (1 + len(notes)) * line + 10 + margin
    picture = Image.new("RGB", total, PAPER)
    draw = ImageDraw.Draw(picture)
    draw_text(draw, (margin, margin), fit_text(title, 18, total[0] - 2 * margin), 18)

    for place, (head, panel) in enumerate(zip(shown, panels, strict=True)):
        row, column = divmod(place, columns)
        x = margin + column * (left + width + gap) + left
        y = top + row * (above + height + below) + above
        density = float(mask[head].float().mean())
        name = f" · {names[head]}" if names is not None else ""
        draw_text(
            draw,
            (x, y - 8),
            fit_text(f"head {first_head + head}{name}", small, width - 70),
            small,
            colour=INK,
            anchor="ls",
        )
        draw_text(draw, (x + width, y - 8), f"{density:.1%} kept", small, colour=FAINT, anchor="rs")
        picture.paste(panel, (x, y))
        draw.rectangle((x - 1, y - 1, x + width, y + height), outline=FRAME)
        _draw_axes(picture, draw, (x, y), (width, height), mask.shape[1:], small)

    y = top + rows * (above + height + below) + 6
    x = margin
    for colour, text in zip((_KEPT, _SKIPPED), legend, strict=True):
        draw.rectangle((x, y + 2, x + 12, y + 14), fill=colour, outline=FRAME)
        draw_text(draw, (x + 18, y + 8), text, small, anchor="lm")
        x += 18 + text_size(text, small)[0] + 20
    for place, note in enumerate(notes, start=1):
        text = fit_text(note, small, total[0] - 2 * margin)
        draw_text(draw, (margin, y + place * line + 4), text, small, colour=FAINT)
    return picture


def _panel(mask: np.ndarray) -> Image.Image:
    """Draw one head: a square for each block pair; where pairs are finer than pixels, the shade is their share."""
    colours = np.where(mask[..., None], _KEPT, _SKIPPED).astype(np.uint8)
    image = Image.fromarray(colours)
    cell = max(1, _SIDE // max(mask.shape))
    if max(mask.shape) <= _MAX_SIDE:
        return image.resize((mask.shape[1] * cell, mask.shape[0] * cell), Image.Resampling.NEAREST)
    scale = _MAX_SIDE / max(mask.shape)
    return image.resize((round(mask.shape[1] * scale), round(mask.shape[0] * scale)), Image.Resampling.BOX)


def _draw_axes(
    picture: Image.Image,
    draw: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    size: tuple[int, int],
    blocks: Sequence[int],
    text: int,
) -> None:
    x, y = corner
    width, height = size
    for number in _ticks(blocks[1]):
        place = x + (number + 0.5) * width / blocks[1]
        draw.line((place, y + height, place, y + height + 4), fill=FRAME)
        draw_text(draw, (place, y + height + 6), str(number), text - 2, colour=FAINT, anchor="ma")
    for number in _ticks(blocks[0]):
        place = y + (number + 0.5) * height / blocks[0]
        draw.line((x - 5, place, x - 1, place), fill=FRAME)
        draw_text(draw, (x - 8, place), str(number), text - 2, colour=FAINT, anchor="rm")
    draw_text(draw, (x + width / 2, y + height + text + 8), "key block", text, colour=INK, anchor="ma")
    label = "query block"
    turned = Image.new("RGB", text_size(label, text), PAPER)
    draw_text(ImageDraw.Draw(turned), (0, 0), label, text)
    turned = turned.rotate(90, expand=True)
    picture.paste(turned, (x - 50, y + (height - turned.height) // 2))


def _ticks(blocks: int) -> list[int]:
    """Return about five round block numbers from 0."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if blocks / step <= 6)
    return list(range(0, blocks, step))
