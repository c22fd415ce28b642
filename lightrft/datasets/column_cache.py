"""A cache of columns on disk, such as token ids. The next start maps them into memory instead of
computing them again.

An entry is one Arrow file: a row of lists, followed by a digest of all bytes before it. It is
written under a temporary name and then renamed, so an interrupted write leaves no partial entry. An
entry that cannot be read is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from lightrft.utils.errors import first_line

_log = logging.getLogger(__name__)
DIGEST_BYTES = 32
NAMES, FACTS = "names", b"lightrft"


class Names(Sequence[str]):
    """The strings of an Arrow array as a sequence."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[str]: ...

    def __getitem__(self, i: int | slice) -> str | Sequence[str]:
        return Names(self._array[i]) if isinstance(i, slice) else self._array[i].as_py()

    def __iter__(self) -> Iterator[str]:
        return iter(self._array.to_pylist())


@dataclass(frozen=True, slots=True)
class Entry:
    """The stored content of a dataset.

    Args:
        columns: arrays of numbers by name.
        names: names of the stored examples or prompts.
        facts: further values that JSON can express.
    """

    columns: Mapping[str, np.ndarray]
    names: Sequence[str]
    facts: Mapping[str, Any] = field(default_factory=dict)


class ColumnCache:
    """The entry at ``path``, which may not exist yet.

    Args:
        path: file of the entry.
        setting: the setting that names its folder, for messages.
    """

    def __init__(self, path: Path, setting: str) -> None:
        self.path = path
        self.setting = setting

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock the entry, so that only one process builds it.

        The system releases the lock of a killed process. Where the folder or its file system
        supports no lock, several processes may build the same entry.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.with_suffix(".lock").open("wb")
        except OSError:
            yield
            return
        with file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self) -> Entry | None:
        """Return the entry, mapped into memory.

        Returns None if there is no entry, or if it is damaged. Damage is logged.
        """
        import pyarrow as pa

        if not self.path.is_file():
            return None
        try:
            whole = pa.memory_map(str(self.path)).read_buffer()
            body = whole.slice(0, max(0, whole.size - DIGEST_BYTES))
            if _digest(body) != whole.slice(body.size).to_pybytes():
                raise ValueError("its digest does not match its content")
            table = pa.ipc.open_file(body).read_all()
            lists = {name: table.column(name).chunk(0) for name in table.column_names}
            names = Names(lists.pop(NAMES).values)
            # Without a copy: a column stays in its file, shared by all ranks of the machine.
            columns = {
                name: found.values.to_numpy(zero_copy_only=True) for name, found in lists.items()
            }
            return Entry(columns, names, json.loads(table.schema.metadata[FACTS]))
        except (OSError, ValueError, KeyError, IndexError, pa.ArrowException) as error:
            _log.warning(
                "%s: %s is damaged and is built again: %s",
                self.setting,
                self.path,
                first_line(error),
            )
            return None

    def write(self, entry: Entry) -> None:
        """Store ``entry`` atomically.

        A failure is logged and not raised, because the next start can compute the entry again.
        """
        import pyarrow as pa

        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        arrays = {name: pa.array(column) for name, column in entry.columns.items()}
        arrays[NAMES] = pa.array(list(entry.names), pa.large_string())
        # One row of lists, because the columns of a table must have one length. Large lists have
        # 64-bit offsets: tokens may be more than 2**31.
        rows = {
            name: pa.LargeListArray.from_arrays(pa.array([0, len(a)], pa.int64()), a)
            for name, a in arrays.items()
        }
        table = pa.table(rows).replace_schema_metadata({FACTS: json.dumps(dict(entry.facts))})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # left by a killed process: this one has the lock, so no other is writing
            for left in self.path.parent.glob(f".{self.path.name}.*.tmp"):
                left.unlink(missing_ok=True)
            with temporary.open("wb") as file:
                with pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
                file.flush()
                # maps the flushed file, so the digest takes no second copy in memory
                file.write(_digest(pa.memory_map(str(temporary)).read_buffer()))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            _log.warning(
                "%s: %s cannot be written, so the next start computes it again: %s",
                self.setting,
                self.path,
                error,
            )
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
