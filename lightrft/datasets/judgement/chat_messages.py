"""Write questions with media as chat messages, as the API of OpenAI takes them."""

from __future__ import annotations

import base64
import io
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightrft.datasets.judgement.question import Raw
from lightrft.datasets.media.fetch import Content, Fetch, Samples
from lightrft.datasets.media.parts import kind_of, read_part
from lightrft.datasets.row_tables import MalformedRow

_FETCH = Fetch(Path(tempfile.gettempdir()), timeout=30.0)
_TYPES = {
    b"\x89PNG": "png",
    b"\xff\xd8": "jpeg",
    b"GIF8": "gif",
    b"RIFF": "wav",
    b"ID3": "mp3",
    b"\xff\xfb": "mp3",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"\x1aE\xdf\xa3": "webm",
}
"""First bytes of a file to its format."""
_USUAL = {"image": "png", "audio": "wav", "video": "mp4"}


def chat_messages(question: Raw) -> list[dict[str, Any]]:
    """Return a question as messages. Media are base64, or the address that the row gives.

    Raises ``MalformedRow`` if media cannot be read or sent.
    """
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    messages = []
    for message in question:
        content = message["content"]
        if isinstance(content, list | tuple):
            content = [_part(part) for part in content]
        messages.append({"role": message["role"], "content": content})
    return messages


def media_files(question: Raw) -> list[tuple[str, bytes]]:
    """Return kind and file of each media part of a question, in order.

    Raises ``MalformedRow`` if a part cannot be read.
    """
    if isinstance(question, str):
        return []
    contents = [message["content"] for message in question]
    parts = itertools.chain.from_iterable(c for c in contents if isinstance(c, list | tuple))
    kinds = [(kind, part) for part in parts if (kind := kind_of(part)) is not None]
    files = []
    for kind, part in kinds:
        value, settings = read_part(part, kind, "a prompt")
        _check_whole(settings)
        files.append((kind, _file(value, kind)))
    return files


def _check_whole(settings: Mapping[str, Any]) -> None:
    """Raise ``MalformedRow`` for settings of an item that uses a part of its video."""
    if not settings.keys().isdisjoint(("start", "end")):
        problem = "a judge gets whole files, and the row sets video_start or video_end"
        raise MalformedRow(f"{problem}; cut the video, and leave them out")


def _file(value: object, kind: str) -> bytes:
    """Return the file of a media part. Raises ``MalformedRow`` if it cannot be read."""
    try:
        return _bytes(_FETCH.content(value, Path()), kind)
    except (OSError, ValueError) as error:
        raise MalformedRow(f"{kind} of a question to a judge: {error}") from error


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = kind_of(part)
    if kind is None:
        return dict(part)
    # the server decides how many pixels and frames its judge gets
    value, settings = read_part(part, kind, "a question to a judge")
    _check_whole(settings)
    if isinstance(value, str) and value[:8].lower().startswith(("http://", "https://", "data:")):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": value}}
    data = _file(value, kind)
    found = next((name for start, name in _TYPES.items() if data.startswith(start)), _USUAL[kind])
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = "webp"
    encoded = base64.b64encode(data).decode("ascii")
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": found}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{kind}/{found};base64,{encoded}"}}


def _bytes(content: Content, kind: str) -> bytes:
    """Return the bytes of a file with ``content``. Raises ``ValueError`` if there is none."""
    if isinstance(content, Path):
        return content.read_bytes()
    if isinstance(content, bytes):
        return content
    if kind == "image" and isinstance(content, np.ndarray):
        content = Image.fromarray(content)
    if kind == "image" and isinstance(content, Image.Image):
        buffer = io.BytesIO()
        content.save(buffer, "PNG")
        return buffer.getvalue()
    if kind == "audio" and isinstance(content, Samples):
        return _wave(content)
    raise ValueError(
        f"a {type(content).__name__} cannot be sent; give a file, its bytes or its address"
    )


def _wave(sound: Samples) -> bytes:
    """Return samples of float as a file of type WAVE, without rounding."""
    values = np.atleast_2d(np.asarray(sound.values, dtype="<f4"))
    if values.shape[0] > values.shape[1]:
        values = values.T
    channels = values.shape[0]
    data = values.T.tobytes()
    # Format 3 is IEEE float: block size and rate in bytes follow from the channels.
    head = b"".join(
        number.to_bytes(size, "little")
        for number, size in (
            *((16, 4), (3, 2), (channels, 2), (sound.rate, 4)),
            *((sound.rate * channels * 4, 4), (channels * 4, 2), (32, 2)),
        )
    )
    body = b"WAVEfmt " + head + b"data" + len(data).to_bytes(4, "little") + data
    return b"RIFF" + len(body).to_bytes(4, "little") + body
