"""The file of the scores of an evaluation, from which a stopped evaluation resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from lightrft.config.model import ModelConfig
from lightrft.utils.atomic_files import json_line
from lightrft.utils.errors import DataError

log = logging.getLogger(__name__)

RESULTS = "results.jsonl"
"""File of a run folder with the scores of each response."""

Shown = dict[str, Any]
"""A value that JSON can express."""


class ScoredRow(Protocol):
    """A dataclass with the scores of a row, and the place of the row in its data set."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def index(self) -> int:
        """Return the place of the row in its data set."""
        ...


R = TypeVar("R", bound=ScoredRow)


class ResultsFile(Generic[R]):
    """Scored rows on disk, so that a stopped evaluation resumes after the last batch.

    The first line identifies data and model. If they have changed, the file begins again. An
    incomplete last batch is removed, since rounding depends on the rows of a batch.

    Args:
        path: The file.
        read: Reads the fields of a line as a row, see ``read_line``.
        identity: What identifies data and model.
        batch_size: Number of rows of a batch.
        total: Number of rows of the data set.

    Attributes:
        rows: The scored rows, in the order of the data set.
        done: Number of rows that are scored.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Shown], R],
        identity: Mapping[str, str],
        batch_size: int,
        total: int,
    ) -> None:
        self._file = path.open("a+b")
        head = json_line({"of": {**identity, "batch_size": batch_size}}).encode() + b"\n"
        self._file.seek(0)
        end = len(head) if self._file.readline() == head else 0
        found: list[tuple[int, R]] = []
        for raw in self._file if end else ():
            if not raw.endswith(b"\n"):
                break
            found.append((len(raw), read_line(raw, path, read)[0]))
        seen = found[-1][1].index + 1 if found else 0
        self.done = seen if seen == total else seen - seen % batch_size
        kept = [(size, row) for size, row in found if row.index < self.done]
        self.rows = [row for _, row in kept]
        if self.done:
            log.warning("%d of %d rows were scored before", self.done, total)
        self._file.truncate(end + sum(size for size, _ in kept))
        if not end:
            self._file.write(head)

    def add(self, row: R, texts: Shown) -> None:
        """Write a scored row with its texts."""
        self.rows.append(row)
        self._file.write(json_line({**asdict(row), **texts}).encode() + b"\n")

    def flush(self) -> None:
        """Pass all lines to the system, so that a killed process does not lose them."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_line(raw: bytes, path: Path, read: Callable[[Shown], R]) -> tuple[R, Shown]:
    """Return the row of one line of the file ``path``, and the whole line.

    Args:
        raw: The line.
        path: The file, for messages.
        read: Reads the fields of the line.

    Raises:
        DataError: The line is damaged.
    """
    try:
        line = json.loads(raw)
        return read(line), line
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{path} is damaged: {raw[:80]!r}; set run.overwrite=true to start over"
        ) from None


def with_nan(values: Sequence[float | None]) -> list[float]:
    """Return numbers of a line. JSON has null for NaN."""
    return [float("nan") if value is None else value for value in values]


def fingerprint(model: ModelConfig, folder: str) -> str:
    """Return what changes when the files of a model folder change: names, sizes and times.

    Args:
        model: Settings of the model.
        folder: Folder of the model, or a name that is no folder.
    """
    seen = blake2b(model.model_dump_json().encode(), digest_size=12)
    path = Path(folder).expanduser()
    for file in sorted(path.glob("*")) if path.is_dir() else ():
        status = file.stat()
        seen.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return seen.hexdigest()
