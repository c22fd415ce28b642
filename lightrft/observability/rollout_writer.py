"""A background thread that writes rollouts to files.

A training step waits for the disk only if the disk is slower than the steps.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightrft.utils.atomic_files import is_disk_full, json_line, sync_folder, write_atomic
from lightrft.utils.errors import DataError, ResourceError

ExtraColumns = Mapping[str, Sequence[object]]
"""Further fields of rollouts by name, each with one entry per rollout."""


class Attached(Protocol):
    """A small file that belongs to rollouts. Its name is derived from its content."""

    @property
    def name(self) -> str: ...

    @property
    def data(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Job:
    path: Path
    rollouts: Sequence[object]
    columns: ExtraColumns
    attached: Sequence[Attached]


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rollouts of a file in the folder ``rollouts`` of a run.

    Raises:
        DataError: A line is not a rollout. The message has its number.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                _ = row["prompt"]["id"], row["prompt"]["text"], row["text"]
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{path}, line {number}: not a rollout: {line[:80]!r}") from None
            yield row


class RolloutWriter:
    """Writes each batch of rollouts to its own file.

    A file appears only when it is complete. Attached files are written once each to the folder
    ``media`` next to the folder of the rollouts.

    No batch is dropped. If a write fails, the batch stays queued and the next call raises the
    error. The call after that tries again. ``write`` blocks while ``depth`` batches are queued.

    Args:
        folder: the folder of the rollouts.
        depth: the largest number of queued batches.
    """

    def __init__(self, folder: Path, depth: int = 4) -> None:
        self.folder = folder
        self._depth = depth
        self._jobs: deque[_Job] = deque()
        self._error: BaseException | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(
        self,
        path: Path,
        rollouts: Sequence[object],
        columns: ExtraColumns,
        attached: Iterable[Attached] = (),
    ) -> None:
        """Queue one file with one line per rollout.

        The caller must not change the rollouts afterwards.

        Args:
            path: the file to write.
            rollouts: dataclasses, one per line.
            columns: further fields by name, each with one entry per rollout.
            attached: files that belong to the rollouts.

        Raises:
            ValueError: a column has another length than ``rollouts``.
            ResourceError: the disk was full during an earlier write. The batch of this call is
                queued nevertheless.
            RuntimeError: an earlier write failed otherwise. The batch of this call is queued
                nevertheless.
        """
        for name, column in columns.items():
            if len(column) != len(rollouts):
                raise ValueError(
                    f"column {name!r} has {len(column)} entries for {len(rollouts)} rollouts"
                )
        with self._changed:
            self._start()
            self._changed.wait_for(lambda: len(self._jobs) < self._depth or self._error is not None)
            self._jobs.append(_Job(path, rollouts, columns, tuple(attached)))
            self._changed.notify_all()
            # Last: the batch is queued even if an earlier one failed, so that none is lost.
            self._raise_error()

    def flush(self) -> None:
        """Wait until every file is written. Raises the error of a failed write."""
        with self._changed:
            if self._jobs and self._error is None:
                self._start()
            self._changed.wait_for(lambda: not self._jobs or self._error is not None)
            self._raise_error()

    def close(self) -> None:
        """Write all queued files and stop the thread.

        Raises the error of a failed write. The thread has stopped in this case too, and another
        call of ``close`` tries again.
        """
        try:
            self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._closing = False

    def _start(self) -> None:
        if self._thread is None and self._error is None:
            self._thread = threading.Thread(target=self._work, name="rollout writer", daemon=True)
            self._thread.start()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is None:
            return
        waiting = (
            f"{len(self._jobs)} batches of rollouts are not written yet, the first to "
            f"{self._jobs[0].path}"
        )
        if is_disk_full(error):
            raise ResourceError(
                f"the disk is full: {waiting}; free some space, or set log.rollouts_every=0"
            ) from error
        raise RuntimeError(f"{waiting}: {type(error).__name__}: {error}") from error

    def _work(self) -> None:
        """Write jobs in order until closed or until a job fails.

        After a failure, the next call starts a new thread, which retries the job.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                # stays queued until it is written, so that a failed write is retried
                job = self._jobs[0]
            try:
                # First: a file of rollouts must not name media that are not there.
                _write_attached(self.folder.parent / "media", job.attached)
                _write_file(job)
            except Exception as error:
                with self._changed:
                    self._error, self._thread = error, None
                    self._changed.notify_all()
                return
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()


def _write_attached(folder: Path, attached: Iterable[Attached]) -> None:
    for one in {a.name: a for a in attached}.values():
        if not (folder / one.name).exists():
            folder.mkdir(exist_ok=True)
            write_atomic(folder / one.name, one.data)


def _write_file(job: _Job) -> None:
    temporary = job.path.with_name(f".{job.path.name}.tmp")
    job.path.parent.mkdir(exist_ok=True)  # the user may have removed it during the run
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for i, rollout in enumerate(job.rollouts):
                line = json_line(rollout)
                extra = {name: column[i] for name, column in job.columns.items()}
                if extra:
                    # Joined as text: a merged dictionary would copy every field of the rollout.
                    line = f"{line[:-1]},{json_line(extra)[1:]}"
                file.write(line + "\n")
            # On disk before it gets its name, so that a power failure leaves no empty file.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(job.path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(job.path.parent)
