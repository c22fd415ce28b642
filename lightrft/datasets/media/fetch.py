"""Loading of the value of a row as a file, bytes, an image or an array.

Raises ``ValueError`` with the reason.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlparse

import numpy as np
from PIL import Image

from lightrft.datasets.media.access import UNRESTRICTED, Access
from lightrft.datasets.media.download import Bounds, public, receive

_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]{32,}={0,2}\s*")
NESTED = (
    "image",
    "video",
    "audio",
    "image_url",
    "video_url",
    "audio_url",
    "input_audio",
    "url",
    "path",
    "file",
    "source",
)
"""Fields that stand for the whole medium."""
RAW = ("bytes", "array", "data", "base64")
"""Fields that contain the medium itself."""
_ANIMATED = ("GIF", "PNG", "WEBP")
_PICTURES = (*_ANIMATED, "BMP", "JPEG", "PPM", "TIFF")
_FORMATS = (*_PICTURES, "AVIF", "DIB", "ICO", "JPEG2000", "MPO", "PCX", "QOI", "SGI", "TGA")
_HOLDS = tuple(RLock() for _ in range(64))
LARGEST = 4 << 30
"""Largest size of a file in bytes, more than hours of video.

Larger data is an archive or an endless stream.
"""


@dataclass(frozen=True, slots=True)
class Samples:
    """Sound as an array.

    Args:
        values: samples ``[N]``, ``[channels, N]`` or ``[N, channels]``.
        rate: sampling rate in Hz.
    """

    values: np.ndarray
    rate: int


@dataclass(frozen=True, slots=True)
class Frames:
    """Successive images of a video."""

    pictures: tuple[Content, ...]


Content = Path | bytes | Image.Image | np.ndarray | Samples | Frames


@dataclass(frozen=True, slots=True)
class Fetch:
    """Locates files and downloads URLs.

    Args:
        folder: folder of the downloads.
        timeout: longest time of a download in seconds.
        offline: if True, only files that are already downloaded can be used.
        largest: largest size of a file in bytes.
        access: files and hosts that rows may access.
    """

    folder: Path
    timeout: float
    offline: bool = False
    largest: int = LARGEST
    access: Access = UNRESTRICTED

    def content(self, value: object, root: Path) -> Content:
        """Return the content of ``value``. Relative paths start from ``root``."""
        if isinstance(value, str):
            return self._named(value, root)
        if isinstance(value, os.PathLike):
            return self._file(root / value)
        if isinstance(value, bytes | bytearray | memoryview):
            self._check_size(len(value))
            return _some(bytes(value))
        if isinstance(value, Image.Image | np.ndarray):
            return value
        if isinstance(value, Mapping):
            return self._mapping(value, root)
        if isinstance(value, list | tuple):
            return self._several(value, root)
        if hasattr(value, "__array__"):
            return np.asarray(value)
        raise ValueError(
            f"a {type(value).__name__} is neither a path, a URL, bytes, a picture nor an array"
        )

    def _mapping(self, value: Mapping[str, Any], root: Path) -> Content:
        # First: parquet files of the hub have both, and their path is of another machine.
        if value.get("bytes") is not None:
            return self.content(value["bytes"], root)
        if value.get("array") is not None:
            array = np.asarray(value["array"])
            rate = value.get("sampling_rate")
            return array if rate is None else Samples(array, int(rate))
        encoded = first_given(value, ("data", "base64"))
        if isinstance(encoded, str) and not is_data_url(encoded):
            return self._decoded(encoded)
        inside = first_given(value, ("data", "base64", *NESTED))
        if inside is None:
            have = ", ".join(map(str, value)) or "nothing"
            raise ValueError(f"neither bytes, path, url nor array in it; it has: {have}")
        return self.content(inside, root)

    def _several(self, value: list[object] | tuple[object, ...], root: Path) -> Content:
        if not value:
            raise ValueError("the list is empty")
        # Nested lists of numbers are an array that JSON or parquet has taken apart.
        first = value[0]
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if isinstance(first, int | float):
            return np.asarray(value)
        return Frames(tuple(self.content(v, root) for v in value))

    def _named(self, text: str, root: Path) -> Content:
        if is_data_url(text):
            return self._data_uri(text)
        # only the start, since base64 text may be megabytes long
        scheme = urlparse(text).scheme if "://" in text[:16] else ""
        if scheme in ("http", "https"):
            return self._download(text)
        if local := local_path(text):
            return self._file(Path(local))
        if scheme:
            raise ValueError(f"{shown(text)}: only http, https and file addresses can be read")
        is_base64 = len(text) >= 64 and _BASE64.fullmatch(text) is not None
        # 4096 is the length of the longest path on Linux
        if len(text) < 4096:
            path = root / Path(text).expanduser()
            # A file comes first: a long path may consist of letters of base64 alone.
            if _is_file(path) or not is_base64:
                return self._file(path)
        if not is_base64:
            raise ValueError(f"{shown(text)} is neither a path nor base64")
        return self._decoded(text)

    def _download(self, url: str) -> Path:
        self.access.check_host(urlparse(url).hostname or "")
        name = blake2b(url.encode(), digest_size=16).hexdigest()
        path = self.folder / f"{name}{Path(urlparse(url).path).suffix[:8]}"
        if path.is_file():
            return path
        if self.offline:
            problem = f"{public(url)} has not been downloaded to {self.folder}"
            raise ValueError(f"{problem}, and data.media.offline is set")
        self.folder.mkdir(parents=True, exist_ok=True)
        # a unique name, since several workers may download the same file
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                receive(url, file, Bounds(self.timeout, self.largest, self.access))
            except BaseException:
                part.unlink()
                raise
        # After the last byte, so that no other worker reads a part of the file.
        part.replace(path)
        return path

    def _file(self, path: Path) -> Path:
        path = self.access.check_file(path)
        if not _is_file(path):
            where = "" if path.is_absolute() else f" (in {Path.cwd()})"
            raise ValueError(f"there is no file {path}{where}")
        size = path.stat().st_size
        if size == 0:
            raise ValueError(f"{path} is empty")
        self._check_size(size)
        return path

    def _check_size(self, size: int) -> None:
        if size > self.largest:
            raise ValueError(
                f"it has {size} bytes, more than data.media.max_file_mb = {self.largest / 2**20:g}"
            )

    def _data_uri(self, text: str) -> bytes:
        meta, comma, _ = text[:1000].partition(",")
        if not comma:
            raise ValueError("a data: address without a comma")
        if meta.lower().endswith(";base64"):
            return self._decoded(text[len(meta) + 1 :])
        self._check_size(len(text))
        return _some(unquote_to_bytes(text[len(meta) + 1 :]))

    def _decoded(self, text: str) -> bytes:
        """Return the bytes of base64 text, also in the URL-safe alphabet.

        White space is ignored.
        """
        # From the length of the text: decoding a huge value to measure it would take its memory.
        self._check_size(len(text) // 4 * 3)
        body = "".join(text.split()).replace("-", "+").replace("_", "/")
        try:
            return _some(base64.b64decode(body + "=" * (-len(body) % 4), validate=True))
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from None


@cache
def picture_formats() -> tuple[str, ...]:
    """Return the supported image formats that this build of Pillow has.

    Other formats are refused, such as EPS, which starts a PostScript interpreter.
    """
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def is_data_url(text: str) -> bool:
    """Return True if ``text`` is a ``data:`` URL. Its scheme has letters of any case."""
    return text[:5].lower() == "data:"


def local_path(text: str) -> str:
    """Return the path that a ``file:`` URL names. Empty for any other text."""
    if text[:7].lower() != "file://":
        return ""
    return unquote(text[7:].removeprefix("localhost"))


def is_missing(value: object) -> bool:
    """Return True if ``value`` stands for no item: null, NaN, an empty text or list, or a mapping
    of such values.

    Parquet and pandas write them for what a row does not have.
    """
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, Mapping):
        return bool(value) and all(map(is_missing, value.values()))
    if isinstance(value, list | tuple):
        return not value
    return value is None or (isinstance(value, float) and value != value)


def first_given(fields: Mapping[str, object], names: Iterable[str]) -> object:
    """Return the value of the first of ``names`` that is not null in ``fields``, or None."""
    values = map(fields.get, names)
    return next((value for value in values if value is not None), None)


def digest(content: Content) -> bytes:
    """Return a hash of ``content`` that does not depend on its location."""
    seen = blake2b(digest_size=20)
    _feed(seen, content)
    return seen.digest()


def held(content: Content) -> AbstractContextManager[object]:
    """Return a lock to enter while ``content`` is read.

    An image in memory has one file and one current frame for all threads.
    """
    if not isinstance(content, Image.Image):
        return nullcontext()
    # a fixed set of locks, since an image has no place for its own; low bits of ids are equal
    return _HOLDS[id(content) // 64 % len(_HOLDS)]


def frame_count(picture: Image.Image) -> int:
    """Return the number of frames of an animation.

    Returns 1 for a file that only contains several images, such as a photo with a preview.
    """
    return getattr(picture, "n_frames", 1) if picture.format in _ANIMATED else 1


def is_still(content: Content) -> bool:
    """Return True if ``content`` is one image by its header, and no animation, video or sound."""
    if isinstance(content, np.ndarray):
        return content.ndim == 3
    try:
        if isinstance(content, Image.Image):
            with held(content):
                return frame_count(content) == 1
        if not isinstance(content, Path | bytes):
            return False
        with Image.open(stream(content), formats=_PICTURES) as picture:
            return frame_count(picture) == 1
    # plugins raise SyntaxError, struct.error and more; the reader of the content reports it later
    except Exception:
        return False


def turn(picture: Image.Image, frame: int) -> None:
    """Move to ``frame`` of an animation from any frame.

    Seeks to the last frame first. When seeking backwards from another frame, Pillow loses its
    position in an APNG and the times of a WebP.
    """
    picture.seek(frame_count(picture) - 1)
    picture.load()
    picture.seek(frame)


def stream(content: Path | bytes) -> str | io.BytesIO:
    """Return ``content`` in a form that decoding libraries open: a path or a byte stream."""
    return str(content) if isinstance(content, Path) else io.BytesIO(content)


def head(content: Path | bytes, size: int = 32) -> bytes:
    """Return the first bytes of a file."""
    if isinstance(content, bytes):
        return content[:size]
    with content.open("rb") as file:
        return file.read(size)


def shown(value: object) -> str:
    """Return a short description of ``value`` for messages."""
    if isinstance(value, str | os.PathLike):
        text = str(value)
        return repr(text if len(text) <= 200 else f"{text[:60]}...")
    if isinstance(value, Mapping):
        for name in ("path", "url"):
            named = value.get(name)
            if isinstance(named, str) and named:
                return shown(named)
        return f"{{{', '.join(map(str, value))}}}"
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"


def _feed(seen: blake2b, content: Content) -> None:
    if isinstance(content, Path):
        with content.open("rb") as file:
            while block := file.read(1 << 20):
                seen.update(block)
    elif isinstance(content, bytes):
        seen.update(content)
    elif isinstance(content, Image.Image):
        with held(content):
            _feed_shown(seen, content)
            _feed_others(seen, content)
    elif isinstance(content, Samples):
        seen.update(str(content.rate).encode())
        _feed(seen, content.values)
    elif isinstance(content, Frames):
        for picture in content.pictures:
            seen.update(digest(picture))
    else:
        seen.update(f"{content.dtype} {content.shape}".encode())
        seen.update(np.ascontiguousarray(content).tobytes())


def _feed_shown(seen: blake2b, picture: Image.Image) -> None:
    """Hash everything that a model can see of ``picture``, including its palette."""
    picture.load()
    # 0x0112 is the orientation, by which the picture is turned.
    about = (
        picture.mode,
        picture.size,
        picture.getexif().get(0x0112),
        picture.info.get("transparency"),
    )
    seen.update(repr((*about, picture.getpalette("RGBA"))).encode())
    seen.update(picture.tobytes())


def _feed_others(seen: blake2b, picture: Image.Image) -> None:
    """Hash all frames of an animation, their durations, and the current frame."""
    at = picture.tell()
    try:
        if (count := frame_count(picture)) > 1:
            turn(picture, 0)
            for k in range(count):
                picture.seek(k)
                _feed_shown(seen, picture)
                seen.update(repr((at, picture.info.get("duration"))).encode())
            turn(picture, at)
    # closed or damaged: the first frame may still be readable, and read_clip() reports the damage
    except Exception:
        seen.update(b"damaged")
        picture.seek(at)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _some(data: bytes) -> bytes:
    if not data:
        raise ValueError("there are no bytes")
    return data
