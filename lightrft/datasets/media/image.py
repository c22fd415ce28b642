"""Decoding of images to RGB ``[H, W, 3]`` uint8, corruption of decoded media, and previews.

A file that cannot be decoded raises ``ValueError`` with the reason. Corruption leaves the size as
it is: mDPO (arXiv 2406.11839, section 3.1) prefers a response after an image to the same response
after a random crop of the image. Previews are small files that a browser can open.
"""

from __future__ import annotations

import io
import math
import wave
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image

from lightrft.datasets.media.fetch import Content, held, picture_formats, stream
from lightrft.types import Attachment, Extent
from lightrft.utils.seeding import RandomStream, numpy_generator

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


SHARE = (0.01, 0.2)
"""Smallest and largest part of an image that a crop keeps, as in the authors' script."""

RATIO = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a crop, as in torchvision."""


def corrupted(value: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """Return a decoded item with most of its content removed, in its own shape.

    An image or all frames of a video become the same crop, resized. A sound becomes a part of it,
    repeated.

    Args:
        value: frames ``[..., H, W, 3]`` of type uint8, or samples ``[T]``.
        kind: ``image``, ``video`` or ``audio``.
        seed: seed of the part that is kept.
    """
    chance = numpy_generator(seed, RandomStream.CORRUPTED_MEDIA)
    if kind == "audio":
        kept = max(1, round(len(value) * chance.uniform(*SHARE)))
        start = int(chance.integers(0, len(value) - kept + 1))
        return np.resize(value[start : start + kept], value.shape)
    height, width = value.shape[-3:-1]
    top, left, rows, columns = _crop(height, width, chance)
    box = (left, top, left + columns, top + rows)
    frames = []
    for frame in value.reshape(-1, height, width, 3):
        resized = Image.fromarray(frame).resize((width, height), Image.Resampling.BILINEAR, box)
        frames.append(np.asarray(resized))
    return np.stack(frames).reshape(value.shape)


def _crop(height: int, width: int, chance: np.random.Generator) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random crop."""
    area = height * width * chance.uniform(*SHARE)
    # uniform in the logarithm, so that a ratio is as likely as its inverse
    ratio = math.exp(chance.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
    columns = min(width, max(1, round(math.sqrt(area * ratio))))
    rows = min(height, max(1, round(math.sqrt(area / ratio))))
    top = int(chance.integers(0, height - rows + 1))
    left = int(chance.integers(0, width - columns + 1))
    return top, left, rows, columns


_SIDE, _LOSSLESS = 512, 1 << 16
"""Longest side of a preview in pixels, and largest number of pixels that is stored losslessly."""


def attachment(kind: str, value: np.ndarray, extent: Extent, rate: int) -> Attachment:
    """Return a preview: PNG or JPEG for an image, animated WebP for a video, WAV for sound.

    Args:
        kind: ``image``, ``video`` or ``audio``.
        value: the decoded item: ``[H, W, 3]``, ``[T, H, W, 3]`` or ``[N]``.
        extent: the extent of the item, with the times of its frames.
        rate: sampling rate of sound in Hz.
    """
    if kind == "audio":
        data, suffix = _wav(value, rate), ".wav"
    elif kind == "video":
        data, suffix = _webp(value, extent.times), ".webp"
    else:
        data, suffix = _picture(value)
    # Named by content, so that a run stores a file once, however many rows show it.
    return Attachment(blake2b(data, digest_size=12).hexdigest() + suffix, data)


def _picture(value: np.ndarray) -> tuple[bytes, str]:
    picture = _small(value)
    # Small pictures, such as digits, would blur in a JPEG.
    if picture.width * picture.height <= _LOSSLESS:
        return _saved(picture, "PNG"), ".png"
    return _saved(picture, "JPEG", quality=88), ".jpg"


def _small(value: np.ndarray, side: int = _SIDE) -> Image.Image:
    picture = Image.fromarray(value)
    picture.thumbnail((side, side))
    return picture


def _saved(picture: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def _webp(frames: np.ndarray, times: tuple[float, ...]) -> bytes:
    pictures = [_small(frame, _SIDE // 2) for frame in frames]
    gaps = np.diff(np.asarray(times)) if len(times) > 1 else np.array([0.5])
    # The last frame has no gap after it. Browsers slow down frames of less than 20 ms.
    shown = [max(20, round(1000 * gap)) for gap in (*gaps, gaps[-1])][: len(pictures)]
    return _saved(
        pictures[0],
        "WEBP",
        save_all=True,
        append_images=pictures[1:],
        duration=shown,
        loop=0,
        quality=70,
    )


def _wav(value: np.ndarray, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((np.clip(value, -1, 1) * 32767).round().astype("<i2").tobytes())
    return file.getvalue()
