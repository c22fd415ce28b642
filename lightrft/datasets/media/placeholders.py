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
from lightrft.datasets.row_tables import BadRow, Row, named_column

USUAL = {
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio", "audio_path"),
}
_WAITING = "?"


@dataclass(frozen=True)
class Reads:
    """The kinds of media that a model reads.

    ``spellings`` maps each kind to the texts that stand for one item of it in a row.
    """

    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"text and {', '.join(self.spellings)}" if self.spellings else "text alone"


NOTHING = Reads()


@dataclass(slots=True)
class Finder:
    """Collects the media items of one row.

    Args:
        reads: media that the model reads.
        where: location of the row, for messages.
        root: folder of relative media paths.
        named: column of each kind. An empty text means the usual names, None means no column.
        items: the items found so far.
    """

    reads: Reads
    where: str
    root: Path
    named: Mapping[str, str | None]
    items: list[Item] = field(default_factory=list)

    def part(self, part: Mapping[str, Any], where: str) -> str | None:
        """Return the mark of a content part, or None if it is not media.

        Raises ``BadRow`` for a kind that the model does not read.
        """
        kind = kind_of(part)
        if kind is None:
            return None
        if kind not in self.reads.spellings:
            raise BadRow(f"{where}: a content part of type {part['type']!r}, but the model reads {self.reads}")
        value = payload(part, kind)
        if value is None:
            return _waiting(kind)
        limits = {name: _whole(part[name], name, where) for name in ("min_pixels", "max_pixels") if part.get(name) is not None}
        fps = None if part.get("fps") is None else _rate(part["fps"], where)
        return self._add(Item(kind, value, f"{where}, {kind}", self.root, fps=fps, **limits))

    def text(self, text: str, where: str) -> str:
        """Return ``text`` with its markers replaced by marks that wait for an item.

        Raises ``BadRow`` for text that contains reserved mark characters.
        """
        if not self.reads.spellings:
            return text
        if OPEN in text or CLOSE in text:
            raise BadRow(f"{where}: the text holds U+FDD2 or U+FDD3, which are reserved for places of media; take them out")
        for kind, spellings in self.reads.spellings.items():
            for spelling in spellings:
                text = text.replace(spelling, _waiting(kind))
        return text

    def plain(self, text: str, where: str) -> str:
        """Return the ``text`` of a content part, whose markers are ordinary words.

        Raises ``BadRow`` for text that contains reserved mark characters.
        """
        if self.reads.spellings and (OPEN in text or CLOSE in text):
            return self.text(text, where)
        return text

    def has_columns(self, row: Row) -> bool:
        """Return True if a column contains media that the model reads."""
        return any(self._column(kind, row)[1] for kind in self.reads.spellings)

    def taken(self, row: Row) -> set[str]:
        """Return the names of the media columns, except for columns that only name a file."""
        names = {name for kind in self.reads.spellings for name in self._names(kind, row)}
        return {name for name in names if not (isinstance(row.get(name), str) and not row[name].startswith("data:"))}

    def place(self, texts: Sequence[str], last: int, row: Row) -> list[str]:
        """Return ``texts`` with marks for the items of the media columns of ``row``.

        Marks replace the markers of their kind. Without markers, they come before text ``last``.

        Args:
            texts: the texts of the messages.
            last: index of the text that gets items without markers.
            row: the row.

        Raises:
            BadRow: the numbers of markers and items differ, or the model does not read a kind.
        """
        texts, front = list(texts), ""
        for kind in KINDS:
            expected = sum(t.count(_waiting(kind)) for t in texts) if kind in self.reads.spellings else 0
            explicit = any(item.kind == kind for item in self.items)
            if explicit and not expected and not self.named.get(kind):
                continue
            column, values = self._column(kind, row)
            if values and kind not in self.reads.spellings:
                raise BadRow(
                    f"{self.where}: column {column!r} holds {_count(kind, len(values))}, but the model reads {self.reads}; take a "
                    f"model that reads it, or leave the column out with data.columns.{kind}s: null"
                )
            if expected and expected != len(values):
                raise BadRow(
                    f"{self.where}: the text has {expected} places for {kind} (<{kind}>), but the row has {_count(kind, len(values))}"
                    + (f" in column {column!r}" if column else f"; name their column in data.columns.{kind}s")
                )
            places = [self._add(Item(kind, v, self._column_name(column, k, values), self.root)) for k, v in enumerate(values)]
            if expected:
                texts = [_filled(t, kind, places) for t in texts]
            else:
                front += "".join(places)
        if front:
            texts[last] = front + texts[last]
        return texts

    def _names(self, kind: str, row: Row) -> tuple[str, ...]:
        named = self.named.get(kind, "")
        if named is None:
            return ()
        return (named,) if named else tuple(name for name in USUAL[kind] if name in row)

    def _column(self, kind: str, row: Row) -> tuple[str, list[Any]]:
        """Return name and items of the first column of ``kind`` that has items."""
        for name in self._names(kind, row):
            if values := listed(named_column(row, name, f"{kind}s", self.where), kind, self.root):
                return name, values
        return "", []

    def _column_name(self, column: str, k: int, values: Sequence[Any]) -> str:
        return f"{self.where}, column {column!r}" + (f", item {k + 1}" if len(values) > 1 else "")

    def _add(self, item: Item) -> str:
        self.items.append(item)
        return mark(item.kind, len(self.items) - 1)


def _waiting(kind: str) -> str:
    return f"{OPEN}{kind}{_WAITING}{CLOSE}"


def _filled(text: str, kind: str, places: list[str]) -> str:
    return re.sub(re.escape(_waiting(kind)), lambda _: places.pop(0), text)


def _count(kind: str, number: int) -> str:
    return f"{number or 'no'} {kind}{'' if number == 1 else 's'}"


def _whole(value: Any, name: str, where: str) -> int:
    if not isinstance(value, int | float) or value % 1 != 0 or value < 1:  # inf % 1 and nan % 1 are nan, so both are refused
        raise BadRow(f"{where}: {name} is {value!r}, not a number of pixels")
    return int(value)


def _rate(value: Any, where: str) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not (math.isfinite(rate) and rate > 0):
        raise BadRow(f"{where}: fps is {value!r}, not a number of frames a second above 0")
    return rate
