"""The folder ``runs/<name>/`` with everything that a run writes.

The files of an earlier run stay until the run that replaces it has results. ``set_aside`` moves
them into a hidden folder, which is renamed once all are there. So a process may be killed at any
time, and ``recover`` knows what is left to do.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict

import yaml

from lightrft.config.base import Settings, dotted
from lightrft.config.run import LogConfig
from lightrft.config.setting_paths import made_absolute
from lightrft.observability.events import CHANGES, SettingChange
from lightrft.observability.input_digests import FILE as INPUTS
from lightrft.observability.input_digests import (
    FUNCTIONS,
    MEASURED,
    check_same_inputs,
    input_digests,
    write_inputs,
)
from lightrft.observability.logging_setup import FILE_ONLY, log_to_file, stop_logging
from lightrft.observability.redaction import MARK, check_complete, redacted
from lightrft.observability.rollout_writer import Attached, RolloutWriter
from lightrft.observability.trackers import JsonLinesTracker, Row, Sample, TensorBoard, Tracker
from lightrft.observability.tracking_services import TRACKED, follow
from lightrft.utils.atomic_files import disk_errors, json_line, write_atomic, write_json
from lightrft.utils.errors import RESUMES, ConfigError
from lightrft.utils.yaml_text import parse_yaml, tree_to_yaml

log = logging.getLogger(__name__)

LOCK = ".lock"
AT_START = "free some space, or choose another run.dir"
LATER = f"free some space, or restore the folder and the right to write there. {RESUMES}"
# This phase samples for evaluations alone, and runs before the phases that train on rollouts.
SUPERVISED = "sft"
OURS = (
    *("checkpoints", "model", "rollouts", "media", "batches", FUNCTIONS),
    *("tensorboard", "wandb", "swanlog"),
    *(
        "metrics.jsonl",
        TRACKED,
        CHANGES,
        "log.txt",
        "summary.json",
        "samples.json",
        "report.html",
        "curves.html",
        "report.md",
        "eval.yaml",
        "config.yaml",
        INPUTS,
    ),
)
"""Names of everything that a run writes. ``overwrite`` removes nothing else.

``config.yaml`` is removed last, because it marks the folder as a run folder.
"""

ROUNDS = "round_[0-9]*"
"""Folders of the rounds of a run that has several."""


class EvalSample(TypedDict):
    """A response to an eval prompt, as in ``samples.json``.

    ``attachments`` are names of files in ``media/``. ``correct`` is None without an outcome term.
    """

    prompt: str
    attachments: list[str]
    text: str
    label: str
    correct: bool | None


class RunDirectory:
    """The folder of one run, locked by one process.

    Create it with ``open`` and close it with ``with``. After resuming from a checkpoint, call
    ``rewind`` with the step of the checkpoint.

    Args:
        path: the run folder, which must exist.
        fresh: True if the run starts from scratch.
        checkpoint: the checkpoint that the user named, or None. If None and not ``fresh``, the run
            resumes from its newest checkpoint.
        lock: file descriptor of the lock. None where the system has no locks.
    """

    def __init__(
        self, path: Path, *, fresh: bool, checkpoint: Path | None, lock: int | None
    ) -> None:
        self.path = path
        self.fresh = fresh
        self.checkpoint = checkpoint
        self._lock = lock
        # The settings that differ from their defaults, by dotted name.
        self._changed: dict[str, object] = {}
        self._tensorboard = False
        self._trackers: list[Tracker] = []
        self._samples: Sequence[Sample] = ()
        self._names: set[str] = set()
        (path / "rollouts").mkdir(exist_ok=True)
        # A killed process leaves the file that it was writing.
        for torn in [*(path / "rollouts").glob(".*.jsonl.tmp"), *(path / "media").glob(".*.tmp")]:
            torn.unlink()
        self.metrics = JsonLinesTracker(path / "metrics.jsonl")
        self._found = self.metrics.last_steps()
        self._writer = RolloutWriter(path / "rollouts")
        self._log = log_to_file(path / "log.txt")

    @classmethod
    def open(
        cls,
        path: Path,
        config: Settings,
        *,
        resume: str,
        overwrite: bool,
        trackers: LogConfig | None = None,
        ignore: Collection[str] = (),
        is_evaluation: bool = False,
    ) -> RunDirectory:
        """Create the run folder or open it to resume a run.

        Args:
            path: the run folder.
            config: the settings of the run.
            resume: ``never`` refuses a folder that contains a run. ``auto`` resumes it. A path
                resumes from that checkpoint.
            overwrite: if True, replace an earlier run. It is removed once this one has results, and
                restored if this one ends before.
            trackers: the settings ``log``, which say where the metrics go besides
                ``metrics.jsonl``. None sends them nowhere.
            ignore: dotted keys, or branches of the settings, in which a resumed run may differ.
            is_evaluation: the caller notices files that have changed under the same path, and
                evaluates again. A training run is refused.

        Raises:
            ConfigError: the folder is not a run folder, is in use, must not be resumed, or has
                another config. The message lists the keys that differ. Or ``overwrite`` would
                remove what a setting names.
        """
        check_complete(config)
        checkpoint = None if resume in ("auto", "never") else Path(resume).expanduser()
        if checkpoint is not None and not checkpoint.is_dir():
            raise ConfigError(
                f"run.resume = {resume!r}: there is no such checkpoint; use auto, never, or a "
                "checkpoint's folder"
            )
        _make(path)
        with disk_errors(path, AT_START):
            lock = take_lock(path)
            try:
                unread = [name for name in ignore if name not in MEASURED]
                digests = {} if is_evaluation else input_digests(config, unread)
                fresh = _settle(path, config, resume, overwrite, ignore, digests)
                folder = cls(path, fresh=fresh, checkpoint=checkpoint, lock=lock)
            except BaseException:
                release_lock(lock)
                raise
        try:
            folder._changed = dict(dotted(redacted(config, exclude_defaults=True)))
            if trackers is not None:
                folder._tensorboard = trackers.tensorboard
                folder._trackers.extend(follow(trackers, path, redacted(config), folder.metrics))
        except BaseException:
            folder.close()
            raise
        log.info("%s %s", "started" if fresh else "opened", path)
        return folder

    def rewind(self, step: int, phase: str = "") -> int:
        """Remove everything that was written after ``step`` of ``phase``.

        This removes rows of metrics, rollouts, batches, and the output of every later phase.

        Returns:
            Number of removed steps of ``phase``.
        """
        # A thread writes the rollouts: those of removed steps must not come later.
        self._writer.flush()
        written = self.metrics.last_steps().get(phase, 0)
        self.metrics.rewind(step, phase)
        rollouts = (self.path / "rollouts").glob("*.jsonl")
        batches = (self.path / "batches").glob("step_*.*")
        for file in [*rollouts, *batches]:
            match = re.fullmatch(r"([a-z]+)_(\d+)\.(jsonl|pt)", file.name)
            of_later_phase = phase == SUPERVISED and match and match[1] != "eval"
            if match and int(match[2]) > (0 if of_later_phase else step):
                file.unlink()
                self._names.discard(file.name)
        return max(0, written - max(step, 0))

    def recall(self, row: Row) -> None:
        """Write the metrics of a saved step, unless they are already written.

        The process may have been killed between saving the checkpoint and writing the metrics.
        """
        written = self.metrics.last_steps().get(str(row["phase"]), -1)
        if written < int(row["step"]):
            self.log(row)

    def log(self, row: Row) -> None:
        """Write the metrics of one step to every tracker.

        ``row`` has ``step``, and ``phase`` if the run has several phases.
        """
        # Not in ``open``: only after ``rewind`` is it known which events are stale.
        if self._tensorboard:
            last = self.metrics.last_steps()
            self._trackers.append(TensorBoard(self.path / "tensorboard", last, self._found))
            self._tensorboard = False
        self.metrics.log(row)
        discard(self.path)
        samples, self._samples = self._samples, ()
        for tracker in self._trackers:
            tracker.log(row, samples)

    def changes(self) -> list[SettingChange]:
        """Return the changed settings of the run, as callbacks asked for them."""
        file = self.path / CHANGES
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        # A killed process leaves an incomplete last line.
        return [SettingChange(**json.loads(line)) for line in text.split("\n")[:-1]]

    def record_change(self, change: SettingChange) -> None:
        """Add a changed setting to ``changes.jsonl``, before a checkpoint that has it."""
        lines = [*self.changes(), change]
        write_atomic(self.path / CHANGES, "".join(json_line(line) + "\n" for line in lines))

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Send ``samples`` to the trackers, with the next row of metrics."""
        self._samples = samples

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[object],
        *,
        name: str = "step",
        attached: Iterable[Attached] = (),
        **columns: Sequence[object],
    ) -> None:
        """Queue ``rollouts/<name>_000012.jsonl`` with one line per rollout.

        Args:
            step: number of the step, part of the file name.
            rollouts: the rollouts. All their fields are written.
            name: first part of the file name.
            attached: files that belong to the rollouts. They are written to ``media/`` under their
                names.
            columns: further fields by name, each with one entry per rollout, e.g. ``advantages`` (a
                list of floats per rollout).

        Raises:
            ValueError: the file was already written.
            ResourceError: the disk was full during an earlier write.
            RuntimeError: an earlier write failed otherwise.
        """
        file = f"{name}_{step:06d}.jsonl"
        if file in self._names:
            raise ValueError(f"{file} was written before")
        self._names.add(file)
        self._writer.write(self.path / "rollouts" / file, rollouts, columns, attached)

    def write_summary(self, values: Mapping[str, object]) -> None:
        """Write ``summary.json`` with ``values`` and the settings that differ from their defaults.

        The settings are written under ``changed``.
        """
        summary = {**values}
        if self._log.lost:
            summary["log_lines_lost"] = self._log.lost
        for tracker in self._trackers:
            if tracker.lost:
                summary[f"{tracker.name}_rows_lost"] = tracker.lost
        summary["changed"] = self._changed
        # Redaction may miss a secret, so settings that hold one are only for the user.
        private = MARK in str(self._changed)
        write_json(self.path / "summary.json", summary, private=private)

    def write_samples(self, before: Sequence[EvalSample], after: Sequence[EvalSample]) -> None:
        """Write ``samples.json`` with responses to the same prompts before and after training."""
        write_json(self.path / "samples.json", {"before": list(before), "after": list(after)})

    @property
    def changed(self) -> Mapping[str, object]:
        """The settings that differ from their defaults, by name."""
        return self._changed

    def flush(self) -> None:
        """Wait until every rollout is on disk. Raises the error of a failed write."""
        self._writer.flush()
        self.metrics.restore()

    def close(self) -> None:
        """Write all queued files and release the lock of the folder.

        Raises the error of a failed write, after the lock is released.
        """
        try:
            self._writer.close()
        finally:
            for tracker in [*self._trackers, self.metrics]:
                tracker.close()
            stop_logging(self._log)
            recover(self.path, _has_begun(self.path), _clear)
            release_lock(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            with disk_errors(self.path, LATER):
                self.close()
            return
        log.error("ended by %s: %s", type(error).__name__, error, extra=FILE_ONLY)
        try:
            self.close()
        except Exception as second:  # the first error is the one to show
            error.add_note(f"and while closing the run folder: {second}")
        with disk_errors(self.path, LATER):
            raise error


class ReadOnlyRunDirectory(RunDirectory):
    """A run folder that writes nothing, for all ranks except rank 0."""

    def __init__(self, path: Path, *, fresh: bool, checkpoint: Path | None) -> None:
        self.path, self.fresh, self.checkpoint = path, fresh, checkpoint

    def rewind(self, step: int, phase: str = "") -> int:
        return 0

    def recall(self, row: Row) -> None:
        return

    def log(self, row: Row) -> None:
        return

    def changes(self) -> list[SettingChange]:
        return []

    def record_change(self, change: SettingChange) -> None:
        return

    def show_samples(self, samples: Sequence[Sample]) -> None:
        return

    def write_rollouts(
        self,
        step: int,
        rollouts: Sequence[object],
        *,
        name: str = "step",
        attached: Iterable[Attached] = (),
        **columns: Sequence[object],
    ) -> None:
        return

    def write_summary(self, values: Mapping[str, object]) -> None:
        return

    def write_samples(self, before: Sequence[EvalSample], after: Sequence[EvalSample]) -> None:
        return

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir/run.name: cannot make {path}: {error.strerror}; choose another"
        ) from None


def _settle(
    path: Path,
    config: Settings,
    resume: str,
    overwrite: bool,
    ignore: Collection[str],
    digests: dict[str, str],
) -> bool:
    """Write the config of this run to ``path``. Return True if the run starts from scratch."""
    recover(path, _has_begun(path), _clear)
    saved = path / "config.yaml"
    found = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if found and "config.yaml" not in found:
        raise ConfigError(
            f"{path} exists and is not a run's folder (it holds {min(found)}); choose another "
            "run.name or run.dir"
        )
    if overwrite:
        _refuse_own_inputs(path, config)
        if _has_begun(path):
            set_aside(path, _entries(path))
        else:
            _clear(path)
    elif found and _has_begun(path):
        if resume == "never":
            raise ConfigError(
                f"{path} holds a run already; set another run.name, run.resume=auto to resume it, "
                "or run.overwrite=true to start over"
            )
        newest = max(path.glob("checkpoints/step_*"), default=None)
        go_on = "" if newest is None else f" (and run.resume={newest} to go on from it)"
        problem = f"holds a run of another config; set another run.name{go_on}, "
        check_same_settings(saved, config, ignore, problem)
        ways_out = f"set another run.name{go_on}, or run.overwrite=true to start over"
        check_same_inputs(path, digests, ways_out)
    else:
        found = set()
    text = saved_yaml(config)
    write_atomic(saved, text, private=MARK in text)
    write_inputs(path, config, digests)
    return overwrite or not found


def saved_yaml(config: Settings) -> str:
    """Return the text of ``config.yaml``. Paths are absolute and secrets are redacted."""
    return tree_to_yaml(made_absolute(type(config), redacted(config)))


def _has_begun(path: Path) -> bool:
    """Return True if the folder contains results that must not be overwritten.

    A run that failed at its start leaves only its config and a log. One that was stopped there may
    leave a summary too.
    """
    kept = (
        *path.glob(ROUNDS),
        *path.glob("checkpoints/step_*"),
        *path.glob("rollouts/*.jsonl"),
        path / "metrics.jsonl",
    )
    is_any = any(entry.exists() and (entry.is_dir() or entry.stat().st_size > 0) for entry in kept)
    return is_any or _has_results(path / "summary.json")


def _has_results(summary: Path) -> bool:
    """Return False if there is no summary, or that of a run that was stopped at its start."""
    if not summary.exists():
        return False
    try:
        values = json.loads(summary.read_text(encoding="utf-8"))
    except ValueError:
        return True
    return not isinstance(values, dict) or values.get("steps") != 0 or values.get("finished", True)


def check_same_settings(
    saved: Path, config: Settings, ignore: Collection[str], problem: str
) -> None:
    """Raise ``ConfigError`` if ``config`` differs from the settings in the file ``saved``.

    Args:
        saved: a file that ``saved_yaml`` made.
        config: the settings of this run.
        ignore: dotted keys, or branches of the settings, that may differ.
        problem: the message after the name of the folder, up to the ways out that all runs have.
    """
    try:
        old = dict(dotted(parse_yaml(saved.read_text(encoding="utf-8")) or {}))
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(f"{saved} is not YAML: {error}; choose another run.name") from None
    new = dict(dotted(parse_yaml(saved_yaml(config))))
    missing = object()  # None is a value of a setting
    differing = []
    # A dictionary keeps the order of the file, which a set would lose.
    for key in dict.fromkeys([*old, *new]):
        before, now = old.get(key, missing), new.get(key, missing)
        ignored = any(key == name or key.startswith(f"{name}.") for name in ignore)
        if before != now and not ignored:
            was, is_now = ("not set" if v is missing else repr(v) for v in (before, now))
            differing.append(f"  {key}: {was} in the folder, {is_now} now")
    if differing:
        raise ConfigError(
            f"{saved.parent} {problem}run.overwrite=true to start over, or give the same "
            "settings. They differ in:\n" + "\n".join(differing)
        )


def _refuse_own_inputs(path: Path, config: Settings) -> None:
    """Raise ``ConfigError`` if a setting of ``config`` names a file in the run folder ``path``."""
    # made_absolute follows no links
    folders = {str(path.resolve()), str(path.absolute())}
    for key, value in dotted(made_absolute(type(config), redacted(config, exclude_defaults=True))):
        if folders.intersection(_folders_above(value)):
            raise ConfigError(
                f"run.overwrite = true would remove what {key} names, which is in {path}; choose "
                "another run.name, or copy it to another folder"
            )


def _folders_above(value: object) -> Iterator[str]:
    """Yield the folders that contain a path, or the paths in a list or table."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        yield from map(str, Path(value).parents)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _folders_above(one)


def _entries(path: Path) -> list[Path]:
    """Return the paths of everything that a run in ``path`` writes."""
    return [*path.glob(ROUNDS), *(path / name for name in OURS)]


def _clear(path: Path) -> None:
    """Remove the files of an earlier run and no other file."""
    for entry in _entries(path):
        # ``rmtree`` refuses a link, and what it points to may be of other runs.
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


_LOCKED: dict[int, Path] = {}
"""Folders that this process has locked, by file descriptor."""


def take_lock(path: Path) -> int | None:
    """Lock the folder against other processes, where the system supports it.

    The lock ends with the process, or with ``release_lock``. Returns None without locks. Raises
    ``ConfigError`` if another process has the lock.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        return None
    # A lock of the system does not keep the same process out, and ends when it closes the file.
    if path.resolve() in _LOCKED.values():
        raise ConfigError(
            f"{path} is in use by a run of this process; let it end first, or choose another name"
        )
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Unlike ``flock``, this lock is not inherited by a forked worker that outlives the run.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 20).decode("ascii", "replace").strip()
        os.close(handle)
        raise ConfigError(
            f"{path} is in use by process {holder or 'unknown'}; stop it, or choose another name"
        ) from None
    # The process id is only for the message. The lock itself is what counts.
    os.truncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    _LOCKED[handle] = path.resolve()
    return handle


def release_lock(lock: int | None) -> None:
    """Release a lock of ``take_lock``."""
    if lock is not None:
        _LOCKED.pop(lock, None)
        os.close(lock)


_MOVING, _KEPT = ".replacing", ".replaced"


def set_aside(path: Path, entries: Iterable[Path]) -> None:
    """Move ``entries`` of the run folder ``path`` into a hidden folder in it."""
    moving = path / _MOVING
    moving.mkdir()
    for entry in entries:
        if entry.exists() or entry.is_symlink():
            entry.rename(moving / entry.name)
    moving.rename(path / _KEPT)


def recover(path: Path, has_begun: bool, clear: Callable[[Path], None]) -> None:
    """Restore the earlier run in ``path`` if the run that replaced it has no results.

    Args:
        path: A run folder.
        has_begun: The folder has results of the later run.
        clear: Removes the files of the later run.
    """
    if has_begun:
        discard(path)
    moving, kept = path / _MOVING, path / _KEPT
    if kept.exists():
        clear(path)
        kept.rename(moving)
        log.warning(
            "%s: the run that was to replace the earlier one ended before its first step; the "
            "earlier one is back",
            path,
        )
    if moving.exists():
        for entry in list(moving.iterdir()):
            entry.rename(path / entry.name)
        moving.rmdir()


def discard(path: Path) -> None:
    """Remove the earlier run that ``path`` keeps."""
    if (path / _KEPT).exists():
        shutil.rmtree(path / _KEPT)
