"""Containers of rows: a length, ``rows[i]`` as a dictionary, and ``where(i)`` for messages. All of them pickle.

Text files are indexed by byte offset and parsed on access, so that a large file costs eight bytes a row.
"""

from __future__ import annotations

import bz2
import csv
import difflib
import gzip
import io
import json
import lzma
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from lightrft.utils.errors import DataError

Row = Mapping[str, Any]
Malformed = Literal["error", "skip"]
ABSENT: Any = object()
"""What ``look_up`` may give for a column that is not there, where null is a value."""


class BadRow(DataError):
    """One row cannot be used; ``malformed: skip`` passes over it."""


class Rows(Protocol):
    """``malformed`` counts rows that were passed over when the container was opened, and ``first_problem`` says why the first was."""

    malformed: int
    first_problem: str

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Row: ...
    def where(self, i: int, /) -> str: ...


def look_up(row: Mapping[str, Any], name: str, absent: Any = None) -> Any:
    """The column ``name``; dots reach into nested columns unless a column has the dotted name itself."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return absent
        value = value[part]
    return value


def named_column(row: Row, name: str, what: str, where: str) -> Any:
    """The column ``name`` that ``data.columns.<what>`` asks for. Raises ``BadRow``, with the nearest name, for a row without it."""
    value = look_up(row, name, ABSENT)
    if value is ABSENT:
        near = difflib.get_close_matches(name, list(row), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        have = ", ".join(row) or "nothing"
        raise BadRow(f"{where}: no column {name!r} (data.columns.{what}); the row has: {have}{hint}")
    return value


def as_row(value: Any, where: str) -> Row:
    """``value`` itself. Raises ``BadRow`` unless it is a dictionary."""
    if not isinstance(value, Mapping):
        raise BadRow(f"{where}: a row must be a set of named values, not {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class TextIndex:
    """Where the records of a text file begin: arrays of byte ``offsets [n]`` and ``lines [n]``, and what was passed over."""

    offsets: Any
    lines: Any
    malformed: int = 0
    first_problem: str = ""


Indexes = dict[str, TextIndex]
"""Path to what is known of the file. Whoever opens a file that is not there adds it."""

OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""How compressed files are read, by the last part of their names."""


def suffix_of(path: Path) -> str:
    """The part of the name that says how the text is laid out, such as ``.jsonl``, also of ``rows.jsonl.gz``."""
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


def utf8_of(path: Path) -> bytes | None:
    """The text of a compressed or UTF-16 file as UTF-8; ``None`` for a file that can be read as it is.

    Raises ``DataError`` when it cannot be decompressed or decoded.
    """
    opener = OPENERS.get(path.suffix)
    try:
        with opener(path) if opener else path.open("rb") as file:
            head = file.read(4)
            encoding = json.detect_encoding(head)
            plain = encoding.startswith("utf-8")
            if plain and opener is None:
                return None
            data = head + file.read()
        return data if plain else data.decode(encoding).encode("utf-8")
    except (EOFError, OSError, lzma.LZMAError) as error:
        if opener is None and isinstance(error, OSError):
            raise
        raise DataError(f"{path}: cannot be decompressed: {error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not {encoding} text: {error.reason} at byte {error.start}") from None


class _TextFile:
    """Records of a text file by byte offset. A subclass says how one record is read from an open file.

    The text of a compressed or UTF-16 file is held in memory.
    """

    def __init__(self, path: Path, malformed: Malformed, limit: int | None, indexes: Indexes | None = None) -> None:
        self.path = path
        self._text = utf8_of(path)
        indexes = {} if indexes is None else indexes
        with self._open() as file:
            line = self._read_header(file)
            if str(path) not in indexes:
                indexes[str(path)] = self._scan(file, line, malformed, limit)
        index = indexes[str(path)]
        self._offsets, self._lines = index.offsets, index.lines
        self.malformed, self.first_problem = index.malformed, index.first_problem

    def _open(self) -> IO[bytes]:
        return self.path.open("rb") if self._text is None else io.BytesIO(self._text)

    def _scan(self, file: IO[bytes], line: int, malformed: Malformed, limit: int | None) -> TextIndex:
        """Find every record of ``file`` from where it stands, which is behind ``line`` lines."""
        offsets, lines = array("Q"), array("Q")
        bad, first = 0, ""
        while limit is None or len(offsets) < limit:
            offset = file.tell()
            try:
                used, row = self._read(file)
            except ValueError as error:
                problem = f"{self.path}, line {line + 1}: {error}"
                if malformed == "error":
                    raise BadRow(f"{problem}. Mend the row, or set data.malformed: skip") from None
                bad, first = bad + 1, first or problem
                file.seek(offset)
                used, row = len(file.readline()) > 0, None
            if not used:
                break
            if row is not None:
                offsets.append(offset)
                lines.append(line + 1)
            line += used
        return TextIndex(offsets, lines, bad, first)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: int) -> Row:
        with self._open() as file:
            file.seek(self._offsets[i])
            try:
                row = self._read(file)[1]
            except ValueError as error:
                raise BadRow(f"{self.where(i)}: {error}. Has the file changed since it was opened?") from None
        if row is None:
            raise BadRow(f"{self.where(i)}: the row is gone. Has the file changed since it was opened?")
        return row

    def where(self, i: int) -> str:
        return f"{self.path}, line {self._lines[i]}"

    def _read_header(self, file: IO[bytes]) -> int:
        """Go to the first record; the number of lines before it."""
        if file.read(3) != b"\xef\xbb\xbf":
            file.seek(0)
        return 0

    def _read(self, file: IO[bytes]) -> tuple[int, Row | None]:
        """Lines used (0 at the end) and the record there, None for a blank line. Raises ``ValueError`` for a bad one."""
        raise NotImplementedError


class JsonLines(_TextFile):
    """One JSON object a line."""

    def _read(self, file: IO[bytes]) -> tuple[int, Row | None]:
        raw = file.readline()
        if not raw.strip():
            return (1 if raw else 0), None
        try:
            row = json.loads(raw)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
        if not isinstance(row, dict):
            raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
        return 1, row


class Csv(_TextFile):
    """Comma-separated values under a header line. Values stay text as written; an empty one is None."""

    def __init__(self, path: Path, malformed: Malformed, limit: int | None, indexes: Indexes | None = None) -> None:
        self._names: list[str] = []
        csv.field_size_limit(sys.maxsize)  # the library's own limit is shorter than many a document
        super().__init__(path, malformed, limit, indexes)

    def _read_header(self, file: IO[bytes]) -> int:
        super()._read_header(file)
        try:
            used, self._names = self._record(file)
        except ValueError as error:
            raise DataError(f"{self.path}, line 1: {error}") from None
        doubled = {n for n in self._names if self._names.count(n) > 1}
        if doubled:
            raise DataError(f"{self.path}, line 1: the header names {', '.join(sorted(doubled))} twice")
        return used

    def _read(self, file: IO[bytes]) -> tuple[int, Row | None]:
        used, values = self._record(file)
        if not values:
            return used, None
        if len(values) != len(self._names):
            raise ValueError(f"{len(values)} values under a header of {len(self._names)}")
        return used, {name: value or None for name, value in zip(self._names, values)}

    def _record(self, file: IO[bytes]) -> tuple[int, list[str]]:
        used = 0

        def lines() -> Iterator[str]:
            nonlocal used
            while raw := file.readline():
                used += 1
                yield raw.decode("utf-8")

        try:
            values = next(csv.reader(lines(), strict=True), [])
        except csv.Error as error:
            raise ValueError(f"not CSV: {error}") from None
        return used, values


class Listed:
    """Rows that are at hand: a list, or any sequence with random access, such as a ``datasets.Dataset``."""

    def __init__(self, rows: Any, name: str, malformed: int = 0, first_problem: str = "") -> None:
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


class Joined:
    """Containers one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = list(parts)
        self.malformed = sum(p.malformed for p in self.parts)
        self.first_problem = next((p.first_problem for p in self.parts if p.first_problem), "")
        self._ends = [sum(len(p) for p in self.parts[: k + 1]) for k in range(len(self.parts))]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> Row:
        part, k = self._find(i)
        return part[k]

    def where(self, i: int) -> str:
        part, k = self._find(i)
        return part.where(k)

    def _find(self, i: int) -> tuple[Rows, int]:
        k = bisect_right(self._ends, i)
        return self.parts[k], i - (self._ends[k - 1] if k else 0)


class First:
    """The first ``count`` rows of a container."""

    def __init__(self, rows: Rows, count: int) -> None:
        self.rows = rows
        self.count = count
        self.malformed = rows.malformed
        self.first_problem = rows.first_problem

    def __len__(self) -> int:
        return min(self.count, len(self.rows))

    def __getitem__(self, i: int) -> Row:
        return self.rows[i]

    def where(self, i: int) -> str:
        return self.rows.where(i)


class Converted:
    """Rows passed through a reader on access."""

    def __init__(self, rows: Rows, reader: Callable[..., Row], name: str, options: Mapping[str, Any]) -> None:
        self.rows = rows
        self.reader = reader
        self.name = name
        self.options = dict(options)
        self.malformed = rows.malformed
        self.first_problem = rows.first_problem

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        row = self.rows[i]
        try:
            converted = self.reader(row, **self.options)
        except KeyError as error:
            have = ", ".join(row)
            raise BadRow(f"{self.where(i)}: reader {self.name!r} needs column {error}; the row has: {have}") from None
        except (ValueError, TypeError, LookupError) as error:
            raise BadRow(f"{self.where(i)}: reader {self.name!r} cannot read the row: {error}") from error
        return as_row(converted, f"{self.where(i)}, after reader {self.name!r}")

    def where(self, i: int) -> str:
        return self.rows.where(i)
