"""Pictures of a model in training: generation and contact sheets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....errors import UserInputError
from ...pixel_dit import PixelDiTPipeline, PixelDiTTransformer2DModel
from .config import SamplingConfig

if TYPE_CHECKING:
    from PIL.Image import Image

_GAP = 4
_TEXT_PX = 14


def build_pipeline(
    transformer: PixelDiTTransformer2DModel, classes: Sequence[str], config: SamplingConfig
) -> PixelDiTPipeline:
    """The pipeline of a transformer, with the guidance of the settings as its default."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    low, high = config.guidance_interval
    return PixelDiTPipeline(
        transformer,
        FlowMatchEulerDiscreteScheduler(),
        class_names=list(classes) or None,
        guidance_scale=config.guidance_scale,
        guidance_interval=[low, high],
    )


def generate(
    pipe: PixelDiTPipeline, config: SamplingConfig, *, side: int | None = None, count: int | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Pictures of all classes in turn, as many as the settings say; picture i starts from the noise of seed + i.

    Args:
        pipe: on its device.
        config: steps, guidance, seed.
        side: pixels; default the model's.
        count: pictures; default those of the settings.

    Returns:
        (N, 3, S, S) uint8 on the CPU, and the class of each (empty where there are no classes).
    """
    pipe.set_progress_bar_config(disable=True)
    wanted = count or config.images
    classes = pipe.transformer.config.num_classes
    labels = [i % classes for i in range(wanted)] if classes else []
    parts = []
    for start in range(0, wanted, config.batch_size):
        numbers = range(start, min(start + config.batch_size, wanted))
        output: Any = pipe(
            [labels[i] for i in numbers] if classes else None,
            height=side,
            width=side,
            num_inference_steps=config.steps,
            guidance_scale=config.guidance_scale,
            guidance_interval=config.guidance_interval,
            num_images=1 if classes else len(numbers),
            # noise from CPU generators is the same on every device
            generator=[torch.Generator().manual_seed(config.seed + i) for i in numbers],
            output_type="pt",
        )
        parts.append((output.images.float() * 255).round().to(torch.uint8).cpu())
    return torch.cat(parts), labels


def contact_sheet(
    pictures: torch.Tensor, labels: Sequence[int], classes: Sequence[str], *, columns: int = 9, scale: int = 1
) -> Image:
    """All pictures (N, 3, H, W) uint8 in one; with classes, a column for each of them, under its name.

    Args:
        pictures: the pictures.
        labels: class of each, or empty.
        classes: names.
        columns: where there are no classes.
        scale: screen pixels for a pixel.
    """
    from PIL import Image, ImageDraw

    if pictures.ndim != 4 or pictures.shape[1] != 3 or pictures.dtype != torch.uint8:
        raise UserInputError(f"pictures must be (N, 3, H, W) uint8, got {tuple(pictures.shape)} {pictures.dtype}")
    height, width = (edge * scale for edge in pictures.shape[-2:])
    places: list[tuple[int, int]] = []
    filled = [0] * (len(classes) or columns)
    for i in range(len(pictures)):
        column = labels[i] if classes else i % columns
        places.append((filled[column], column))
        filled[column] += 1
    top = _TEXT_PX if classes else 0
    size = (len(filled) * (width + _GAP) + _GAP, top + max(filled) * (height + _GAP) + _GAP)
    sheet = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    for column, name in enumerate(classes):
        fitting = max(1, (width + _GAP) // 6)
        draw.text((column * (width + _GAP) + _GAP, 1), name[:fitting], fill=(0, 0, 0))
    for picture, (row, column) in zip(pictures, places, strict=True):
        tile = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
        tile = tile.resize((width, height), Image.Resampling.NEAREST)
        sheet.paste(tile, (column * (width + _GAP) + _GAP, top + row * (height + _GAP) + _GAP))
    return sheet
