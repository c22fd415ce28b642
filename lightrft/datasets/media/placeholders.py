"""Positions of media in the text of a row.

Media are at message parts, at markers such as ``<image>``, or before the last user message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrft.datasets.media.items import CLOSE, KINDS, OPEN, Item, kind_of, listed, mark, payload
from lightrft.datasets.row_tables import MalformedRow, Row, named_column

USUAL = {
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio", "audio_path"),
}
_WAITING = "?"
_RESERVED = re.compile(f"[{OPEN}{CLOSE}]")


@dataclass(frozen=True)
class SupportedMedia:
    """The kinds of media that a model reads.

    ``spellings`` maps each kind to the texts that stand for one item of it in a row.
    """

    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"text and {', '.join(self.spellings)}" if self.spellings else "text alone"


NOTHING = SupportedMedia()


@dataclass(slots=True)
class MediaFinder:
    """Collects the media items of one row.

    Args:
        reads: media that the model reads.
        where: location of the row, for messages.
        root: folder of relative media paths.
        named: column of each kind. An empty text means the usual names, None means no column.
        items: the items found so far.
    """

    reads: SupportedMedia
    where: str
    root: Path
    named: Mapping[str, str | None]
    items: list[Item] = field(default_factory=list)

    def part(self, part: Mapping[str, object], where: str) -> str | None:
        """Return the mark of a content part, or None if it is not media.

        Raises ``MalformedRow`` for a kind that the model does not read.
        """
        kind = kind_of(part)
        if kind is None:
            return None
        if kind not in self.reads.spellings:
            given = f"a content part of type {part['type']!r}"
            raise MalformedRow(f"{where}: {given}, but the model reads {self.reads}")
        value = payload(part, kind)
        if value is None:
            return _waiting(kind)
        limits = {}
        for name in ("min_pixels", "max_pixels"):
            if part.get(name) is not None:
                limits[name] = _whole(part[name], name, where)
        fps = None if part.get("fps") is None else _rate(part["fps"], where)
        return self._add(Item(kind, value, f"{where}, {kind}", self.root, fps=fps, **limits))

    def text(self, text: str, where: str) -> str:
        """Return ``text`` with its markers replaced by marks that wait for an item.

        Raises ``MalformedRow`` for text that contains reserved mark characters.
        """
        text = self.plain(text, where)
        for kind, spellings in self.reads.spellings.items():
            for spelling in spellings:
                text = text.replace(spelling, _waiting(kind))
        return text

    def plain(self, text: str, where: str) -> str:
        """Return the ``text`` of a content part, whose markers are ordinary words.

        Raises ``MalformedRow`` for text that contains reserved mark characters.
        """
        # without this check, a row could write a mark itself and read an item of its choice
        if self.reads.spellings and _RESERVED.search(text):
            reserved = "U+FDD2 or U+FDD3, which are reserved for places of media"
            raise MalformedRow(f"{where}: the text holds {reserved}; take them out")
        return text

    def has_columns(self, row: Row) -> bool:
        """Return True if a column contains media that the model reads."""
        return any(self._column(kind, row)[1] for kind in self.reads.spellings)

    def taken(self, row: Row) -> set[str]:
        """Return the names of the media columns, except for columns that only name a file."""
        taken = set()
        for kind in self.reads.spellings:
            for name in self._names(kind, row):
                value = row.get(name)
                names_a_file = isinstance(value, str) and not value.startswith("data:")
                if not names_a_file:
                    taken.add(name)
        return taken

    def place(self, texts: Sequence[str], last: int, row: Row) -> list[str]:
        """Return ``texts`` with marks for the items of the media columns of ``row``.

        Marks replace the markers of their kind. Without markers, they come before text ``last``.

        Args:
            texts: the texts of the messages.
            last: index of the text that gets items without markers.
            row: the row.

        Raises:
            MalformedRow: the numbers of markers and items differ, or the model does not read a
                kind.
        """
        texts = list(texts)
        front = ""
        for kind in KINDS:
            expected = 0
            if kind in self.reads.spellings:
                expected = "".join(texts).count(_waiting(kind))
            # Items of message parts, which ``part`` has found.
            explicit = any(item.kind == kind for item in self.items)
            # media in the messages replace the usual columns, but not a column that is named
            if explicit and not expected and not self.named.get(kind):
                continue
            column, values = self._column(kind, row)
            self._check_count(kind, column, len(values), expected)
            places = []
            for k, value in enumerate(values, start=1):
                item = f", item {k}" if len(values) > 1 else ""
                where = f"{self.where}, column {column!r}{item}"
                places.append(self._add(Item(kind, value, where, self.root)))
            if expected:
                texts = [_filled(text, kind, places) for text in texts]
            else:
                front += "".join(places)
        texts[last] = front + texts[last]
        return texts

    def _check_count(self, kind: str, column: str, count: int, expected: int) -> None:
        """Raise ``MalformedRow`` unless the ``count`` items of ``column`` fit the markers of the
        text."""
        held = _count(kind, count)
        if count and kind not in self.reads.spellings:
            problem = f"column {column!r} holds {held}, but the model reads {self.reads}"
            way_out = f"leave the column out with data.columns.{kind}s: null"
            raise MalformedRow(f"{self.where}: {problem}; take a model that reads it, or {way_out}")
        if expected in (0, count):
            return
        problem = f"the text has {expected} places for {kind} (<{kind}>), but the row has {held}"
        if column:
            raise MalformedRow(f"{self.where}: {problem} in column {column!r}")
        raise MalformedRow(f"{self.where}: {problem}; name their column in data.columns.{kind}s")

    def _names(self, kind: str, row: Row) -> tuple[str, ...]:
        named = self.named.get(kind, "")
        # None switches the kind off, and an empty name stands for the usual columns
        if named is None:
            return ()
        if named:
            return (named,)
        return tuple(name for name in USUAL[kind] if name in row)

    def _column(self, kind: str, row: Row) -> tuple[str, list[object]]:
        """Return name and items of the first column of ``kind`` that has items."""
        for name in self._names(kind, row):
            value = named_column(row, name, f"{kind}s", self.where)
            values = listed(value, kind, self.root)
            if values:
                return name, values
        return "", []

    def _add(self, item: Item) -> str:
        self.items.append(item)
        return mark(item.kind, len(self.items) - 1)


def _waiting(kind: str) -> str:
    return f"{OPEN}{kind}{_WAITING}{CLOSE}"


def _filled(text: str, kind: str, places: list[str]) -> str:
    return re.sub(re.escape(_waiting(kind)), lambda _: places.pop(0), text)


def _count(kind: str, number: int) -> str:
    return f"{number or 'no'} {kind}{'' if number == 1 else 's'}"


def _whole(value: object, name: str, where: str) -> int:
    # inf % 1 and nan % 1 are nan, so both are refused
    if not isinstance(value, int | float) or value % 1 != 0 or value < 1:
        raise MalformedRow(f"{where}: {name} is {value!r}, not a number of pixels")
    return int(value)


def _rate(value: Any, where: str) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    # nan fails every comparison
    if not 0 < rate < math.inf:
        raise MalformedRow(f"{where}: fps is {value!r}, not a number of frames a second above 0")
    return rate
