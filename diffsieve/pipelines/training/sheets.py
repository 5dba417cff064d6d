"""Contact sheets: frames of several clips in one picture, with their captions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import UserInputError

if TYPE_CHECKING:
    from PIL.Image import Image

_GAP = 4
_TEXT_PX = 14


def contact_sheet(video: torch.Tensor, captions: Sequence[str], *, columns: int = 6, frame_px: int = 96) -> "Image":
    """A picture with one row per clip: its caption above evenly spaced frames, first and last included.

    Args:
        video: `(B, 3, T, H, W)` in [-1, 1].
        captions: B texts.
        columns: Frames per clip, at least 1; at most T are shown.
        frame_px: Height of a shown frame in pixels.
    """
    from PIL import Image, ImageDraw

    if video.ndim != 5 or video.shape[1] != 3:
        raise UserInputError(f"video must have shape (B, 3, T, H, W), got {tuple(video.shape)}")
    if len(captions) != len(video):
        raise UserInputError(f"captions must have one text per clip ({len(video)}), got {len(captions)}")
    if columns < 1:
        raise UserInputError(f"columns must be at least 1, got {columns}")
    height, width = video.shape[-2:]
    frame_width = round(width * frame_px / height)
    picked = torch.linspace(0, video.shape[2] - 1, min(columns, video.shape[2])).round().long()
    pixels = video[:, :, picked.to(video.device)].float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)
    pixels = pixels.permute(0, 2, 3, 4, 1).cpu()  # [B, columns, H, W, 3]
    row = frame_px + _TEXT_PX + _GAP
    sheet = Image.new("RGB", (len(picked) * (frame_width + _GAP) + _GAP, len(video) * row + _GAP), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    for i, text in enumerate(captions):
        draw.text((_GAP, i * row + 1), text, fill=(0, 0, 0))
        for k in range(len(picked)):
            frame = Image.fromarray(pixels[i, k].numpy()).resize((frame_width, frame_px), Image.Resampling.BICUBIC)
            sheet.paste(frame, (_GAP + k * (frame_width + _GAP), i * row + _TEXT_PX))
    return sheet


def save_sheet(
    path: Path | str, video: torch.Tensor, captions: Sequence[str], *, columns: int = 6, frame_px: int = 96
) -> None:
    """Write `contact_sheet` as a PNG file."""
    sheet = contact_sheet(video, captions, columns=columns, frame_px=frame_px)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG")
