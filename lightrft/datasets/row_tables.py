"""Tables of rows with a length, ``rows[i]`` as a dictionary, and ``where(i)`` for messages.

All can be pickled.

Files of JSON lines are indexed by byte offset and parsed on access. The index of a large file takes
sixteen bytes per row. CSV files are held in memory.

``READERS`` is the registry of readers, which convert a row of one layout to the usual columns:
``prompt``, ``response``, ``label``, ``reference``, ``data_source`` and ``id``. A reader has the
signature ``reader(row, **options) -> row`` and keeps the other columns of the row. ``KeyError`` and
``ValueError`` become errors that name the row.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from lightrft.datasets.rows.recorded_row import RecordedRow, recorded
from lightrft.utils.errors import DataError, did_you_mean, is_unicode
from lightrft.utils.registry import Registry
from lightrft.utils.yaml_text import parse_json

if TYPE_CHECKING:
    import numpy as np


BOM = b"\xef\xbb\xbf"
"""The byte order mark that some editors write before UTF-8 text."""
Row = Mapping[str, Any]
Malformed = Literal["error", "skip"]
ABSENT: object = object()
"""Marker that distinguishes a missing column from a null value in ``look_up``."""


_CHANGED = "Has the file changed since it was opened?"


class MalformedRow(DataError):
    """One row cannot be used. ``malformed: skip`` skips it."""


class Rows(Protocol):
    """A table of rows.

    ``malformed`` is the number of rows that were skipped on opening. ``first_problem`` is the
    reason for the first of them.
    """

    malformed: int
    first_problem: str

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Row: ...
    def where(self, i: int, /) -> str: ...


def look_up(row: Row, name: str, absent: object = None) -> Any:
    """Return the column ``name`` of ``row``.

    Dots select nested columns, unless the row has a column with the dotted name itself.

    Args:
        row: the row.
        name: name of the column.
        absent: the value to return if the column is missing.
    """
    if name in row:
        return row[name]
    path = name.split(".")
    value: Any = row.peek(path[0]) if isinstance(row, RecordedRow) else row.get(path[0])
    for part in path[1:]:
        if not isinstance(value, Mapping) or part not in value:
            return absent
        value = value[part]
    if len(path) == 1:
        return absent
    if isinstance(row, RecordedRow):
        row.note_inside(path)
    return value


def named_column(row: Row, name: str, what: str, where: str) -> Any:
    """Return the column ``name`` that ``data.columns.<what>`` selects.

    Args:
        row: the row.
        name: name of the column.
        what: name of the setting.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the row has no such column. The message gives the nearest name.
    """
    value = look_up(row, name, ABSENT)
    if value is ABSENT:
        hint = did_you_mean(name, row)
        have = ", ".join(row) or "nothing"
        problem = f"no column {name!r} (data.columns.{what})"
        raise MalformedRow(f"{where}: {problem}; the row has: {have}{hint}")
    return value


def check_unicode(text: str, where: str) -> None:
    """Raise ``MalformedRow`` for a text with half of a surrogate pair, which JSON can spell."""
    if not is_unicode(text):
        problem = "a text has half of a surrogate pair, which is no character"
        raise MalformedRow(f"{where}: {problem}; leave it out")


def as_row(value: object, where: str) -> Row:
    """Return ``value`` unchanged. Raises ``MalformedRow`` unless it is a dictionary."""
    if not isinstance(value, Mapping):
        raise MalformedRow(
            f"{where}: a row must be a set of named values, not {type(value).__name__}"
        )
    return value


@dataclass(frozen=True, slots=True)
class TextIndex:
    """The positions of the rows of a file of JSON lines.

    Args:
        offsets: byte offset of each record, ``[n]``. A ``np.ndarray`` is mapped from a token cache.
        lines: line number of each record, ``[n]``, from 1.
        malformed: number of skipped records.
        first_problem: reason for the first skipped record.
    """

    offsets: array[int] | np.ndarray
    lines: array[int] | np.ndarray
    malformed: int = 0
    first_problem: str = ""


Indexes = dict[str, TextIndex]
"""Index of each file of JSON lines by path. Opening a file that is not in the table adds it."""

OPENERS: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
"""Functions that open compressed files, by suffix."""


def suffix_of(path: Path) -> str:
    """Return the suffix of the text format.

    It is ``.jsonl`` for both ``rows.jsonl`` and ``rows.jsonl.gz``.
    """
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


def utf8_of(path: Path) -> bytes | None:
    """Return the text of a compressed or UTF-16 file as UTF-8, or None for a plain UTF-8 file.

    Raises ``DataError`` if the file cannot be decompressed or decoded.
    """
    is_plain = path.suffix not in OPENERS
    opener = OPENERS.get(path.suffix, Path.open)
    try:
        with opener(path, "rb") as file:
            # the encoding shows in the positions of null bytes among the first four
            head = file.read(4)
            encoding = json.detect_encoding(head)
            is_utf8 = encoding.startswith("utf-8")
            if is_utf8 and is_plain:
                return None
            data = head + file.read()
        return data if is_utf8 else data.decode(encoding).encode("utf-8")
    except (EOFError, OSError, lzma.LZMAError) as error:
        # an OSError of a plain file is about the disk, not about its compression
        if is_plain and isinstance(error, OSError):
            raise
        raise DataError(f"{path}: cannot be decompressed: {error}") from None
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start}"
        raise DataError(f"{path}: not {encoding} text: {problem}") from None


class JsonLinesRows:
    """One JSON object per line, by byte offset.

    The text of a compressed or UTF-16 file is kept in memory.

    Args:
        path: the file.
        malformed: ``error`` raises for a malformed row. ``skip`` counts it.
        limit: largest number of rows. None means all rows.
        indexes: known indexes of text files. None scans the file.
    """

    def __init__(
        self, path: Path, malformed: Malformed, limit: int | None, indexes: Indexes | None = None
    ) -> None:
        self.path = path
        self._text = utf8_of(path)
        indexes = {} if indexes is None else indexes
        if str(path) not in indexes:
            indexes[str(path)] = self._scan(malformed, limit)
        index = indexes[str(path)]
        self._offsets = index.offsets
        self._lines = index.lines
        self.malformed = index.malformed
        self.first_problem = index.first_problem

    def _open(self) -> IO[bytes]:
        return self.path.open("rb") if self._text is None else io.BytesIO(self._text)

    def _scan(self, malformed: Malformed, limit: int | None) -> TextIndex:
        """Return the index of all records."""
        # Not lists: a number of a list takes four times the eight bytes.
        offsets, lines = array("Q"), array("Q")
        skipped = Skipped(malformed)
        with self._open() as file:
            if file.read(len(BOM)) != BOM:
                file.seek(0)
            line = 0
            # always true without a limit, which is None
            while len(offsets) != limit:
                offset, raw = file.tell(), file.readline()
                if not raw:
                    break
                line += 1
                try:
                    row = _json_row(raw)
                except ValueError as error:
                    skipped.add(f"{self.path}, line {line}: {error}")
                    continue
                if row is not None:
                    offsets.append(offset)
                    lines.append(line)
        return TextIndex(offsets, lines, skipped.count, skipped.first)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: int) -> Row:
        # Opened on each access: an open file cannot be pickled, nor shared by threads that seek.
        with self._open() as file:
            file.seek(self._offsets[i])
            try:
                row = _json_row(file.readline())
            except ValueError as error:
                raise MalformedRow(f"{self.where(i)}: {error}. {_CHANGED}") from None
        if row is None:
            raise MalformedRow(f"{self.where(i)}: the row is gone. {_CHANGED}")
        return row

    def where(self, i: int) -> str:
        return f"{self.path}, line {self._lines[i]}"


def _json_row(raw: bytes) -> Row | None:
    """Return the object of a line, None for a blank line.

    Raises ``ValueError`` for a malformed line.
    """
    if not raw.strip():
        return None
    try:
        row = parse_json(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
    return row


def with_way_out(error: MalformedRow) -> MalformedRow:
    """Return ``error`` with what to do about the row, unless its message says so."""
    text = str(error)
    if not _SAYS_HOW.search(text):
        error.args = (f"{text.removesuffix('.')}. Mend the row, or set data.bad_rows: skip",)
    return error


_SAYS_HOW = re.compile(r"\b(data|model)\.\w|\blightrft ")
"""Parts of a message that name a setting or a verb, which mend all rows."""


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 text: {error.reason} at byte {error.start}; save the file as UTF-8"


class Skipped:
    """Counts malformed rows of a source, or raises ``MalformedRow`` for the first of them."""

    def __init__(self, malformed: Malformed) -> None:
        self.count = 0
        self.first = ""
        self._malformed = malformed

    def add(self, problem: str) -> None:
        """Count a row, or raise ``MalformedRow`` under ``malformed: error``."""
        if self._malformed == "error":
            raise with_way_out(MalformedRow(problem)) from None
        self.count += 1
        self.first = self.first or problem


class InMemoryRows:
    """Rows of a list or another random-access sequence, such as a ``datasets.Dataset``.

    Args:
        rows: the sequence.
        name: name of the table, for messages.
        malformed: number of rows that were skipped before.
        first_problem: reason for the first skipped row.
    """

    def __init__(
        self, rows: Sequence[object], name: str, malformed: int = 0, first_problem: str = ""
    ) -> None:
        self.rows = rows
        self.name = name
        self.malformed = malformed
        self.first_problem = first_problem

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        return as_row(self.rows[i], self.where(i))

    def where(self, i: int) -> str:
        return f"{self.name}, row {i + 1}"


class TableRows(InMemoryRows):
    """Rows of a table with typed columns, such as a ``datasets.Dataset`` or a parquet file.

    A table gives each record in a column the fields of all rows, with null for those of other rows.
    These nulls are removed at every depth.
    """

    def __getitem__(self, i: int) -> Row:
        row = super().__getitem__(i)
        return {name: without_nulls(value) for name, value in row.items()}


def without_nulls(value: Any) -> Any:
    """Return ``value`` without the null fields of its records, at every depth.

    A record of ``bytes`` and ``path``, which holds an image or a sound, is returned unchanged.
    """
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:
            return value
        return {k: without_nulls(inner) for k, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        first = next((inner for inner in value if inner is not None), None)
        # A list of numbers may be long, and all of its items have one type.
        is_nested = isinstance(first, Mapping | list | tuple)
        return [without_nulls(inner) for inner in value] if is_nested else value
    return value


class Csv(InMemoryRows):
    """Comma-separated values under a header line, in memory.

    Values stay text, and an empty value is None.

    Args:
        path: the file.
        malformed: ``error`` raises for a malformed row. ``skip`` counts it.
        limit: largest number of rows. None means all rows.
    """

    def __init__(self, path: Path, malformed: Malformed, limit: int | None) -> None:
        # The default limit of the csv module (128 KiB) is shorter than some documents.
        csv.field_size_limit(sys.maxsize)
        text = utf8_of(path)
        data = path.read_bytes() if text is None else text
        lines = io.BytesIO(data.removeprefix(BOM)).readlines()
        line, names = self._header(path, lines)
        rows: list[Row] = []
        self.lines: list[int] = []
        skipped = Skipped(malformed)
        while line < len(lines) and len(rows) != limit:
            try:
                used, values = _csv_record(lines, line)
                if values and len(values) != len(names):
                    raise ValueError(f"{len(values)} values under a header of {len(names)}")
            except ValueError as error:
                skipped.add(f"{path}, line {line + 1}: {error}")
                # an open quote takes in all lines after it, so go on with the next line
                used, values = 1, []
            if values:
                rows.append({name: value or None for name, value in zip(names, values)})
                self.lines.append(line + 1)
            line += used
        super().__init__(rows, str(path), skipped.count, skipped.first)

    def where(self, i: int) -> str:
        return f"{self.name}, line {self.lines[i]}"

    @staticmethod
    def _header(path: Path, lines: list[bytes]) -> tuple[int, list[str]]:
        """Return the number of lines of the header, and its names."""
        try:
            used, names = _csv_record(lines, 0)
        except ValueError as error:
            raise DataError(f"{path}, line 1: {error}") from None
        doubled = sorted(name for name, count in Counter(names).items() if count > 1)
        if doubled:
            raise DataError(f"{path}, line 1: the header names {', '.join(doubled)} twice")
        if len(names) == 1 and (found := re.search(r"[;\t|]", names[0])):
            raise DataError(
                f"{path}, line 1: the header is one column, {names[0]!r}; separate columns by "
                f"commas, not by {found[0]!r}"
            )
        return used, names


def _csv_record(lines: list[bytes], first: int) -> tuple[int, list[str]]:
    """Return the number of lines of the record at line ``first``, and its values.

    Raises ``ValueError`` for a malformed record.
    """
    reader = csv.reader((lines[k].decode("utf-8") for k in range(first, len(lines))), strict=True)
    try:
        values = next(reader, [])
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from None
    return reader.line_num, values


class ConcatRows:
    """The concatenation of several tables of rows."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = list(parts)
        self.malformed = sum(part.malformed for part in self.parts)
        problems = [part.first_problem for part in self.parts]
        self.first_problem = next(filter(None, problems), "")
        # index of the first row of each part, and the number of all rows
        self._starts = list(accumulate(map(len, self.parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> Row:
        part, k = self._find(i)
        return part[k]

    def where(self, i: int) -> str:
        part, k = self._find(i)
        return part.where(k)

    def _find(self, i: int) -> tuple[Rows, int]:
        # From the right: an empty part starts where the part after it does.
        k = bisect_right(self._starts, i) - 1
        return self.parts[k], i - self._starts[k]


class LimitRows:
    """The first ``count`` rows of a table. None is all rows."""

    def __init__(self, rows: Rows, count: int | None = None) -> None:
        self.rows = rows
        self.count = count
        self.malformed = rows.malformed
        self.first_problem = rows.first_problem

    def __len__(self) -> int:
        return len(self.rows) if self.count is None else min(self.count, len(self.rows))

    def __getitem__(self, i: int) -> Row:
        return self.rows[i]

    def where(self, i: int) -> str:
        return self.rows.where(i)


class MappedRows(LimitRows):
    """Rows that a reader converts on access.

    Args:
        rows: the table to convert.
        reader: the reader.
        name: name of the reader, for messages.
        options: keyword arguments of the reader.
    """

    def __init__(
        self, rows: Rows, reader: Callable[..., Row], name: str, options: Mapping[str, object]
    ) -> None:
        super().__init__(rows)
        self.reader = reader
        self.name = name
        self.options = dict(options)

    def __getitem__(self, i: int) -> Row:
        row = recorded(self.rows[i])
        try:
            converted = self.reader(row, **self.options)
        # Before ``LookupError``, its base class: the message can name the columns.
        except KeyError as error:
            have = ", ".join(row)
            problem = f"reader {self.name!r} needs column {error}"
            raise MalformedRow(f"{self.where(i)}: {problem}; the row has: {have}") from None
        except (ValueError, TypeError, LookupError) as error:
            problem = f"reader {self.name!r} cannot read the row: {error}"
            raise MalformedRow(f"{self.where(i)}: {problem}") from error
        return row.copied(as_row(converted, f"{self.where(i)}, after reader {self.name!r}"))


READERS: Registry[Callable[..., Row]] = Registry("reader")
