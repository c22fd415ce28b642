"""Checkpoints that are whole or not there, kept by number and by merit, and checked before they are trusted."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightrft.strategy.manifest import MANIFEST, Manifest, digest_file, read_manifest, verify, write_manifest
from lightrft.utils.atomic_files import human_bytes, is_disk_full, sync_folder
from lightrft.utils.errors import CheckpointError, DamagedError, ResourceError
from lightrft.utils.state_io import load_state, save_state

__all__ = ["CheckpointStore", "DiskFullError", "Manifest", "load_state", "read_manifest", "save_state", "verify"]

log = logging.getLogger(__name__)

WRITING = ".writing"  # marks a folder as ours from its first moment until its manifest is there
FINAL, TEMPORARY, REPLACED = "step_", ".writing_step_", ".replaced_step_"
DAMAGED = "damaged_"
"""Put before the name of a folder that is moved aside."""


class DiskFullError(ResourceError):
    """A checkpoint did not fit; nothing of it is left and earlier ones are intact. Sizes in bytes, where they are known."""

    shared_by_ranks = True

    def __init__(self, message: str, needed: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


class CheckpointStore:
    """``step_000120`` folders under ``folder``: the newest ``keep`` of them and the best one.

    ``best`` names the metric that the best has the largest value of, or, with a minus in front, the smallest.
    Folders that this class did not write are never touched. ``failures`` counts saves that did not fit on the disk.
    """

    def __init__(self, folder: Path, keep: int, best: str | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
        self.folder = folder
        self.keep = keep
        self._best_name = best.lstrip("-") if best else None
        self._best_sign = -1.0 if best and best.startswith("-") else 1.0
        self.failures = 0

    @contextmanager
    def writing(
        self,
        step: int,
        about: Mapping[str, Any] | None = None,
        metric: float | None = None,
        at_work: Callable[[], None] = lambda: None,
    ) -> Generator[Path]:
        """A temporary folder to fill; it becomes the checkpoint of ``step`` when the body ends, and vanishes when it raises.

        ``about``: JSON values that ``verify`` will compare; ``metric``: the value of the store's ``best``; ``at_work`` is called between
        parts of the files, which are read once more at the end.
        A folder of that name that is not an intact checkpoint is moved aside. Raises ``DiskFullError`` when it does not fit.
        """
        final = self.folder / f"{FINAL}{step:06d}"
        temporary = self.folder / f"{TEMPORARY}{step:06d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            temporary = _free_name(temporary)
            temporary.mkdir()
            (temporary / WRITING).touch()
            yield temporary
            metrics = {self._best_name: float(metric)} if self._best_name and metric is not None else {}
            self._seal(temporary, Manifest(step, {}, dict(about or {}), metrics), at_work)
            if os.path.lexists(final) and (final.is_symlink() or read_manifest(final) is None):
                log.warning("%s is not an intact checkpoint: it is moved to %s", final, _move_aside(final))
            self._publish(temporary, final)
        except BaseException as error:
            reached, full = _folder_bytes(temporary), isinstance(error, Exception) and self._is_full(error)
            if temporary.exists():
                _empty(temporary)
                _remove(temporary)
            if full:
                self.failures += 1
                raise self._disk_full(final, reached) from error
            raise
        self._rotate()

    def steps(self) -> dict[int, Path]:
        """Complete checkpoints by step, oldest first."""
        found: dict[int, Path] = {}
        for prefix in (REPLACED, FINAL):  # a final one counts before the one that it was to replace
            for path in self._folders(prefix):
                manifest = read_manifest(path)
                if manifest is not None:
                    found[manifest.step] = path
        return dict(sorted(found.items()))

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self.steps().values()), None)

    def newest_intact(
        self, about: Mapping[str, Any] | None = None, at_work: Callable[[], None] = lambda: None
    ) -> tuple[Path, Manifest] | None:
        """Find the newest checkpoint whose every file is what was saved. Damaged ones that are newer are moved aside.

        Args:
            about: Entries that the manifest must have, as in ``verify``.
            at_work: Called between parts of files.

        Returns:
            The folder and its manifest, or ``None`` when there is no checkpoint at all.

        Raises:
            CheckpointError: The newest intact one has another ``about``, or there are some and none is intact.
        """
        damaged: list[tuple[Path, DamagedError]] = []
        for path in self._by_name():
            try:
                manifest = verify(path, about, at_work)
            except DamagedError as error:
                damaged.append((path, error))
                continue
            for other, error in damaged:
                log.warning("%s. It is moved to %s; the run resumes from step %d", error, _move_aside(other), manifest.step)
            final = self.folder / f"{FINAL}{manifest.step:06d}"
            return (path if path == final else path.rename(final)), manifest
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact; repair one, or set run.overwrite=true to start from step 0. The newest: "
                f"{damaged[0][1]}"
            )
        return None

    def best(self) -> Path | None:
        """The complete checkpoint with the best metric; the older of equals."""
        return next(iter(self._ranked()), None)

    def best_intact(self, at_work: Callable[[], None] = lambda: None) -> Path | None:
        """The checkpoint with the best metric whose every file is what was saved. Damaged ones are skipped with a warning."""
        return _first_intact(self._ranked(), at_work)

    def last_intact(self, at_work: Callable[[], None] = lambda: None) -> Path | None:
        """The newest checkpoint whose every file is what was saved. Damaged ones are skipped with a warning, and stay."""
        return _first_intact(self._by_name(), at_work)

    def improves(self, metric: float | None) -> bool:
        """Tell if ``metric`` is better than that of every checkpoint here."""
        if self._best_name is None or metric is None or not math.isfinite(metric):
            return False
        best = self.best()
        held = read_manifest(best) if best is not None else None
        return held is None or self._best_sign * metric > self._best_sign * held.metrics[self._best_name]

    def discard_after(self, step: int) -> None:
        """Remove checkpoints newer than ``step``, and move aside newer folders that are not intact: other ones will be written."""
        self._sweep()
        for path in self._folders(FINAL):
            if _step_of(path) <= step:
                continue
            if read_manifest(path) is not None:
                _remove(path)
            else:
                log.warning("%s is not an intact checkpoint: it is moved to %s", path, _move_aside(path))

    def _ranked(self) -> list[Path]:
        """Complete checkpoints that have the metric, the best first."""
        scored = []
        for step, path in self.steps().items():
            manifest = read_manifest(path)
            value = manifest.metrics.get(self._best_name or "") if manifest else None
            if value is not None and math.isfinite(value):
                scored.append((-self._best_sign * value, step, path))
        return [path for *_, path in sorted(scored)]

    def _by_name(self) -> list[Path]:
        """Folders that should be checkpoints, the newest first; a final one before the one that it was to replace."""
        return sorted([*self._folders(FINAL), *self._folders(REPLACED)], key=lambda p: (-_step_of(p), p.name.startswith(".")))

    def _folders(self, prefix: str) -> list[Path]:
        if not self.folder.is_dir():
            return []
        pattern = re.compile(re.escape(prefix) + r"\d+(\.\d+)?")
        return sorted(p for p in self.folder.iterdir() if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink())

    def _sweep(self) -> None:
        """Clear away what a killed process left."""
        for path in self._folders(REPLACED):
            final = path.with_name(path.name.replace(REPLACED, FINAL))
            if read_manifest(path) is not None and not final.exists():
                path.rename(final)
        for path in [*self._folders(REPLACED), *self._folders(TEMPORARY)]:
            if read_manifest(path) is not None or (path / WRITING).exists() or not any(path.iterdir()):
                _remove(path)

    @staticmethod
    def _seal(temporary: Path, manifest: Manifest, at_work: Callable[[], None]) -> None:
        """Bring every file to disk, and write the manifest that makes the folder a checkpoint."""
        files = {}
        for path in sorted(p for p in temporary.rglob("*") if p.is_file() and p.name != WRITING):
            _sync(path)
            files[path.relative_to(temporary).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest_file(path, at_work)}
        for folder in [p for p in temporary.rglob("*") if p.is_dir()]:
            sync_folder(folder)
        write_manifest(temporary, Manifest(manifest.step, files, manifest.about, manifest.metrics))
        (temporary / WRITING).unlink()

    @staticmethod
    def _publish(temporary: Path, final: Path) -> None:
        replaced = final.with_name(final.name.replace(FINAL, REPLACED, 1))
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        sync_folder(final.parent)
        if replaced.exists():
            _remove(replaced)

    def _rotate(self) -> None:
        steps = self.steps()
        kept = {*list(steps.values())[-self.keep :], self.best()}
        for path in steps.values():
            if path not in kept:
                _remove(path)

    def _is_full(self, error: Exception) -> bool:
        """Some writers (``torch.save``) fail on a full disk with an error that does not say so."""
        vague = isinstance(error, OSError | RuntimeError) and self.folder.exists()
        return is_disk_full(error) or (vague and shutil.disk_usage(self.folder).free < 64 * 1024)

    def _disk_full(self, final: Path, reached: int) -> DiskFullError:
        last = [manifest.bytes for path in self.steps().values() if (manifest := read_manifest(path))]
        needed = max([reached, *last])
        free = shutil.disk_usage(self.folder if self.folder.exists() else final.anchor).free
        held = f"; {len(last)} earlier checkpoints there are intact" if last else ""
        size = f"It needs {'about' if last else 'more than'} {human_bytes(needed)}, and " if needed else ""
        return DiskFullError(
            f"{final} was not saved: the disk is full. {size}"
            f"{human_bytes(free)} are free{held}. Free some space, put run.dir on another disk, or lower checkpoint.keep "
            f"(now {self.keep})",
            needed,
            free,
        )


def _first_intact(paths: Iterable[Path], at_work: Callable[[], None]) -> Path | None:
    for path in paths:
        try:
            verify(path, None, at_work)
        except DamagedError as error:
            log.warning("%s; the next checkpoint stands in for it", error)
            continue
        return path
    return None


def _step_of(path: Path) -> int:
    """The step in the name of a folder."""
    return int(path.name.rpartition("_")[2].partition(".")[0])


def _move_aside(path: Path) -> Path:
    """Rename a folder, or a link, out of the way of checkpoints. Nothing of it is removed."""
    return path.rename(_free_name(path.with_name(DAMAGED + path.name.lstrip("."))))


def _sync(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.exists() else 0


def _free_name(path: Path) -> Path:
    """``path``, or the first of ``path.1``, ``path.2`` ... that nobody has."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{i}") for i in itertools.count(1)))
    return next(name for name in names if not name.exists())


def _empty(path: Path) -> None:
    """Give the space back at once: a writer that failed may keep its file open for as long as its error lives."""
    for file in path.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.name not in (MANIFEST, WRITING):
            os.truncate(file, 0)


def _remove(path: Path) -> None:
    """Remove a folder of ours: first from sight, under a temporary name, and the file that says it is ours last, so that what
    a kill leaves is neither taken for complete nor for somebody else's."""
    if not path.name.startswith(TEMPORARY):
        path = path.rename(_free_name(path.with_name(TEMPORARY + path.name.rpartition("_")[2])))
    for entry in path.iterdir():
        if entry.name in (MANIFEST, WRITING):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (path / MANIFEST).unlink(missing_ok=True)
    (path / WRITING).unlink(missing_ok=True)
    path.rmdir()
