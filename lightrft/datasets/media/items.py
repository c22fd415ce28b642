"""One image, video or sound of a row, and the mark for its position in text.

A mark is a pair of Unicode noncharacters around the kind and number of the item. It passes through
chat templates like ordinary text. Rows must not contain these characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path, PurePath
from urllib.parse import urlparse

from lightrft.datasets.media.fetch import NESTED, Fetch, first_given, is_still

KINDS = ("image", "video", "audio")
OPEN, CLOSE = "\ufdd2", "\ufdd3"
MARK = re.compile(f"{OPEN}([a-z]+):(\\d+){CLOSE}")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".ppm")
_FIELDS = ("url", "path", "file", "base64", "data", "bytes", "array")
_RAW = ("bytes", "array", "data", "base64")


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
        fps: frames per second of a video. None means ``data.media.fps``.
        corruption: seed of a corruption of the decoded item. None means none.
    """

    kind: str
    value: object
    where: str
    root: Path
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    corruption: int | None = None


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


def as_parts(text: str) -> list[dict[str, str]]:
    """Return text with marks as content parts for a chat template."""
    # split with two groups gives: text, kind, number, text, kind, number, text ...
    cut = MARK.split(text)
    parts = [{"type": "text", "text": cut[0]}]
    for kind, after in zip(cut[1::3], cut[3::3]):
        parts.append({"type": kind})
        parts.append({"type": "text", "text": after})
    return [part for part in parts if part.get("text") != ""]


def with_items(text: str, items: Sequence[Item]) -> str | list[dict[str, object]]:
    """Return text with marks as content parts that hold the media, and other text unchanged."""
    if OPEN not in text:
        return text
    # split with two groups gives: text, kind, number, text, kind, number, text ...
    cut = MARK.split(text)
    parts: list[dict[str, object]] = [{"type": "text", "text": cut[0]}]
    for kind, number, after in zip(cut[1::3], cut[2::3], cut[3::3]):
        item = items[int(number)]
        parts.append({"type": kind, kind: _at(item.value, item.root)})
        parts.append({"type": "text", "text": after})
    return [part for part in parts if part.get("text") != ""]


def _at(value: object, root: Path) -> object:
    """Return media with a path that does not depend on ``root``."""
    is_address = isinstance(value, str) and (value.startswith("data:") or "://" in value[:16])
    return value if is_address or not isinstance(value, str) else str(root / value)


def kind_of(part: Mapping[str, object]) -> str | None:
    """Return the media kind of a content part, or None for text and unknown types."""
    name = str(part.get("type", "")).removeprefix("input_").removesuffix("_url")
    return name if name in KINDS else None


def payload(part: Mapping[str, object], kind: str) -> object:
    """Return the media of a content part of ``kind``, or None if the part only marks a position."""
    given = first_given(part, (kind, f"{kind}_url", f"input_{kind}"))
    if given is not None:
        return given
    fields = (*_FIELDS, "sampling_rate")
    own = {name: part[name] for name in fields if part.get(name) is not None}
    return own or None


def listed(value: object, kind: str, root: Path) -> list[object]:
    """Return the items of a column.

    A list of still images in a ``video`` column is one video with these frames.

    Args:
        value: one item, a list of items, or None.
        kind: the media kind of the column.
        root: folder of relative paths.
    """
    # By type first: an array would be compared with the empty text element by element.
    if isinstance(value, str | bytes | None):
        return [value] if value else []
    if not isinstance(value, list | tuple):
        return [value]
    # parquet may hold null for an item that a row does not have.
    some = [item for item in value if item is not None]
    if not some:
        return []
    # The samples of one sound.
    if isinstance(some[0], int | float):
        return [some]
    if kind == "video" and all(_is_frame(item, root) for item in some):
        return [some]
    return some


def is_raw(value: object) -> bool:
    """Return True if ``value`` contains media and not only their names."""
    if isinstance(value, Mapping):
        return any(map(is_raw, value.values()))
    if isinstance(value, list | tuple):
        # a list of samples may hold millions of numbers, and its first items tell its kind
        return any(map(is_raw, value[:8]))
    if isinstance(value, bytes | bytearray):
        return True
    # images of PIL, and arrays of numpy
    return hasattr(value, "getexif") or hasattr(value, "__array_interface__")


def _is_frame(value: object, root: Path) -> bool:
    """Return True if ``value`` is one still image, by its name or its content.

    Nothing is downloaded for this check.
    """
    if isinstance(value, Mapping) and first_given(value, _RAW) is None:
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
