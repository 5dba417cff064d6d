"""Picture sets: folders and archives, classes, transparency, damaged files."""

import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffsieve import UserInputError
from diffsieve.pipelines.training.pixel_dit import images as images_module
from diffsieve.pipelines.training.pixel_dit.images import load_images, resized


def save(path, colour, size=(12, 8), mode="RGB", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "photos"
    save(root / "cats" / "a.png", (255, 0, 0))
    save(root / "cats" / "deep" / "b.JPG", (0, 255, 0), format="JPEG", quality=95)
    save(root / "dogs" / "c.webp", (0, 0, 255), lossless=True)
    (root / "dogs" / "notes.txt").write_text("no picture")
    (root / ".hidden").mkdir()
    (root / "dogs" / ".d.png").write_bytes(b"hidden")
    return root


def test_a_folder_with_classes(folder):
    images = load_images(folder, 4)
    assert images.pixels.shape == (3, 3, 4, 4)
    assert images.classes == ("cats", "dogs")
    assert images.labels.tolist() == [0, 0, 1]
    assert images.skipped == ()
    assert images.pixels[0, :, 0, 0].tolist() == [255, 0, 0]
    assert images.pixels[2, :, 3, 3].tolist() == [0, 0, 255]
    assert load_images(folder, 4, workers=1).digest == images.digest


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_an_archive_equals_its_folder(folder, tmp_path, kind):
    archive = tmp_path / f"photos.{kind}"
    files = [path for path in folder.rglob("*") if path.is_file()]
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as file:
            for path in files:
                file.write(path, path.relative_to(folder))
    else:
        with tarfile.open(archive, "w:gz" if kind == "tar.gz" else "w") as file:
            for path in files:
                file.add(path, path.relative_to(folder))
    expected, images = load_images(folder, 8), load_images(archive, 8)
    assert torch.equal(images.pixels, expected.pixels)
    assert (images.classes, images.digest) == (expected.classes, expected.digest)


def test_a_folder_without_classes(tmp_path):
    save(tmp_path / "a.png", (1, 2, 3))
    images = load_images(tmp_path, 2)
    assert images.classes == ()
    assert images.labels.tolist() == [0]


def test_transparency_is_put_on_white(tmp_path):
    save(tmp_path / "a.png", (255, 0, 0, 0), mode="RGBA")
    save(tmp_path / "b.webp", (0, 0, 0, 128), mode="RGBA", lossless=True)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 255] + [0] * 765)
    palette.save(tmp_path / "c.png", transparency=0)
    save(tmp_path / "d.png", 7, mode="L")
    pixels = load_images(tmp_path, 4).pixels
    assert [int(x) for x in pixels[:, 0, 0, 0]] == [255, 127, 255, 7]
    assert int(pixels[0].min()) == 255
    assert int(pixels[2].min()) == 255


def test_the_middle_square_is_kept(tmp_path):
    values = np.zeros((4, 8, 3), dtype=np.uint8)
    values[:, 2:6] = 200
    Image.fromarray(values).save(tmp_path / "wide.png")
    assert load_images(tmp_path, 4).pixels.unique().tolist() == [200]


def test_a_picture_is_turned_as_its_camera_says(tmp_path):
    values = np.full((64, 96, 3), 20, dtype=np.uint8)
    values[:, 64:] = 220  # the right edge of what is stored, the bottom of what was seen
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(values).save(tmp_path / "phone.jpg", quality=95, exif=exif)
    # the middle square of a tall picture: rows 16 to 80 of 96, light from row 64 on
    rows = load_images(tmp_path, 8).pixels[0, 0].float().mean(1)
    assert rows[:5].max() < 40
    assert rows[7] > 200


def test_damaged_pictures_are_skipped_named_and_counted(folder):
    (folder / "cats" / "cut.png").write_bytes((folder / "cats" / "a.png").read_bytes()[:40])
    (folder / "dogs" / "empty.jpg").write_bytes(b"")
    (folder / "dogs" / "lies.webp").write_text("text")
    images = load_images(folder, 4)
    assert len(images) == 3
    assert images.labels.tolist() == [0, 0, 1]
    assert [name for name, _ in images.skipped] == ["cats/cut.png", "dogs/empty.jpg", "dogs/lies.webp"]
    assert images.describe_skipped().startswith("3 unreadable pictures were skipped: cats/cut.png: ")
    assert images.describe_skipped().endswith("; dogs/lies.webp: no picture of a known format")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_picture_too_large_to_unpack_is_named(tmp_path, folder, monkeypatch, kind):
    large = folder / "dogs" / "large.png"
    large.write_bytes(b"0" * 3000)
    archive = Path(shutil.make_archive(str(tmp_path / "photos"), kind, folder))
    monkeypatch.setattr(images_module, "_MAX_FILE_BYTES", 2999)
    images = load_images(archive, 4)
    assert len(images) == 3
    assert images.skipped == (("dogs/large.png", "larger than 2999 bytes"),)


def test_bad_sources_are_named(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserInputError, match=r"data must hold pictures .*, got none in"):
        load_images(empty, 4)
    with pytest.raises(UserInputError, match="which does not exist"):
        load_images(tmp_path / "nowhere", 4)
    (tmp_path / "list.txt").write_text("x")
    with pytest.raises(UserInputError, match=r"data must be a folder or an archive .*, got list\.txt"):
        load_images(tmp_path / "list.txt", 4)
    (tmp_path / "bad.zip").write_bytes(b"PK")
    with pytest.raises(UserInputError, match=r"data must be a readable archive"):
        load_images(tmp_path / "bad.zip", 4)
    (empty / "a.png").write_bytes(b"")
    with pytest.raises(UserInputError, match=r"data must hold readable pictures, got .* with 1 unreadable, the first"):
        load_images(empty, 4)
    save(folder / "beside.png", (0, 0, 0))
    with pytest.raises(UserInputError, match=r"subfolders or beside them, not both, got beside\.png"):
        load_images(folder, 4)
    with pytest.raises(UserInputError, match="side must be positive, got 0"):
        load_images(folder, 0)


def test_an_unreadable_folder_is_named(folder, monkeypatch):
    import os

    real = os.scandir

    def scandir(path):
        if str(path).endswith("dogs"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserInputError, match=r"data must be readable, got .*dogs: Permission denied"):
        load_images(folder, 4)


def test_halving_is_the_mean_of_four_pixels():
    images = torch.arange(2 * 3 * 64, dtype=torch.uint8).view(2, 3, 8, 8)
    halved = resized(images, 4)
    expected = images.float().unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2)).round().to(torch.uint8)
    assert torch.equal(halved, expected)
    assert resized(images, 8) is images
    assert resized(torch.full((1, 3, 9, 9), 77, dtype=torch.uint8), 6).unique().tolist() == [77]
