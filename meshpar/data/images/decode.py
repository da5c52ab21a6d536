"""Decodes pictures by Pillow, and says of one that is damaged what is wrong. No other module imports Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from meshpar.data.rows.source import CorruptRow
from meshpar.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM")
"""Pillow opens others with programs of this machine, such as PostScript."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm")
MODES = {1: "L", 3: "RGB"}
"""Number of channels -> Pillow's name."""

Size = tuple[int, int]
"""Height and width."""
Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""


def opened(picture: bytes) -> Any:
    """A picture whose header is read, and whose pixels are not.

    Raises:
      CorruptRow: it is no picture, or has more pixels than Pillow's limit, which a few bytes may claim.
    """
    library = pillow()
    limit = library.MAX_IMAGE_PIXELS
    try:
        image = library.open(io.BytesIO(picture), formats=FORMATS)
    except (library.DecompressionBombError, library.DecompressionBombWarning):
        raise CorruptRow(f"it claims more than {limit:,} pixels, the limit of Pillow") from None
    except Exception as error:
        raise CorruptRow(f"it cannot be decoded: {_said(error, library)}") from None
    if limit and image.width * image.height > limit:
        raise CorruptRow(f"it claims {image.width} x {image.height} pixels, more than {limit:,}, the limit of Pillow")
    if image.mode.startswith(("I", "F")):
        raise CorruptRow(f"it has numbers of more than 8 bits (Pillow's mode {image.mode})")
    return image


def cropped(picture: Any, box: Box, size: Size, channels: int) -> np.ndarray:
    """Decodes a picture, and resizes a part of it: uint8[height, width, channels].

    A JPEG is decoded at the smallest of its scales that has enough pixels for the part.

    Args:
      picture: of `opened`.
      box: the part, in pixels of the whole picture.

    Raises:
      CorruptRow: its pixels cannot be decoded.
    """
    library = pillow()
    width, height = picture.size
    scale = max(size[1] / (box[2] - box[0]), size[0] / (box[3] - box[1]))
    try:
        if scale < 1:
            picture.draft(MODES[channels], (int(width * scale), int(height * scale)))
        if "transparency" in picture.info and picture.mode == "P":
            picture = picture.convert("RGBA")
        picture.load()
        whole = picture if picture.mode == MODES[channels] else picture.convert(MODES[channels])
    except Exception as error:
        raise CorruptRow(f"it cannot be decoded: {_said(error, library)}") from None
    x, y = whole.width / width, whole.height / height
    part = (box[0] * x, box[1] * y, min(box[2] * x, whole.width), min(box[3] * y, whole.height))
    resized = whole.resize((size[1], size[0]), library.Resampling.BILINEAR, box=part, reducing_gap=2.0)
    return np.asarray(resized).reshape(*size, channels)


def pillow() -> Any:
    """Pillow's module `Image`.

    Raises:
      DataError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        what = "data.kind = images needs Pillow, which is not installed"
        raise DataError(f"{what}: pip install 'meshpar[images]'") from None
    return Image


def _said(error: Exception, library: Any) -> str:
    if isinstance(error, library.UnidentifiedImageError):
        return f"it is none of {', '.join(FORMATS)}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]
