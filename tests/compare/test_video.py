"""The mp4 files decode to the frames that went in: count, size, colours, format."""

from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch

from diffsieve.compare.video import to_uint8, write_mp4
from diffsieve.errors import DiffsieveError, UserInputError


def smooth_clip(frames: int, height: int, width: int) -> torch.Tensor:
    """A moving colour ramp, (T, 3, H, W) uint8: smooth, so that chroma subsampling costs little."""
    y = torch.linspace(0, 1, height)[None, :, None]
    x = torch.linspace(0, 1, width)[None, None, :]
    t = torch.linspace(0, 1, frames)[:, None, None]
    red, green, blue = x + 0 * y + 0 * t, y + 0 * x + 0 * t, t + 0 * x + 0 * y
    return to_uint8(torch.stack([red, green, blue], dim=1) * 0.8 + 0.1)


def decode(path: Path) -> tuple[dict, np.ndarray]:
    """Return ffmpeg's description and the frames (T, H, W, 3)."""
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    return meta, np.stack(frames)


@pytest.mark.parametrize(
    ("frames", "height", "width"),
    [(9, 32, 48), (1, 32, 32), (5, 33, 48), (5, 32, 47), (4, 31, 45)],
    ids=lambda value: str(value),
)
def test_decodes_to_the_same_frames(tmp_path, frames, height, width):
    clip = smooth_clip(frames, height, width)
    write_mp4(tmp_path / "a.mp4", clip, fps=12)
    meta, decoded = decode(tmp_path / "a.mp4")
    assert decoded.shape == (frames, height + height % 2, width + width % 2, 3)
    assert meta["codec"] == "h264"
    assert meta["pix_fmt"].startswith("yuv420p")
    assert meta["fps"] == 12
    expected = clip.permute(0, 2, 3, 1).numpy().astype(float)
    # Nothing is scaled: an odd side only gets a copy of its last row or column.
    error = np.abs(decoded[:, :height, :width].astype(float) - expected)
    assert error.mean() < 3.0
    if height % 2:
        assert np.abs(decoded[:, height].astype(float) - decoded[:, height - 1]).mean() < 3.0


def test_rounding_to_eight_bits():
    frames = torch.tensor([0.0, 1.0, 0.4999 / 255, 0.5001 / 255, 254.6 / 255])
    assert to_uint8(frames).tolist() == [0, 255, 0, 1, 255]


@pytest.mark.parametrize(
    "frames",
    [
        torch.zeros(2, 3, 16, 16),
        torch.zeros(2, 16, 16, 3, dtype=torch.uint8),
        torch.zeros(0, 3, 16, 16, dtype=torch.uint8),
    ],
    ids=["float", "channels-last", "empty"],
)
def test_bad_frames_are_refused(tmp_path, frames):
    with pytest.raises(UserInputError, match="frames must be"):
        write_mp4(tmp_path / "a.mp4", frames, fps=12)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_encoder_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(DiffsieveError, match="ffmpeg could not write"):
        write_mp4(tmp_path / "missing" / "a.mp4", smooth_clip(2, 16, 16), fps=12)
    assert list(tmp_path.iterdir()) == []
