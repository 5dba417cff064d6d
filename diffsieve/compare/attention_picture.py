"""Where one query looked: the tokens that it attended to, drawn over the frames of the clip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw

from .canvas import FAINT, INK, PAPER, draw_text, fit_text, text_size, to_image
from .recorded import spread

_PANEL = 216  # pixels that a frame aims at
_ONLY_PANEL = 448  # the same of a picture, whose tokens are its pixels
_MOST = 12
_MARGIN, _GAP, _TEXT = 12, 10, 13
_DIM = 0.22  # brightness of what the query does not see, or sees most coarsely
_QUERY = (255, 214, 10)


@dataclass(frozen=True)
class AttentionLayout:
    """Where the frames of the token grid lie in the picture.

    Args:
        grid_thw: (frames, height, width) in tokens.
        shown: frames of the token grid that have a panel.
        panel: (width, height) of a panel in pixels.
        columns: panels in a row.
    """

    grid_thw: tuple[int, int, int]
    shown: tuple[int, ...]
    panel: tuple[int, int]
    columns: int

    @classmethod
    def of(cls, grid_thw: tuple[int, int, int], clip_size: tuple[int, int], frame: int) -> AttentionLayout:
        """Lay out a clip.

        Args:
            grid_thw: in tokens.
            clip_size: (height, width) of the clip in pixels.
            frame: of the query; has a panel in any case.
        """
        shown = sorted({*spread(range(grid_thw[0]), _MOST - 1), frame})
        height, width = clip_size
        side = _ONLY_PANEL if grid_thw[0] == 1 else _PANEL
        panel = side, max(1, round(side * height / width))
        return cls(grid_thw, tuple(shown), panel, min(len(shown), 4))

    @property
    def size(self) -> tuple[int, int]:
        rows = -(-len(self.shown) // self.columns)
        width = 2 * _MARGIN + self.columns * (self.panel[0] + _GAP) - _GAP
        return width, 2 * _MARGIN + rows * (self.panel[1] + self._caption + _GAP) - _GAP

    @property
    def _caption(self) -> int:
        return text_size("x", _TEXT)[1] + 4

    def corner(self, place: int) -> tuple[int, int]:
        """Return the upper left corner of a panel."""
        row, column = divmod(place, self.columns)
        step = self.panel[1] + self._caption + _GAP
        return _MARGIN + column * (self.panel[0] + _GAP), _MARGIN + row * step + self._caption

    def locate(self, x: float, y: float) -> tuple[int, int, int] | None:
        """Return the token (frame, row, column) under a point of the picture, or `None` beside the panels."""
        for place, frame in enumerate(self.shown):
            left, top = self.corner(place)
            if left <= x < left + self.panel[0] and top <= y < top + self.panel[1]:
                row = int((y - top) * self.grid_thw[1] / self.panel[1])
                column = int((x - left) * self.grid_thw[2] / self.panel[0])
                return frame, row, column
        return None


def attention_picture(
    frames: torch.Tensor,
    levels: np.ndarray,
    deepest: int,
    token: tuple[int, int, int],
    layout: AttentionLayout,
    word: str = "attended",
) -> Image.Image:
    """Draw the frames, the darker the more coarsely the query attended to them, and the query outlined.

    Args:
        frames: (T, 3, H, W) uint8, the clip or picture.
        levels: int8 (frames, height, width) over the token grid: 0 where the query attended to the token itself, larger
            where it did to means of ever more tokens.
        deepest: the level of what it did not see, or most coarsely; at least 1.
        token: (frame, row, column) of the query.
        layout: where the panels lie.
        word: what the share of level 0 is called.
    """
    picture = Image.new("RGB", layout.size, PAPER)
    draw = ImageDraw.Draw(picture)
    steps, height, width = layout.grid_thw
    for place, step in enumerate(layout.shown):
        number = 0 if steps == 1 else round(step * (len(frames) - 1) / (steps - 1))
        smooth = Image.Resampling.BICUBIC if steps > 1 else Image.Resampling.NEAREST  # of a picture, pixels are tokens
        image = to_image(frames[number]).resize(layout.panel, smooth)
        shade = 1 - (1 - _DIM) * levels[step].astype(np.float32) / deepest
        seen = Image.fromarray((255 * shade).round().astype(np.uint8))
        light = np.asarray(seen.resize(layout.panel, Image.Resampling.NEAREST), dtype=np.float32)[..., None] / 255
        panel = Image.fromarray((np.asarray(image, dtype=np.float32) * light).round().astype(np.uint8))
        left, top = layout.corner(place)
        picture.paste(panel, (left, top))
        attended = (levels[step] == 0).mean()
        share = f"{attended:.1%} {word}" if steps == 1 else f"{attended:.0%} {word}"
        if steps > 1:
            draw_text(draw, (left, top - 5), f"frame {number}", _TEXT, colour=INK, anchor="ls")
        right = fit_text(share, _TEXT, layout.panel[0] - 70)
        draw_text(draw, (left + layout.panel[0], top - 5), right, _TEXT, colour=FAINT, anchor="rs")
        if step == token[0]:
            x0, x1 = (left + round(edge * layout.panel[0] / width) for edge in (token[2], token[2] + 1))
            y0, y1 = (top + round(edge * layout.panel[1] / height) for edge in (token[1], token[1] + 1))
            draw.rectangle((x0 - 3, y0 - 3, x1 + 2, y1 + 2), outline=(0, 0, 0), width=5)
            draw.rectangle((x0 - 2, y0 - 2, x1 + 1, y1 + 1), outline=_QUERY, width=3)
    return picture
