"""The files of one prompt and seed: both clips or pictures, their difference, masks, raw frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..eval import MetricResult
from ..eval.clips import open_clip
from .canvas import to_image
from .clip import Clip
from .config import CompareConfig
from .files import write_frames, write_png
from .mask_file import BlockMasks, write_masks
from .methods import method_label
from .pictures import difference_clip, difference_picture, side_by_side
from .prepare import Prepared
from .recorded import Recorded
from .selection_file import Selections, write_selections
from .video import to_uint8, write_mp4

FILES = {
    "dense": "dense.mp4",
    "sparse": "sparse.mp4",
    "side_by_side": "side_by_side.mp4",
    "difference": "difference.png",
    "difference_clip": "difference.mp4",
    "mask": "mask.png",
    "masks": "masks.npz",
    "selections": "selections.npz",
    "dense_frames": "dense_frames.npz",
    "sparse_frames": "sparse_frames.npz",
    "floor": "floor.mp4",
    "floor_frames": "floor_frames.npz",
}
# Of a model of pictures.
PICTURE_FILES = {
    **{name: file for name, file in FILES.items() if name != "difference_clip"},
    "dense": "dense.png",
    "sparse": "sparse.png",
    "side_by_side": "side_by_side.png",
    "difference_map": "difference_map.png",
    "floor": "floor.png",
}


def write_pair(
    ready: Prepared[CompareConfig],
    item: dict[str, Any],
    paths: dict[str, Path],
    clips: tuple[Clip, Clip],
    metrics: Sequence[MetricResult],
    mask: Image.Image | None,
    recorded: Recorded | None,
) -> tuple[list[str], float]:
    """Write the files of one prompt and seed.

    Args:
        ready: settings.
        item: prompt and seed.
        paths: where the files go, by their keys in `FILES` or `PICTURE_FILES`.
        clips: dense and sparse.
        metrics: of the sparse clip.
        mask: picture of the block mask, if there is one.
        recorded: masks or selections to keep, if any.

    Returns:
        The keys that were written, and the end of the difference scale.
    """
    config, (dense, sparse) = ready.config, clips
    labels = ("dense", method_label(config.method, ready.attention))
    title = f"{item['prompt']} · seed {item['seed']}"
    eight_bit = [to_uint8(clip.frames) for clip in clips]
    write_shown(paths["dense"], eight_bit[0], config.fps)
    write_shown(paths["sparse"], eight_bit[1], config.fps)
    write_shown(paths["side_by_side"], side_by_side(*eight_bit, labels=labels), config.fps)
    by_name = {metric.name: metric for metric in metrics}
    picture = difference_picture(
        dense.frames, sparse.frames, title=title, labels=labels, psnr=by_name["psnr"], ssim=by_name["ssim"]
    )
    write_png(paths["difference"], picture)
    differences, scale_end = difference_clip(dense.frames, sparse.frames)
    moving = "difference_clip" if "difference_clip" in paths else "difference_map"
    write_shown(paths[moving], differences, config.fps)
    written = ["dense", "sparse", "side_by_side", "difference", moving]
    if mask is not None:
        write_png(paths["mask"], mask)
        written.append("mask")
    if isinstance(recorded, BlockMasks):
        write_masks(paths["masks"], recorded)
        written.append("masks")
    if isinstance(recorded, Selections):
        write_selections(paths["selections"], recorded)
        written.append("selections")
    if config.save_frames:
        write_frames(paths["sparse_frames"], sparse.frames)
        written += ["dense_frames", "sparse_frames"]
    return written, scale_end


def write_shown(target: Path, frames: torch.Tensor, fps: int | None) -> None:
    """Write frames (T, 3, H, W) uint8 as a video, or the only one as a picture where `target` is a PNG file."""
    if target.suffix == ".png":
        write_png(target, to_image(frames[0]))
        return
    assert fps is not None
    write_mp4(target, frames, fps=fps)


def read_shown(path: Path) -> torch.Tensor:
    """Read what `write_shown` wrote, as an encoder left it: frames (T, 3, H, W) uint8."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None]
    return torch.stack(list(open_clip(path).frames()))
