"""Decoding of images to RGB ``[H, W, 3]`` uint8. Raises ``ValueError`` with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from lightrft.datasets.media.fetch import Content, held, picture_formats, stream

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that turns an image of each EXIF orientation upright."""


def picture_size(content: Content, limit: int) -> tuple[int, int, int]:
    """Return ``(height, width, 3)`` of the decoded image, from the header if there is one.

    Raises ``ValueError`` for an image with more than ``limit`` pixels.
    """
    if isinstance(content, np.ndarray):
        height, width = _rows_first(content).shape[:2]
        return _within(height, width, limit)
    picture = _opened(content)
    width, height = picture.size
    if _orientation(picture) in (5, 6, 7, 8):
        width, height = height, width
    return _within(height, width, limit)


def read_picture(content: Content, limit: int) -> np.ndarray:
    """Return the image, upright, with transparent pixels blended onto white.

    An animation gives its first frame. Raises ``ValueError`` for an image with more than ``limit``
    pixels.
    """
    # From the header, before any pixel is decoded: a small file can hold a huge picture.
    picture_size(content, limit)
    if isinstance(content, np.ndarray):
        return _eight_bit(_rows_first(content))
    with held(content):
        return _read(content)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Return ``picture`` in RGB, with transparent pixels blended onto white."""
    # 16 bits per pixel, which convert() would clip at 255.
    if picture.mode.startswith("I"):
        high_bytes = np.asarray(picture).clip(0, 65535) >> 8
        return Image.fromarray(high_bytes.astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("a picture of floating-point numbers; save it with 8 or 16 bits")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def _opened(content: Content) -> Image.Image:
    if isinstance(content, Image.Image):
        return content
    if not isinstance(content, Path | bytes):
        raise ValueError(f"{type(content).__name__} is no picture")
    try:
        return Image.open(stream(content), formats=picture_formats())
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"the picture is too large: {error}") from None
    except Image.UnidentifiedImageError:
        raise ValueError("not a picture of any known format") from None
    except Exception as error:  # plugins raise SyntaxError, struct.error and more
        raise ValueError(f"the picture is damaged: {error}") from error


def _read(content: Content) -> np.ndarray:
    picture = _opened(content)
    turn = _UPRIGHT.get(_orientation(picture))
    try:
        picture.load()
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
        raise ValueError(f"the picture is damaged: {error}") from error
    return np.asarray(to_rgb(picture if turn is None else picture.transpose(turn)))


def _orientation(picture: Image.Image) -> int:
    # Pillow turns a TIFF when it loads it
    if picture.format == "TIFF":
        return 1
    # getexif() would decode the whole PNG
    if picture.format == "PNG" and "exif" not in picture.info:
        return 1
    return picture.getexif().get(_ORIENTATION, 1)


def _within(height: int, width: int, limit: int) -> tuple[int, int, int]:
    if min(height, width) < 1:
        raise ValueError(f"the picture is empty: {width} x {height} pixels")
    if height * width > limit:
        allowed = f"data.media.max_source_pixels = {limit}"
        raise ValueError(f"the picture has {width} x {height} pixels, more than {allowed}")
    return height, width, 3


def _rows_first(array: np.ndarray) -> np.ndarray:
    """Return an array ``[H, W, C]`` from ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``."""
    if array.ndim == 2:
        return array[..., None]
    # the last axis first: [3, W, 3] is a picture of three rows
    for axis in (-1, 0):
        if array.ndim == 3 and array.shape[axis] in (1, 3, 4):
            return np.moveaxis(array, axis, -1)
    problem = f"an array of shape {array.shape} is no picture"
    raise ValueError(f"{problem}; it must be [height, width, 3]")


def _eight_bit(array: np.ndarray) -> np.ndarray:
    if array.dtype == bool:
        array = array * np.uint8(255)
    elif array.dtype.kind == "f":
        # A comparison with nan is false, so this refuses numbers that are not finite too.
        if not ((array >= 0) & (array <= 1)).all():
            raise ValueError("a picture of floating-point numbers must lie in [0, 1]")
        array = np.round(array * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
            given = f"{array.dtype} from {array.min()} to {array.max()}"
            raise ValueError(f"a picture must be uint8, not {given}")
        array = array.astype(np.uint8)
    if array.shape[-1] == 1:
        array = np.repeat(array, 3, axis=-1)
    elif array.shape[-1] == 4:
        array = np.asarray(to_rgb(Image.fromarray(array)))
    return np.ascontiguousarray(array)
