"""A row that records which of its columns were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ABSENT: Any = object()


class RecordedRow(dict[str, Any]):
    """A row that records which of its columns were read.

    ``row[name]``, ``row.get(name)`` and ``row.pop(name)`` read a column. A copy of the row, such as
    ``{**row}`` or ``dict(row)``, reads none.

    Args:
        row: the row.

    Attributes:
        unread: names of the columns that hold text, lists or media, and that nothing has read. A
            column inside of another has both names with a dot. See ``unread_columns``.
    """

    # Without ``__iter__`` and ``items``, so that copies of a row do not call ``__getitem__``.
    __slots__ = ("_records", "unread")

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self.unread = {name for name, value in self.items() if has_content(value)}
        self._records: dict[str, list[RecordedRow]] = {}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.unread.discard(name)
        return value

    def get(self, key: object, default: Any = None, /) -> Any:
        """Return a column as ``dict.get`` does, and record it as read."""
        self.unread.discard(str(key))
        return super().get(key, default)

    def pop(self, key: object, default: Any = _ABSENT, /) -> Any:
        """Remove a column as ``dict.pop`` does, and record it as read."""
        self.unread.discard(str(key))
        return super().pop(str(key)) if default is _ABSENT else super().pop(key, default)

    def note_inside(self, path: Sequence[str]) -> None:
        """Record a nested column as read. Its siblings stay unread, by names with dots."""
        place = path[0]
        value: Any = super().get(place)
        for part in path[1:]:
            if place in self.unread:
                self.unread.remove(place)
                self.unread |= {f"{place}.{n}" for n, inner in value.items() if has_content(inner)}
            place, value = f"{place}.{part}", value[part]
        self.unread.discard(place)

    def keep_records(self, name: str, records: Sequence[Mapping[str, Any]]) -> list[RecordedRow]:
        """Return the records of the list in column ``name`` as rows that record their reads."""
        self._records[name] = [RecordedRow(record) for record in records]
        return self._records[name]

    def unread_columns(self) -> set[str]:
        """Return ``unread``, and the columns of kept records that were read in none of them.

        The column ``critique`` of the records in ``completions`` is ``completions[].critique``.
        """
        return self._columns()[1] if self._records else set(self.unread)

    def _columns(self) -> tuple[set[str], set[str]]:
        """Return all columns with content, those of kept records included, and the unread ones."""
        every = {name for name, value in self.items() if has_content(value)} | self.unread
        unread = set(self.unread)
        for name, records in self._records.items():
            found = [record._columns() for record in records]
            inside = set().union(*(own for own, _ in found))
            read = set().union(*(own - left for own, left in found))
            every |= {f"{name}[].{n}" for n in inside}
            unread |= {f"{name}[].{n}" for n in inside - read}
        return every, unread

    def copied(self, converted: Mapping[str, Any]) -> RecordedRow:
        """Return ``converted``, which a function made of this row, as a recorded row.

        The columns that the function wrote, changed or left out count as read.
        """
        made = RecordedRow(converted)
        kept = (n for n in self.unread if made.peek(n, _ABSENT) is self.peek(n))
        made.unread = set(kept)
        return made

    def peek(self, name: str, default: Any = None) -> Any:
        """Return a column as ``dict.get`` does, without a record."""
        return super().get(name, default)


def recorded(row: Mapping[str, Any]) -> RecordedRow:
    """Return ``row`` unchanged if it is recorded, else a recorded copy."""
    return row if isinstance(row, RecordedRow) else RecordedRow(row)


def unrecorded(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row whose columns can be looked at without a record."""
    return dict(row) if isinstance(row, RecordedRow) else row


def has_content(value: object) -> bool:
    """Return True for text, lists and media that are not empty, and tables with such values."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, list | tuple):
        return any(item is not None and item != "" for item in value[:8])
    if isinstance(value, Mapping):
        return any(map(has_content, value.values()))
    return is_raw(value)


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
