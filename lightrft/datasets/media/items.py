"""One picture, clip or sound as a row names it, and the mark that holds its place in text.

A mark is a pair of Unicode noncharacters around the kind and the number of the item: it passes through templates as any text
does, and no text of a row may hold one of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlparse

from lightrft.datasets.media.fetch import Fetch, is_still, nested

KINDS = ("image", "video", "audio")
OPEN, CLOSE = "\ufdd2", "\ufdd3"
MARK = re.compile(f"{OPEN}([a-z]+):(\\d+){CLOSE}")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".ppm")
_FIELDS = ("url", "path", "file", "base64", "data", "bytes", "array")
_RAW = ("bytes", "array", "data", "base64")


@dataclass(frozen=True, slots=True)
class Item:
    """``value`` is as the row has it, ``where`` names row and column, ``root`` is the folder that relative paths start from."""

    kind: str
    value: Any
    where: str
    root: Path
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None


def mark(kind: str, number: int) -> str:
    """The mark of item ``number`` of its row."""
    return f"{OPEN}{kind}:{number}{CLOSE}"


def marks(text: str) -> list[tuple[str, int]]:
    """Kind and number of each mark of ``text``, in its order."""
    return [(kind, int(number)) for kind, number in MARK.findall(text)]


def replaced(text: str, put: Callable[[str, int], str]) -> str:
    """``text`` with ``put(kind, number)`` in the place of each mark."""
    return MARK.sub(lambda m: put(m[1], int(m[2])), text) if OPEN in text else text


def as_parts(text: str) -> list[dict[str, str]]:
    """Text with marks as the parts of a message's content, as chat templates take them."""
    cut = MARK.split(text)
    parts = [{"type": "text", "text": cut[0]}]
    for kind, after in zip(cut[1::3], cut[3::3]):
        parts += [{"type": kind}, {"type": "text", "text": after}]
    return [p for p in parts if p.get("text") != ""]


def kind_of(part: Mapping[str, Any]) -> str | None:
    """The kind of media that a part of a message's content is; None for text and what is unknown."""
    name = str(part.get("type", "")).removeprefix("input_").removesuffix("_url")
    return name if name in KINDS else None


def payload(part: Mapping[str, Any], kind: str) -> Any:
    """What a content part of ``kind`` holds; None where it only says that one belongs here."""
    for name in (kind, f"{kind}_url", f"input_{kind}"):
        if part.get(name) is not None:
            return part[name]
    own = {name: part[name] for name in (*_FIELDS, "sampling_rate") if part.get(name) is not None}
    return own or None


def listed(value: Any, kind: str, root: Path) -> list[Any]:
    """The items of a column of ``kind``: one, several, or none. Several still pictures are the frames of one video."""
    if value is None or (isinstance(value, str | bytes) and not value):
        return []
    if not isinstance(value, list | tuple):
        return [value]
    some = [v for v in value if v is not None]
    if some and (isinstance(some[0], int | float) or (kind == "video" and all(_is_frame(v, root) for v in some))):
        return [some]
    return some


def is_raw(value: Any) -> bool:
    """Whether ``value`` holds media itself rather than their names."""
    if isinstance(value, Mapping):
        return any(map(is_raw, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_raw, value[:8]))
    return isinstance(value, bytes | bytearray) or hasattr(value, "getexif") or hasattr(value, "__array_interface__")


def _is_frame(value: Any, root: Path) -> bool:
    """Whether ``value`` is one still picture, by its name or else by its content; nothing is downloaded for that."""
    if isinstance(value, Mapping) and all(value.get(name) is None for name in _RAW):
        inside = nested(value)
        return inside is not None and _is_frame(inside, root)
    try:
        if isinstance(value, str | PathLike) and _ending(fspath(value)) in PICTURE_SUFFIXES:
            return True
        return not isinstance(value, list | tuple) and is_still(Fetch(root, 1.0, offline=True).content(value, root))
    except Exception:  # why it cannot be read is told where it is read
        return False


def _ending(name: str) -> str:
    path = urlparse(name).path if "://" in name[:16] else name[-16:]
    return PurePath(path).suffix.lower()
