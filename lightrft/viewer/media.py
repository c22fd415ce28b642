"""Images, animations and sounds of a prompt, embedded in the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
}
"""Suffixes of the files that a browser can show."""
TINY = 64
"""Images with at most this many pixels per side are enlarged without smoothing."""


def shown(names: Sequence[str], folder: Path, about: str) -> str:
    """Return HTML elements that embed the named files.

    A file that is missing or of unknown type is mentioned by name.

    Args:
        names: names of the files.
        folder: folder of the files.
        about: alternative text for screen readers.
    """
    return "".join(embedded(name, _content(folder, name), about) for name in names)


def embedded(name: str, data: bytes | None, about: str) -> str:
    """Return the HTML element that embeds a file.

    Args:
        name: name of the file.
        data: its content, or None if it is missing.
        about: alternative text for screen readers.
    """
    kind = TYPES.get(Path(name).suffix.lower(), "")
    if not kind or data is None:
        why = "is missing" if kind else "cannot be shown"
        return f'<p class="empty">{escape(name)} {why}</p>'
    source = f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
    if kind.startswith("audio/"):
        label = escape(about)
        return f'<audio controls preload="metadata" src="{source}" aria-label="{label}"></audio>'
    return f'<img src="{source}" alt="{escape(about)}"{_tiny(data)}>'


def _content(folder: Path, name: str) -> bytes | None:
    path = folder / name
    return path.read_bytes() if Path(name).name == name and path.is_file() else None


def _tiny(data: bytes) -> str:
    """Return the CSS class of a small PNG, whose size is in bytes 16 to 24."""
    if data[:4] != b"\x89PNG":
        return ""
    width = int.from_bytes(data[16:20], "big")
    height = int.from_bytes(data[20:24], "big")
    return ' class="tiny"' if max(width, height) <= TINY else ""
