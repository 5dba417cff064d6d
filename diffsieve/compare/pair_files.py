"""The files of one prompt and seed: clips, pictures, masks, raw frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from ..eval import MetricResult
from .clip import Clip
from .config import CompareConfig
from .files import write_frames, write_png
from .mask_file import BlockMasks, write_masks
from .mask_picture import mask_picture
from .methods import method_label
from .pictures import difference_clip, difference_picture, side_by_side
from .prepare import Prepared
from .video import to_uint8, write_mp4

if TYPE_CHECKING:
    from ..processors import RecordedMask

FILES = {
    "dense": "dense.mp4",
    "sparse": "sparse.mp4",
    "side_by_side": "side_by_side.mp4",
    "difference": "difference.png",
    "difference_clip": "difference.mp4",
    "mask": "mask.png",
    "masks": "masks.npz",
    "dense_frames": "dense_frames.npz",
    "sparse_frames": "sparse_frames.npz",
    "floor": "floor.mp4",
    "floor_frames": "floor_frames.npz",
}


def write_pair(
    ready: Prepared[CompareConfig],
    item: dict[str, Any],
    paths: dict[str, Path],
    clips: tuple[Clip, Clip],
    metrics: Sequence[MetricResult],
    mask: RecordedMask | None,
    masks: BlockMasks | None,
) -> tuple[list[str], float]:
    """Write the files of one prompt and seed; return their keys in `FILES`, and the end of the difference scale."""
    config, (dense, sparse) = ready.config, clips
    assert config.fps is not None
    labels = ("dense", method_label(config.method, ready.attention))
    title = f"{item['prompt']} · seed {item['seed']}"
    eight_bit = [to_uint8(clip.frames) for clip in clips]
    write_mp4(paths["dense"], eight_bit[0], fps=config.fps)
    write_mp4(paths["sparse"], eight_bit[1], fps=config.fps)
    write_mp4(paths["side_by_side"], side_by_side(*eight_bit, labels=labels), fps=config.fps)
    by_name = {metric.name: metric for metric in metrics}
    picture = difference_picture(
        dense.frames, sparse.frames, title=title, labels=labels, psnr=by_name["psnr"], ssim=by_name["ssim"]
    )
    write_png(paths["difference"], picture)
    differences, scale_end = difference_clip(dense.frames, sparse.frames)
    write_mp4(paths["difference_clip"], differences, fps=config.fps)
    written = ["dense", "sparse", "side_by_side", "difference", "difference_clip"]
    if mask is not None:
        write_png(paths["mask"], _draw_mask(mask, title, labels[1]))
        written.append("mask")
    if masks is not None:
        write_masks(paths["masks"], masks)
        written.append("masks")
    if config.save_frames:
        write_frames(paths["sparse_frames"], sparse.frames)
        written += ["dense_frames", "sparse_frames"]
    return written, scale_end


def _draw_mask(mask: RecordedMask, title: str, label: str) -> Image.Image:
    matrices = torch.stack([mask.matrix(head) for head in range(len(mask.orders))])
    _, rows, columns = matrices.shape
    blocks = f"{rows} x {columns} blocks of {mask.block_size} tokens, numbered in the token order of each head"
    return mask_picture(
        matrices,
        title=f"Block mask of {mask.layer} · {label}",
        notes=(f"{title} · last step", blocks),
        names=mask.orders,
    )
