"""Small drawing helpers shared by the pictures: fonts, colours, a colour scale, panels."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

PAPER = (255, 255, 255)
INK = (28, 32, 38)
FAINT = (106, 114, 124)
FRAME = (190, 196, 204)

# Black, violet, red, orange, cream: lightness grows evenly, so that the scale also reads in grey.
_SCALE = np.array([(4, 5, 16), (60, 18, 104), (140, 34, 108), (212, 68, 66), (246, 142, 38), (252, 246, 190)], float)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own scalable font; no font of the machine is used, so pictures are the same everywhere."""
    return ImageFont.load_default(size)


def text_size(text: str, size: int) -> tuple[int, int]:
    """Return width and height of a line of text in pixels; the height is that of the font, the same for any text."""
    left, _, right, _ = font(size).getbbox(text)
    return int(right - left), round(size * 1.25)


def fit_text(text: str, size: int, width: int) -> str:
    """Shorten `text` with an ellipsis until it is at most `width` pixels wide."""
    if text_size(text, size)[0] <= width:
        return text
    fits, too_long = 0, len(text)  # halving: a prompt may have thousands of characters
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if text_size(text[:middle] + "...", size)[0] <= width:
            fits = middle
        else:
            too_long = middle
    return text[:fits].rstrip() + "..."


def draw_text(
    draw: ImageDraw.ImageDraw,
    position: tuple[float, float],
    text: str,
    size: int,
    *,
    colour: tuple[int, int, int] = INK,
    anchor: str = "la",
) -> None:
    draw.text(position, text, font=font(size), fill=colour, anchor=anchor)


def colour_scale(values: np.ndarray) -> np.ndarray:
    """Map values in [0, 1], any shape, to RGB uint8 with one more axis; values above 1 take the last colour."""
    position = np.clip(values, 0.0, 1.0) * (len(_SCALE) - 1)
    knots = np.arange(len(_SCALE))
    channels = [np.interp(position, knots, _SCALE[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def to_image(frame: torch.Tensor) -> Image.Image:
    """Turn one (3, H, W) uint8 frame into a picture."""
    return Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy())


def magnification(width: int, wanted: int) -> int:
    """Return the whole number of times that a panel of `width` pixels is repeated to reach about `wanted` pixels."""
    return max(1, round(wanted / width))


def enlarge(image: Image.Image, factor: int) -> Image.Image:
    """Repeat every pixel `factor` times along both sides; nothing is interpolated."""
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
