"""Values that name the media of a row from any place."""

from __future__ import annotations

import io
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from lightrft.datasets.media.fetch import NESTED, RAW, Content, Fetch, Frames, Samples, first_given
from lightrft.datasets.media.items import Item
from lightrft.datasets.row_tables import MalformedRow
from lightrft.utils.atomic_files import write_atomic

SIGNATURES = {
    b"\x89PNG": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF8": ".gif",
    b"BM": ".bmp",
    b"fLaC": ".flac",
    b"OggS": ".ogg",
    b"ID3": ".mp3",
    b"\x1aE\xdf\xa3": ".mkv",
}
"""Suffix of a file by its first bytes."""

RIFF = {b"WAVE": ".wav", b"WEBP": ".webp", b"AVI ": ".avi"}
"""Suffix of a RIFF file by its form."""


class MediaFiles:
    """Makes values of media independent of the place of their row.

    Paths become absolute, and addresses stay as they are. Media inside a row are written to a file.
    Samples of sound in an array stay in the row, since a file could not hold every number.

    Args:
        folder: folder of the written files. It is made with the first of them.
        fetch: locates the media of a row.
    """

    def __init__(self, folder: Path, fetch: Fetch) -> None:
        self.folder = folder
        self.fetch = fetch

    def value_of(self, item: Item) -> object:
        """Return the value of ``item`` for another row. Raises ``MalformedRow``."""
        try:
            return self._portable(item.value, item.root)
        except (ValueError, OSError) as error:
            raise MalformedRow(f"{item.where}: {error}") from None

    def _portable(self, value: object, root: Path) -> object:
        is_address = isinstance(value, str) and "://" in value[:16]
        if is_address and not str(value).startswith("file:"):
            return value
        if isinstance(value, Mapping) and first_given(value, RAW) is None:
            inside = first_given(value, NESTED)
            if inside is not None:
                return self._portable(inside, root)
        if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
            first = value[0]
            is_array = isinstance(first, list | tuple)
            if not is_array:
                return [self._portable(one, root) for one in value]
        return self._named(self.fetch.content(value, root))

    def _named(self, content: Content) -> object:
        """Return a JSON value for ``content``."""
        if isinstance(content, Path):
            return str(content.absolute())
        if isinstance(content, bytes):
            return self._written(content, _suffix_of(content))
        if isinstance(content, Image.Image):
            return self._picture(content)
        if isinstance(content, Samples):
            return {"array": content.values.tolist(), "sampling_rate": content.rate}
        if isinstance(content, Frames):
            return [self._named(picture) for picture in content.pictures]
        # Other layouts, such as [3, H, W], stay numbers: the reader of the row knows them.
        if content.dtype == np.uint8 and content.shape[-1] in (3, 4):
            if content.ndim == 4:
                return [self._picture(Image.fromarray(frame)) for frame in content]
            if content.ndim == 3:
                return self._picture(Image.fromarray(content))
        return {"array": content.tolist()}

    def _picture(self, picture: Image.Image) -> str:
        data = io.BytesIO()
        # Pillow saves without the EXIF data, which may say that the picture is to be turned.
        picture = ImageOps.exif_transpose(picture)
        # TIFF keeps the modes that PNG does not have, such as CMYK.
        is_png = picture.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
        picture.save(data, format="PNG" if is_png else "TIFF")
        return self._written(data.getvalue(), ".png" if is_png else ".tiff")

    def _written(self, data: bytes, suffix: str) -> str:
        """Write ``data`` to a file that its content names, and return the path."""
        path = self.folder.absolute() / f"{blake2b(data, digest_size=16).hexdigest()}{suffix}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, data)
        return str(path)


def _suffix_of(data: bytes) -> str:
    if data[:4] == b"RIFF":
        return RIFF.get(data[8:12], ".bin")
    if data[4:8] == b"ftyp":
        return ".mp4"
    found = (suffix for start, suffix in SIGNATURES.items() if data.startswith(start))
    return next(found, ".bin")
