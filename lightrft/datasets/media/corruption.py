"""Corruption of decoded media, which leaves their size as it is.

mDPO (arXiv 2406.11839, section 3.1) prefers a response after an image to the same response after a
random crop of the image.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from lightrft.utils.seeding import RandomStream, numpy_generator

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
