"""Prompts of a dataset as rows with the messages that the model was asked."""

from __future__ import annotations

import io
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from lightrft.config.data import DataConfig
from lightrft.datasets.chat_encoder import ChatEncoder, asking
from lightrft.datasets.media.fetch import NESTED, RAW, Content, Fetch, Frames, Samples, first_given
from lightrft.datasets.media.items import MARK, Item, as_parts
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_parser import Message, ParsedRow, read_tools
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.rows.row_content import tools_column
from lightrft.datasets.rows.row_reader import read_record
from lightrft.utils.atomic_files import write_atomic

LIMITS = ("min_pixels", "max_pixels", "fps")
"""Limits of one item that its content part has."""


class PromptRows:
    """Writes prompts as messages, with their media as content parts.

    The messages contain the configured system message and template. Rows of conversations end
    before the last turn of the assistant.

    Args:
        dataset: the prompts.
        reader: the data settings of the run that will read the rows.
        folder: folder for media that have no file of their own.

    Attributes:
        unlike: number of prompts that ``reader`` encodes to other tokens.
        first_unlike: location of the first of them.
    """

    def __init__(self, dataset: PromptDataset, reader: DataConfig, folder: Path) -> None:
        self.dataset = dataset
        self.encoder = dataset.encoder
        media = self.encoder.media
        self.files = None if media is None else MediaFiles(folder, media.fetch)
        processor = None if media is None else media.processor
        self._columns = reader.columns
        self._reading = ChatEncoder(reader, self.encoder.tokenizer, processor)
        self.unlike = 0
        self.first_unlike = ""

    def row(self, i: int) -> dict[str, object]:
        """Return ``prompt``, ``data_source`` and, if there are any, ``tools`` of prompt ``i``.

        Raises ``MalformedRow`` if the row has become unreadable.
        """
        record, cut = self.dataset.record(i)
        messages: list[Message] = []
        for message in asked_messages(self.encoder, record, cut):
            content = self._content(message["content"], record.media)
            messages.append({**message, "content": content})
        row: dict[str, object] = {"prompt": messages}
        if self.encoder.chat:
            name = tools_column(self.dataset.config.columns)
            tools = read_tools(record.row, name, record.where)
            if tools:
                row["tools"] = tools
        self._compare(row, record, cut)
        return row

    def answer(self, i: int) -> str | None:
        """Return the response in the row of prompt ``i``, or None if it has none."""
        return self.dataset.record(i)[0].answer

    def _content(self, text: str, media: list[Item]) -> str | list[dict[str, object]]:
        """Return the content of a message, with parts if it has media or a marker of them."""
        markers = [word for words in self.encoder.reads.spellings.values() for word in words]
        if MARK.search(text) is None and not any(word in text for word in markers):
            return text
        return as_parts(text, lambda _, number: self._part(media[number]))

    def _part(self, item: Item) -> dict[str, object]:
        assert self.files is not None
        limits = {name: getattr(item, name) for name in LIMITS}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        return {"type": item.kind, item.kind: self.files.value_of(item), **given}

    def _compare(self, row: dict[str, object], record: ParsedRow, cut: int) -> None:
        """Count the prompt if the run that reads ``row`` would encode it to other tokens."""
        there = read_record(row, self._columns, record.where, self._reading.reads, is_prompt=True)
        before = MARK.sub(r"\1", self.encoder.prompt(record, cut))
        after = MARK.sub(r"\1", self._reading.prompt(there))
        same = before == after and self.encoder.chat == self._reading.chat
        if not same:
            self.unlike += 1
            self.first_unlike = self.first_unlike or record.where


def asked_messages(encoder: ChatEncoder, record: ParsedRow, cut: int = 0) -> list[Message]:
    """Return the messages of a prompt as they are in a row, with marks of media.

    The configured system message and template are part of them. Without a chat template, the whole
    text is one message of the user.

    Args:
        encoder: the encoder of the prompts.
        record: the row.
        cut: number of characters to leave out at the start of the last message.

    Raises:
        MalformedRow: a conversation of several messages, and no chat template is in use.
    """
    if not encoder.chat or isinstance(record.prompt, str):
        text = encoder.unescape_special_tokens(encoder.text_of(record, cut))
        messages: list[Message] = [{"role": "user", "content": text}]
    else:
        messages = [dict(message) for message in asking(record)]
        messages[-1]["content"] = messages[-1]["content"][cut:]
        filled = list(messages)
        encoder.fill_template(record, filled, cut)
        for message, written in zip(messages, filled):
            if written is not message:
                message["content"] = encoder.unescape_special_tokens(written["content"])
        if record.is_begun:
            messages.append(dict(record.prompt[-1]))
    return encoder.with_system(messages)


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
