"""Small preview files of media items that a browser can open."""

from __future__ import annotations

import io
import wave
from hashlib import blake2b

import numpy as np
from PIL import Image

from lightrft.types import Attachment, Extent

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
