"""One image, video or sound of a row, and the mark for its position in text.

A mark is a pair of Unicode noncharacters around the kind and number of the item. It passes through
chat templates like ordinary text. Rows must not contain these characters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from os import PathLike, fspath
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlparse

import numpy as np

from lightrft.datasets.media.fetch import (
    NESTED,
    RAW,
    Fetch,
    digest,
    first_given,
    is_data_url,
    is_missing,
    is_still,
    local_path,
)
from lightrft.datasets.media.parts import KEYS

OPEN, CLOSE = "\ufdd2", "\ufdd3"
MARK = re.compile(f"{OPEN}([a-z]+):(\\d+){CLOSE}")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True, slots=True)
class Item:
    """One media item of a row.

    Args:
        kind: ``image``, ``video`` or ``audio``.
        value: the value in the row.
        where: row and column, for messages.
        root: folder of relative paths.
        min_pixels: smallest number of pixels. None means the limit of ``data.media`` or the
            processor.
        max_pixels: largest number of pixels. None means the limit of ``data.media`` or the
            processor.
        total_pixels: largest number of pixels of all frames of a video. None means no such limit.
        height: height in pixels, before rounding to the patches of the model. None means no fixed
            size.
        width: width in pixels, like ``height``.
        fps: frames per second of a video. None means ``data.media.fps``.
        nframes: exact number of frames of a video. None means no such number.
        min_frames: smallest number of frames. None means the limit of ``data.media`` or the
            processor.
        max_frames: largest number of frames. None means ``data.media.max_frames``.
        start: first second of a video to use. None means its start.
        end: last second of a video to use. None means its end.
        sampling_rate: rate in Hz that the row states for a sound. None means no such rate.
        corruption: seed of a corruption of the decoded item. None means none.
    """

    kind: str
    value: object
    where: str
    root: Path
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None
    end: float | None = None
    sampling_rate: int | None = None
    corruption: int | None = None

    @property
    def settings(self) -> tuple[object, ...]:
        """Return everything that changes the inputs of the model, other than the content."""
        places = ("value", "where", "root")
        return tuple(getattr(self, one.name) for one in fields(self) if one.name not in places)


def mark(kind: str, number: int) -> str:
    """Return the mark of item ``number`` of a row."""
    return f"{OPEN}{kind}:{number}{CLOSE}"


def marks(text: str) -> list[tuple[str, int]]:
    """Return kind and number of each mark of ``text``, in order."""
    return [(kind, int(number)) for kind, number in MARK.findall(text)]


def replaced(text: str, put: Callable[[str, int], str]) -> str:
    """Return ``text`` with each mark replaced by ``put(kind, number)``."""
    if OPEN not in text:
        return text
    return MARK.sub(lambda match: put(match[1], int(match[2])), text)


def as_parts(
    text: str, part: Callable[[str, int], dict[str, Any]] = lambda kind, _: {"type": kind}
) -> list[dict[str, Any]]:
    """Return text with marks as content parts for a chat template.

    A mark becomes ``part(kind, number)``.
    """
    # split with two groups gives: text, kind, number, text, kind, number, text ...
    first, *cut = MARK.split(text)
    parts = [{"type": "text", "text": first}]
    for kind, number, after in zip(cut[::3], cut[1::3], cut[2::3]):
        parts += [part(kind, int(number)), {"type": "text", "text": after}]
    return [one for one in parts if one.get("text") != ""]


def with_items(text: str, items: Sequence[Item]) -> str | list[dict[str, Any]]:
    """Return text with marks as content parts that hold the media with their settings.

    Other text is unchanged.
    """

    def part(kind: str, number: int) -> dict[str, Any]:
        item = items[number]
        settings = {key: getattr(item, name) for name, key in KEYS.items()}
        given = {key: value for key, value in settings.items() if value is not None}
        return {"type": kind, kind: _at(item.value, item.root), **given}

    return as_parts(text, part) if OPEN in text else text


def _at(value: object, root: Path) -> object:
    """Return media with a path that does not depend on ``root``."""
    is_address = isinstance(value, str) and (is_data_url(value) or "://" in value[:16])
    return value if is_address or not isinstance(value, str) else str(root / value)


def listed(value: object, kind: str, root: Path) -> list[object]:
    """Return the items of a column.

    A list of still images in a ``video`` column is one video with these frames.

    Args:
        value: one item, a list of items, or None.
        kind: the media kind of the column.
        root: folder of relative paths.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        # as CSV files have it
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list | tuple):
        return [] if is_missing(value) else [value]
    # The samples of one sound, of which one may be missing.
    if value and isinstance(value[0], int | float) and not is_missing(value[0]):
        return [list(value)]
    # parquet may hold null for an item that a row does not have.
    some = [item for item in value if not is_missing(item)]
    if not some:
        return []
    if kind == "video" and all(_is_frame(item, root) for item in some):
        return [some]
    if kind == "image":
        # an image is no list, so a list in the list has images of one turn
        nested = [item if isinstance(item, list | tuple) else [item] for item in some]
        return [item for items in nested for item in items if not is_missing(item)]
    return some


def is_same(first: object, second: object, root: Path) -> bool:
    """Return True if two values of rows have equal content.

    Files are compared by their bytes. Nothing is downloaded. Values that cannot be read differ.

    Args:
        first: one item.
        second: another item.
        root: folder of relative paths.
    """
    if isinstance(first, str) and isinstance(second, str) and first == second:
        return True
    try:
        fetch = Fetch(root, 1.0, offline=True)
        return digest(fetch.content(first, root)) == digest(fetch.content(second, root))
    # The error is raised again, with its reason, when the items are read.
    except Exception:
        return False


def _is_frame(value: object, root: Path) -> bool:
    """Return True if ``value`` is one still image, by its name or its content.

    Nothing is downloaded for this check.
    """
    if isinstance(value, Mapping) and first_given(value, RAW) is None:
        return _is_frame(first_given(value, NESTED), root)
    if isinstance(value, list | tuple):
        return False
    try:
        if isinstance(value, str | PathLike):
            name = fspath(value)
            # A data URL may be megabytes long, so only its ends are looked at.
            path = urlparse(name).path if "://" in name[:16] else name[-16:]
            if PurePath(path).suffix.lower() in PICTURE_SUFFIXES:
                return True
        content = Fetch(root, 1.0, offline=True).content(value, root)
        return is_still(content)
    # The error is raised again, with its reason, when the item is read.
    except Exception:
        return False


def identity(item: Item) -> bytes:
    """Return a digest of the content of ``item``.

    A file counts by its path, size and modification time, and a URL by its text.
    """
    found = hashlib.blake2b(digest_size=20)
    found.update(repr(item.settings).encode())
    for part in _bytes_of(item.value, item.root):
        found.update(part)
    return found.digest()


def _bytes_of(value: Any, root: Path) -> Iterator[bytes]:
    """Yield the bytes that identify ``value``, with relative paths below ``root``."""
    if isinstance(value, bytes | bytearray | memoryview):
        yield bytes(value)
    elif isinstance(value, str | PathLike):
        text = fspath(value)
        yield text.encode()
        # A text that is no path, such as base64, may be too long for one.
        path = root / (local_path(text) or text) if len(text) < 4096 else None
        if path is not None and path.is_file():
            about = path.stat()
            yield repr((about.st_size, about.st_mtime_ns)).encode()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _bytes_of(value[key], root)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _bytes_of(part, root)
    elif hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        yield repr((array.shape, str(array.dtype))).encode()
        yield np.ascontiguousarray(array).tobytes()
    else:
        yield repr(value).encode()
