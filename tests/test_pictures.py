"""Pictures are turned as their EXIF orientation says, whatever else is in the EXIF block."""

import io

import numpy as np
import pytest
from PIL import Image

from diffsieve.pictures import upright

# What the numbers of the orientation mean: how the stored rows and columns come from the upright picture.
STORED = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[::-1],  # what most telephones write in portrait
    7: lambda x: x.swapaxes(0, 1)[::-1, ::-1],
    8: lambda x: x.swapaxes(0, 1)[:, ::-1],
}
DAMAGED = {
    "no-tiff": b"Exif\0\0garbage",
    "short-header": b"Exif\0\0MM",
    "cut-entries": b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12",
    "offset-outside": b"Exif\0\0II*\0\xff\xff\0\0",
    "unknown-number": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0",
}


@pytest.fixture
def values() -> np.ndarray:
    """(2, 3, 3): no two of the eight orientations look alike."""
    return np.arange(18, dtype=np.uint8).reshape(2, 3, 3) * 14


def encoded(values: np.ndarray, kind: str, exif: bytes | Image.Exif) -> io.BytesIO:
    file = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    Image.fromarray(np.ascontiguousarray(values)).save(file, kind, exif=exif, **options)
    return file


def with_orientation(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("number", STORED)
def test_every_orientation_is_undone(values, kind, number):
    file = encoded(STORED[number](values), kind, with_orientation(number))
    with Image.open(file) as picture:
        assert np.array_equal(np.asarray(upright(picture)), values)


def test_a_picture_without_exif_stays(values):
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    with Image.open(file) as picture:
        assert upright(picture) is picture


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # of Pillow
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_block_says_nothing(values, kind, exif):
    with Image.open(encoded(values, kind, exif)) as picture:
        assert upright(picture).size == (3, 2)
