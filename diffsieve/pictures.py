"""What all readers of picture files share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x0112


def upright(picture: Image) -> Image:
    """Turn an opened picture as its EXIF orientation says; without one that can be read it stays as it is stored.

    Raises:
        OSError, SyntaxError, ValueError: the pixels cannot be decoded, as by `picture.load()`.
    """
    from PIL.Image import Transpose

    picture.load()  # first: a TIFF is turned here, and has no orientation afterwards
    try:
        orientation = picture.getexif().get(_ORIENTATION)
    except Exception:  # a damaged block may raise anything, and says nothing about the pixels
        return picture
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return picture if turn is None else picture.transpose(turn)
