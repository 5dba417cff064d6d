"""Clips from every kind of source, in order, and damaged ones named."""

import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from diffsieve.compare.video import write_mp4
from diffsieve.errors import UserInputError
from diffsieve.eval import open_clip


def read(source) -> torch.Tensor:
    return torch.stack(list(open_clip(source).frames()))


def write_pictures(folder, frames: torch.Tensor, suffix: str = ".png") -> None:
    folder.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(folder / f"frame_{number}{suffix}")


@pytest.fixture
def clip(generator) -> torch.Tensor:
    """Twelve frames: two-digit numbers sort before one-digit ones by letters."""
    return torch.randint(0, 256, (12, 3, 10, 14), generator=generator, dtype=torch.uint8)


def smooth(frames: int, height: int = 48, width: int = 64) -> torch.Tensor:
    """A clip that video encoders keep well; frame t is brighter than frame t - 1."""
    ramp = torch.linspace(40, 150, width).expand(3, height, width)
    return torch.stack([(ramp + 8 * t).round().to(torch.uint8) for t in range(frames)])


@pytest.mark.parametrize("suffix", [".npy", ".npz", "compressed", ".png", ".bmp", ".webp"])
def test_files_without_loss_give_the_frames_back(clip, tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".npy":
        np.save(path, clip.numpy())
    elif suffix == ".npz":
        np.savez(path, frames=clip.numpy(), fps=12.0)
    elif suffix == "compressed":
        path = tmp_path / "a.npz"
        np.savez_compressed(path, any_name=clip.numpy())
    else:
        path = tmp_path / "a"
        path.mkdir()
        for number, frame in enumerate(clip):
            options = {"lossless": True} if suffix == ".webp" else {}
            Image.fromarray(frame.permute(1, 2, 0).numpy()).save(path / f"frame_{number}{suffix}", **options)
    assert torch.equal(read(path), clip)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_floating_point_arrays_keep_their_type(clip, tmp_path, dtype):
    values = (clip.numpy() / 255).astype(dtype)
    np.savez(tmp_path / "a.npz", values)
    frames = read(tmp_path / "a.npz")
    assert frames.numpy().dtype == dtype
    assert np.array_equal(frames.numpy(), values)


def test_pictures_are_turned_as_their_exif_says(clip, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 3
    (tmp_path / "clip").mkdir()
    Image.fromarray(clip[0].permute(1, 2, 0).numpy()).save(tmp_path / "clip" / "0.png", exif=exif)
    assert torch.equal(read(tmp_path / "clip"), clip[:1].flip(-1, -2))


def test_channels_may_come_last(clip, tmp_path):
    last = np.ascontiguousarray(clip.permute(0, 2, 3, 1).numpy())
    np.save(tmp_path / "a.npy", last)
    assert torch.equal(read(tmp_path / "a.npy"), clip)
    assert torch.equal(read(last), clip)


def test_a_video_gives_each_frame_once(tmp_path):
    clip = smooth(9)
    write_mp4(tmp_path / "a.mp4", clip, fps=10)
    frames = read(tmp_path / "a.mp4")
    assert frames.shape == clip.shape
    assert frames.dtype == torch.uint8
    assert (frames.float() - clip.float()).abs().mean() < 2


def test_a_walk_can_be_left_and_started_again(tmp_path):
    write_mp4(tmp_path / "a.mp4", smooth(9), fps=10)
    reader = open_clip(tmp_path / "a.mp4")
    first = next(iter(reader.frames()))
    assert torch.equal(first, next(iter(reader.frames())))
    assert len(list(reader.frames())) == 9


def cut(path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("kind", ["npz", "npy", "png", "mp4", "mp4-cut", "npz-flipped", "npz-checksum"])
def test_a_damaged_file_is_named(kind, clip, tmp_path):
    path = source = tmp_path / f"broken.{kind[:3]}"
    if kind == "npz":
        np.savez(path, clip.numpy())
        cut(path, 0.7)
    elif kind == "npz-flipped":
        np.savez(path, clip.numpy())
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF  # the array has the right length: only the archive's checksum tells
        path.write_bytes(data)
    elif kind == "npz-checksum":
        np.savez_compressed(path, clip.numpy())
        with zipfile.ZipFile(path) as archive:
            checksum = archive.infolist()[0].CRC
        path.write_bytes(path.read_bytes().replace(checksum.to_bytes(4, "little"), bytes(4)))
    elif kind == "npy":
        np.save(path, clip.numpy())
        cut(path, 0.7)
    elif kind == "png":
        source = tmp_path / "clip"
        write_pictures(source, clip)
        path = source / "frame_7.png"
        cut(path, 0.5)
    else:
        write_mp4(path, smooth(30), fps=10)
        cut(path, 0.02 if kind == "mp4" else 0.6)
    with pytest.raises(UserInputError, match=path.name):
        read(source)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        pytest.param(lambda p: np.savez(p, np.zeros((2, 10, 10))), "shape", id="shape"),
        pytest.param(lambda p: np.savez(p, np.zeros((2, 3, 9, 9), int)), "uint8 or floating", id="int64"),
        pytest.param(lambda p: np.savez(p, np.array([{}])), "uint8 or floating", id="objects"),
        pytest.param(lambda p: np.savez(p, a=np.zeros(1), b=np.zeros(1)), "one array, or one called", id="two-arrays"),
        pytest.param(lambda p: p.write_text("nonsense"), "cannot be read as an array", id="nonsense"),
    ],
)
def test_an_array_file_of_another_kind_is_refused(write, message, tmp_path):
    write(tmp_path / "a.npz")
    with pytest.raises(UserInputError, match=message):
        read(tmp_path / "a.npz")


def test_sources_that_are_no_clips_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserInputError, match="no such path"):
        open_clip(tmp_path / "missing.mp4")
    with pytest.raises(UserInputError, match=r"must be one of .*\.mp4.*got \.txt"):
        open_clip(tmp_path / "a.txt")
    with pytest.raises(UserInputError, match="must hold pictures"):
        open_clip(tmp_path / "empty")
    with pytest.raises(UserInputError, match="must have shape"):
        open_clip(torch.zeros(3, 8, 8))


def test_a_picture_with_alpha_is_refused(tmp_path):
    (tmp_path / "clip").mkdir()
    Image.new("RGBA", (8, 8)).save(tmp_path / "clip" / "a.png")
    with pytest.raises(UserInputError, match=r"a\.png must be an 8-bit picture without alpha, got mode RGBA"):
        read(tmp_path / "clip")


def test_one_picture_is_a_clip_of_one_frame(tmp_path):
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (frame,) = open_clip(tmp_path / "a.png").frames()
    assert np.array_equal(frame.permute(1, 2, 0).numpy(), pixels)
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(UserInputError, match=r"b\.png cannot be read as a picture"):
        list(open_clip(tmp_path / "b.png").frames())
