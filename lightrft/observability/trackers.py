"""Trackers of metrics, one row per step.

JSON lines are always written. TensorBoard is optional, and so are ``tracking_services``.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightrft.utils.atomic_files import json_line, write_atomic
from lightrft.utils.errors import DataError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)
Row = Mapping[str, float | int | str]
"""The metrics of one step by name, with ``step`` and ``phase``."""
ReadRow = dict[str, Any]
"""A row that was read from a file. A metric may be None there, and ``step`` is a number."""
Sample = Mapping[str, str | float]
"""A response to show, by column: prompt, label, which of its prompt's, reward, terms, response."""
Summary = dict[str, Any]
"""The content of ``summary.json``: values that JSON can hold, by name."""


class Tracker(Protocol):
    """A destination for rows of metrics, and for samples of responses.

    ``lost`` counts rows that it did not get.
    """

    name: str

    @property
    def lost(self) -> int:
        """See the class."""
        ...

    def log(self, row: Row, samples: Sequence[Sample] = ()) -> None:
        """Record one row. It has ``step``, and ``phase`` if the run has several phases."""
        ...

    def close(self) -> None: ...


class JsonLinesTracker:
    """The file ``metrics.jsonl`` with one object per step of each phase, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path)
        data = path.read_bytes() if path.exists() else b""
        # An incomplete last line must not stay, because new rows are appended.
        if data and not data.endswith(b"\n"):
            write_atomic(path, data[: data.rfind(b"\n") + 1])
        self._last = self.last_steps()
        self._warned: set[str] = set()
        self._file = path.open("a", encoding="utf-8")

    def rewind(self, step: int, phase: str = "") -> None:
        """Remove the rows of ``phase`` after ``step``, and every row after the first of them."""
        for cut, row in enumerate(self.rows):
            if row.get("phase", "") == phase and row["step"] > step:
                # Rows of later phases follow, and they started from what is now taken back.
                self.rows = self.rows[:cut]
                self._last = self.last_steps()
                self._write_all()
                return

    def restore(self) -> None:
        """Write all rows again if the file was removed."""
        if not self.path.exists():
            log.warning(
                "%s was removed during the run: its %d rows are written again",
                self.path,
                len(self.rows),
            )
            self._write_all()

    def _write_all(self) -> None:
        self._file.close()
        write_atomic(self.path, "".join(json_line(row) + "\n" for row in self.rows))
        self._file = self.path.open("a", encoding="utf-8")

    def last_steps(self) -> dict[str, int]:
        """Return the last step of each phase."""
        return {row.get("phase", ""): row["step"] for row in self.rows}

    def log(self, row: Row) -> None:
        """Append one row.

        Raises ``ValueError`` if its step does not come after the last step of its phase.
        """
        phase = str(row.get("phase", ""))
        last = self._last.get(phase)
        step = int(row["step"])
        if last is not None and step <= last:
            raise ValueError(f"step {step} of phase {phase!r} comes after step {last}")
        odd = set()
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                odd.add(name)
        odd -= self._warned
        if odd:
            self._warned |= odd
            log.warning("step %s: not finite, written as null: %s", step, ", ".join(sorted(odd)))
        self.restore()
        self._file.write(json_line(row) + "\n")
        # another process may follow the file, and a killed process loses no finished step
        self._file.flush()
        self.rows.append(dict(row))
        self._last[phase] = step

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files under ``folder``, one TensorBoard run per phase.

    ``lost`` counts rows that could not be written. After the first loss no further row is written,
    because ``metrics.jsonl`` has them all.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, last: Mapping[str, int], shown: Mapping[str, int]) -> None:
        """Hide the events after step ``last[phase]`` that an earlier process wrote.

        Args:
            folder: the folder of the event files.
            last: the last step of each phase that stays.
            shown: the last step of each phase that an earlier process wrote. TensorBoard cannot
                hide texts, so those of earlier steps are not repeated.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder = folder
        self._last = dict(last)
        self._shown = dict(shown)
        self._writers: dict[str, SummaryWriter] = {}
        self.lost = 0
        self._hook = threading.excepthook
        threading.excepthook = self._on_thread_error

    def _on_thread_error(self, told: threading.ExceptHookArgs) -> None:
        """Suppress the traceback of TensorBoard's writer thread.

        The next call raises its error again.
        """
        of_tensorboard = type(told.thread).__module__.startswith("tensorboard.")
        if not of_tensorboard or not isinstance(told.exc_value, OSError):
            self._hook(told)

    def log(self, row: Row, samples: Sequence[Sample] = ()) -> None:
        """Record one row, and ``samples`` as text."""
        if not self.lost:
            try:
                self._log(row, samples)
                return
            except OSError as error:
                log.warning(
                    "TensorBoard events end before step %s (%s); metrics.jsonl has every step",
                    row["step"],
                    error,
                )
        self.lost += 1

    def _log(self, row: Row, samples: Sequence[Sample]) -> None:
        phase, step = str(row.get("phase", "")), int(row["step"])
        if phase not in self._writers:
            # TensorBoard appends: it must hide the events of steps that are repeated.
            purge = self._last.get(phase, -1) + 1
            self._writers[phase] = self._make(
                str(self._folder / phase), purge_step=purge, flush_secs=10
            )
        for name, value in row.items():
            if name != "step" and not isinstance(value, str):
                self._writers[phase].add_scalar(name, value, step)
        if samples and step > self._shown.get(phase, -1):
            text = "\n\n".join(map(sample_text, samples))
            self._writers[phase].add_text("samples", text, step)

    def close(self) -> None:
        for writer in self._writers.values():
            try:
                writer.close()
            except OSError as error:
                log.warning(
                    "the last TensorBoard events are not written (%s); metrics.jsonl has every "
                    "step",
                    error,
                )
        # Another hook may have been put on top, which must stay.
        if threading.excepthook == self._on_thread_error:
            threading.excepthook = self._hook


def sample_text(sample: Sample) -> str:
    """Return a sample as indented lines, which Markdown shows as they are."""
    lines = [f"{name}: {value}" for name, value in sample.items()]
    return "\n".join(f"    {line}" for text in lines for line in text.split("\n"))


def read_rows(path: Path) -> list[ReadRow]:
    """Return the rows of a ``metrics.jsonl`` file.

    An incomplete last line, which a killed process leaves, is ignored.

    Raises ``DataError`` with the file and line number if another line is not a row.
    """
    text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""
    rows = []
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
            row["step"] + 0
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{path}, line {number} is not a row of metrics: {line[:80]!r}"
            ) from None
        rows.append(row)
    return rows
