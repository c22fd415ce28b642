"""Identify the content of media items without decoding them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from lightrft.datasets.media.fetch import local_path
from lightrft.datasets.media.items import Item


def identity(item: Item) -> bytes:
    """Return a digest of the content of ``item``.

    A file counts by its path, size and modification time, and a URL by its text.
    """
    found = hashlib.blake2b(digest_size=20)
    found.update(repr(item.settings).encode())
    for part in _parts(item.value, item.root):
        found.update(part)
    return found.digest()


def _parts(value: Any, root: Path) -> Iterator[bytes]:
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
            yield from _parts(value[key], root)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part, root)
    elif hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        yield repr((array.shape, str(array.dtype))).encode()
        yield np.ascontiguousarray(array).tobytes()
    else:
        yield repr(value).encode()
