"""Positions of media in the text of a row.

Media are at message parts, at markers such as ``<image>``, or before the first user message. A
marker is a mark only where the row has an item for it. Elsewhere it is an ordinary word.
"""

from __future__ import annotations

import mimetypes
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightrft.datasets.media.fetch import is_data_url
from lightrft.datasets.media.items import CLOSE, OPEN, Item, is_same, listed, mark
from lightrft.datasets.media.parts import KINDS, kind_of, read_part
from lightrft.datasets.row_tables import MalformedRow, Row, check_unicode, named_column
from lightrft.datasets.rows.recorded_row import is_raw

USUAL = {
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio", "audio_path"),
}
_RESERVED = re.compile(f"[{OPEN}{CLOSE}]")
_WAITING = re.compile(f"{OPEN}([a-z]+)([?~])(\\d+){CLOSE}")
_SURE, _SPELLED = "?", "~"
"""Marks that wait for an item: those of message parts, and those that a text spells."""


@dataclass(frozen=True)
class SupportedMedia:
    """The kinds of media that a model reads.

    ``spellings`` maps each kind to the texts that can stand for one item of it in a row. Where a
    row uses several of them, the first has precedence.
    """

    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"text and {', '.join(self.spellings)}" if self.spellings else "text alone"

    def with_places(self, text: str, free: list[str]) -> str:
        """Return ``text`` with marks at its markers, in the order of the text.

        Args:
            text: a text with markers, such as a part of ``data.template``.
            free: marks of items. Those that are used are removed. Without a mark of its kind, a
                marker stays as it is.
        """
        for kind, spellings in self.spellings.items():
            # the longest first, since it may contain the others
            pattern = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
            if not pattern:
                continue
            own = [place for place in free if place.startswith(f"{OPEN}{kind}:")]
            rest = list(own)
            text = re.sub(pattern, lambda match, rest=rest: rest.pop(0) if rest else match[0], text)
            free[:] = [place for place in free if place in rest or place not in own]
        return text

    def spelled(self, text: str) -> int:
        """Return the number of markers in ``text``."""
        return sum(text.count(one) for spellings in self.spellings.values() for one in spellings)


NOTHING = SupportedMedia()


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """The texts of a row with marks for its media.

    Args:
        texts: the texts of the messages, with marks.
        front: the marks at the start of the message that gets media without markers.
        words: number of markers that are ordinary words.
    """

    texts: list[str]
    front: str
    words: int


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
    _settings: list[Mapping[str, Any]] = field(default_factory=list)
    _positions: Counter[str] = field(default_factory=Counter)

    def part(self, part: Mapping[str, object], where: str) -> str | None:
        """Return the mark of a content part, or None if it is not media.

        Raises ``MalformedRow`` for a kind that the model does not read, or an unknown key.
        """
        kind = kind_of(part)
        if kind is None:
            return None
        if kind not in self.reads.spellings:
            given = f"a content part of type {part.get('type', kind)!r}"
            raise MalformedRow(f"{where}: {given}, but the model reads {self.reads}")
        place = part.get("index")
        value, settings = read_part({**part, "index": None}, kind, where)
        if place is not None and (value is not None or place != self._positions[kind]):
            other = f"the next {kind} of the row is {self._positions[kind]}; write parts in order"
            beside = other if value is None else f"the part has its own {kind}; keep one of them"
            raise MalformedRow(f"{where}: index is {place!r}, and {beside}")
        if value is None:
            self._positions[kind] += 1
            self._settings.append(settings)
            return _waiting(kind, _SURE, len(self._settings) - 1)
        return self._add(Item(kind, value, f"{where}, {kind}", self.root, **settings))

    def text(self, text: str, where: str) -> str:
        """Return ``text`` with its markers replaced by marks that ``place`` decides about.

        Raises ``MalformedRow`` for text that contains reserved mark characters.
        """
        text = self.plain(text, where)
        for kind, spellings in self.reads.spellings.items():
            # the longest first, since it may contain the others
            for spelling in sorted(spellings, key=len, reverse=True):
                text = text.replace(spelling, _waiting(kind, _SPELLED, spellings.index(spelling)))
        return text

    def plain(self, text: str, where: str) -> str:
        """Return the ``text`` of a content part, whose markers are ordinary words.

        Raises ``MalformedRow`` for text that contains reserved mark characters, or that is no
        Unicode.
        """
        # without this check, a row could write a mark itself and read an item of its choice
        if self.reads.spellings and _RESERVED.search(text):
            reserved = "U+FDD2 or U+FDD3, which are reserved for places of media"
            raise MalformedRow(f"{where}: the text holds {reserved}; take them out")
        check_unicode(text, where)
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
                names_a_file = isinstance(value, str) and not is_data_url(value)
                if not names_a_file:
                    taken.add(name)
        return taken

    def place(self, texts: Sequence[str], roles: Sequence[str], row: Row) -> PlacedMedia:
        """Return ``texts`` with marks for the items of the media columns of ``row``.

        Marks replace the markers of their kind. Without markers, they come before the first text of
        the user. Markers that are no marks become words again.

        Args:
            texts: the texts of the messages.
            roles: the role of each message. Markers of the assistant are marks only where those of
                others do not suffice.
            row: the row.

        Raises:
            MalformedRow: the numbers of markers and items differ, or the model does not read a
                kind.
        """
        texts = list(texts)
        own = [role != "assistant" for role in roles]
        front = ""
        for kind in KINDS:
            sure = sum(text.count(f"{OPEN}{kind}{_SURE}") for text in texts)
            # Items of message parts, which ``part`` has found.
            explicit = any(item.kind == kind for item in self.items)
            column, values = self._column(kind, row)
            fits = self._fitting(kind, texts, own, len(values), sure)
            # Media in the messages replace a usual column, unless its items have markers.
            if explicit and not sure and not fits and not self.named.get(kind):
                self._check_copies(kind, row)
                continue
            marked = self._marked(kind, texts, own, column, len(values), sure, row)
            places = []
            for k, value in enumerate(values, start=1):
                number = f", item {k}" if len(values) > 1 else ""
                where = f"{self.where}, column {column!r}{number}"
                places.append(self._item(kind, value, where))
            if sure or marked:
                texts = [
                    self._filled(t, kind, places, marked.get(k, ())) for k, t in enumerate(texts)
                ]
            else:
                front += "".join(places)
        first = roles.index("user") if "user" in roles else len(texts) - 1
        words = sum(len(_WAITING.findall(text)) for text in texts)
        texts = [_WAITING.sub(self._word, text) for text in texts]
        texts[first] = front + texts[first]
        return PlacedMedia(texts, front, words)

    def _check_copies(self, kind: str, row: Row) -> None:
        """Raise ``MalformedRow`` if a usual column has other items than the message parts.

        Published rows repeat the items of their messages in a column.
        """
        given = [item for item in self.items if item.kind == kind]
        for name in self._names(kind, row):
            values = listed(row[name], kind, self.root)
            if not values:
                continue
            pairs = zip(given, values)
            if len(values) != len(given) or not all(self._is_copy(*pair) for pair in pairs):
                problem = f"the messages hold {_count(kind, len(given))} in their parts"
                other = f"column {name!r} holds {_count(kind, len(values))}, not the same"
                way_out = f"set data.columns.{kind}s: null, or {name} to show both"
                raise MalformedRow(f"{self.where}: {problem}, and {other}; {way_out}")

    def _is_copy(self, item: Item, value: object) -> bool:
        """Return True if the ``value`` of a column is that of ``item``, without other settings."""
        settings: dict[str, Any] = {}
        if isinstance(value, Mapping):
            value, settings = read_part(value, item.kind, self.where)
        kept = all(getattr(item, name) == given for name, given in settings.items())
        return kept and is_same(item.value, value, self.root)

    def _marked(
        self,
        kind: str,
        texts: Sequence[str],
        own: Sequence[bool],
        column: str,
        count: int,
        sure: int,
        row: Row,
    ) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the spellings that are marks, for each text that has some.

        Raises ``MalformedRow`` unless the ``count`` items of ``column`` fit them.
        """
        items = _count(kind, count)
        if count and kind not in self.reads.spellings:
            problem = f"column {column!r} holds {items}, but the model reads {self.reads}"
            way_out = f"leave the column out with data.columns.{kind}s: null"
            raise MalformedRow(f"{self.where}: {problem}; take a model that reads it, or {way_out}")
        if count and sure == count:
            return {}
        if count and (fits := self._fitting(kind, texts, own, count, sure)):
            return fits
        every = range(len(self.reads.spellings.get(kind, ())))
        owners = [text for text, owns in zip(texts, own) if owns]
        by_owners = sum(text.count(_waiting(kind, _SPELLED, n)) for text in owners for n in every)
        if not count and not sure:
            self._refuse_unread_column(kind, by_owners, row)
            return {}
        expected = by_owners + sure
        if expected in (0, count):
            return {}
        problem = f"the text has {_places(expected)} for {kind} (<{kind}>), but the row has {items}"
        if not column:
            way_out = f"name their column in data.columns.{kind}s"
            raise MalformedRow(f"{self.where}: {problem}; {way_out}")
        way_out = "if they are words, set data.media.marks: false, or write parts of messages"
        raise MalformedRow(f"{self.where}: {problem} in column {column!r}; {way_out}")

    def _fitting(
        self, kind: str, texts: Sequence[str], own: Sequence[bool], count: int, sure: int
    ) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the spellings that stand for ``count`` items, for each text that
        has some; nothing if no spellings do. ``sure`` items have places in message parts."""
        every = tuple(range(len(self.reads.spellings.get(kind, ()))))
        owners = [k for k, owns in enumerate(own) if owns]
        spelled = {
            k: [text.count(_waiting(kind, _SPELLED, n)) for n in every]
            for k, text in enumerate(texts)
        }
        # one spelling of the turns that ask, all of them, then those of every turn
        tries = [(owners, (n,)) for n in every] + [(owners, every)]
        if any(sum(spelled[k]) for k in owners):
            tries.append((list(range(len(texts))), every))
        for of, numbers in tries:
            places = sum(spelled[k][n] for k in of for n in numbers)
            if places and places + sure == count:
                return dict.fromkeys(of, numbers)
        return {}

    def _refuse_unread_column(self, kind: str, markers: int, row: Row) -> None:
        """Raise ``MalformedRow`` if the text has markers, and a column that is not read has media
        of ``kind``."""
        if not markers or self.named.get(kind, "") is None:
            return
        for name, value in row.items():
            if _may_be(value, kind):
                problem = f"the text has {_places(markers)} for {kind} (<{kind}>)"
                unread = f"and column {name!r}, which may have them, is not read"
                way_out = f"set data.columns.{kind}s: {name}, or null if it has none"
                raise MalformedRow(f"{self.where}: {problem}, {unread}; {way_out}")

    def _filled(self, text: str, kind: str, places: list[str], numbers: Sequence[int]) -> str:
        """Return ``text`` with the next ``places`` at its marks of ``kind``."""

        def put(match: re.Match[str]) -> str:
            of, sort, number = match[1], match[2], int(match[3])
            if of != kind or (sort == _SPELLED and number not in numbers):
                return match[0]
            if sort == _SURE:
                self._settle(places[0], self._settings[number])
            return places.pop(0)

        return _WAITING.sub(put, text)

    def _settle(self, place: str, settings: Mapping[str, Any]) -> None:
        """Give the item at ``place`` the settings of the part that stands for it."""
        number = int(place.strip(OPEN + CLOSE).rpartition(":")[2])
        for name, value in settings.items():
            item = self.items[number]
            if getattr(item, name) not in (None, value):
                raise MalformedRow(f"{item.where}: it and its part have settings that differ")
            self.items[number] = replace(item, **{name: value})

    def _word(self, match: re.Match[str]) -> str:
        return self.reads.spellings[match[1]][int(match[3])]

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

    def _item(self, kind: str, value: object, where: str) -> str:
        """Add an item of a column, and return its mark. A mapping may have settings."""
        if not isinstance(value, Mapping):
            return self._add(Item(kind, value, where, self.root))
        content, settings = read_part(value, kind, where)
        if content is None:
            have = ", ".join(map(str, value)) or "nothing"
            raise MalformedRow(f"{where}: no content of the {kind}; the item has: {have}")
        return self._add(Item(kind, content, where, self.root, **settings))

    def _add(self, item: Item) -> str:
        self.items.append(item)
        return mark(item.kind, len(self.items) - 1)


def _waiting(kind: str, sort: str, number: int) -> str:
    return f"{OPEN}{kind}{sort}{number}{CLOSE}"


def _count(kind: str, number: int) -> str:
    return f"{number or 'no'} {kind}{'' if number == 1 else 's'}"


def _may_be(value: object, kind: str) -> bool:
    """Return True if ``value`` looks like media of ``kind``: raw data, or a name of such a file."""
    if isinstance(value, list | tuple):
        return bool(value) and _may_be(value[0], kind)
    if isinstance(value, str):
        named = mimetypes.guess_type(value[-64:])[0] if " " not in value[-64:] else None
        return (named or "").startswith(f"{kind}/")
    return is_raw(value)


def _places(count: int) -> str:
    return "1 place" if count == 1 else f"{count} places"
