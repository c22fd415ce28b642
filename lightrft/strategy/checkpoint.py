"""Checkpoints that are written atomically, kept by step and by metric, and verified before use."""

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

from lightrft.strategy.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    digest_file,
    read_manifest,
    verify,
    write_manifest,
)
from lightrft.utils.atomic_files import human_bytes, is_disk_full, sync_folder
from lightrft.utils.errors import CheckpointError, DamagedError, ResourceError
from lightrft.utils.state_io import load_state, save_state

__all__ = [
    "CheckpointStore",
    "DiskFullError",
    "Manifest",
    "load_state",
    "read_manifest",
    "save_state",
    "verify",
]

log = logging.getLogger(__name__)

WRITING = ".writing"  # marks a folder as ours from its creation until its manifest exists
FINAL, TEMPORARY, REPLACED = "step_", ".writing_step_", ".replaced_step_"
DAMAGED = "damaged_"
"""Prefix of the name of a folder that is moved aside."""


class DiskFullError(ResourceError):
    """A failed save: the checkpoint did not fit on the disk.

    Nothing of it remains, and earlier checkpoints are intact. ``needed`` and ``free`` are in bytes,
    0 if unknown.
    """

    shared_by_ranks = True

    def __init__(self, message: str, needed: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


class CheckpointStore:
    """The folders ``step_000120`` under ``folder``: the newest ``keep`` of them and the best one.

    Folders that this class did not write are never touched. ``failures`` counts saves that did not
    fit on the disk.

    Args:
        folder: The parent of all checkpoints.
        keep: Number of newest checkpoints to keep, at least 1.
        best: Metric of the best checkpoint: the largest value, or with a leading minus the
            smallest. ``None`` keeps none for its metric.
    """

    def __init__(self, folder: Path, keep: int, best: str | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
        self.folder = folder
        self.keep = keep
        best = best or ""
        self._best_name = best.lstrip("-")
        self._best_sign = -1.0 if best.startswith("-") else 1.0
        self.failures = 0

    @contextmanager
    def writing(
        self,
        step: int,
        about: Mapping[str, object] | None = None,
        metric: float | None = None,
        at_work: Callable[[], None] = lambda: None,
    ) -> Generator[Path]:
        """Yield a temporary folder to fill.

        It becomes the checkpoint of ``step`` when the body ends, and is removed when the body
        raises.

        A folder of the same name that is not an intact checkpoint is moved aside.

        Args:
            step: Step of the checkpoint.
            about: JSON values that ``verify`` will compare.
            metric: Value of the store's ``best``. ``None`` if unknown.
            at_work: Called between parts of the files while their digests are computed.

        Raises:
            DiskFullError: The checkpoint does not fit.
        """
        final = self.path(step)
        temporary = self.folder / f"{TEMPORARY}{step:06d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            temporary = _free_name(temporary)
            temporary.mkdir()
            (temporary / WRITING).touch()
            yield temporary
            metrics: dict[str, float] = {}
            if self._best_name and metric is not None:
                metrics[self._best_name] = float(metric)
            self._seal(temporary, Manifest(step, {}, dict(about or {}), metrics), at_work)
            if os.path.lexists(final) and (final.is_symlink() or read_manifest(final) is None):
                _reject(final)
            self._publish(temporary, final)
        except BaseException as error:
            # Both before the folder is removed, which frees the space again.
            reached = _folder_bytes(temporary)
            full = isinstance(error, Exception) and self._is_full(error)
            if temporary.exists():
                _empty(temporary)
                _remove(temporary)
            if full:
                self.failures += 1
                raise self._disk_full(final, reached) from error
            raise
        # Last: the old checkpoints go only once the new one is complete.
        self._rotate()

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of ``step``."""
        return self.folder / f"{FINAL}{step:06d}"

    def steps(self) -> dict[int, Path]:
        """Return complete checkpoints by step, oldest first."""
        return {manifest.step: path for path, manifest in self._complete()}

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, or ``None``."""
        return next(reversed(self.steps().values()), None)

    def newest_intact(
        self, about: Mapping[str, object] | None = None, at_work: Callable[[], None] = lambda: None
    ) -> tuple[Path, Manifest] | None:
        """Find the newest checkpoint whose files all match their digests.

        Newer damaged checkpoints are moved aside.

        Args:
            about: Entries that the manifest must have, as in ``verify``.
            at_work: Called between parts of files.

        Returns:
            The folder and its manifest, or ``None`` if there is no checkpoint.

        Raises:
            CheckpointError: The newest intact one has another ``about``, or there are some and none
                is intact.
        """
        damaged: list[tuple[Path, DamagedError]] = []
        for path in self._by_name():
            try:
                manifest = verify(path, about, at_work)
            except DamagedError as error:
                damaged.append((path, error))
                continue
            for other, error in damaged:
                log.warning(
                    "%s. It is moved to %s; the run resumes from step %d",
                    error,
                    _move_aside(other),
                    manifest.step,
                )
            final = self.folder / f"{FINAL}{manifest.step:06d}"
            # A process was killed between the two renames of ``_publish``.
            if path != final:
                path = path.rename(final)
            return path, manifest
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact; repair one, or set "
                f"run.overwrite=true to start from step 0. The newest: {damaged[0][1]}"
            )
        return None

    def best(self) -> Path | None:
        """Return the complete checkpoint with the best metric, or ``None``.

        Of equals, return the older.
        """
        ranked = self._ranked()
        return ranked[0][1] if ranked else None

    def best_intact(self, at_work: Callable[[], None] = lambda: None) -> Path | None:
        """Return the checkpoint with the best metric whose files all match their digests.

        Skip damaged ones with a warning.
        """
        return _first_intact([path for _, path in self._ranked()], at_work)

    def last_intact(self, at_work: Callable[[], None] = lambda: None) -> Path | None:
        """Return the newest checkpoint whose files all match their digests.

        Skip damaged ones with a warning; they stay.
        """
        return _first_intact(self._by_name(), at_work)

    def improves(self, metric: float | None) -> bool:
        """Return ``True`` if ``metric`` is better than the metric of every checkpoint here."""
        if not self._best_name or metric is None or not math.isfinite(metric):
            return False
        ranked = self._ranked()
        if not ranked:
            return True
        best_score, _ = ranked[0]
        return self._best_sign * metric > best_score

    def discard_after(self, step: int) -> None:
        """Remove checkpoints newer than ``step``, since new ones will be written.

        Newer damaged folders are moved aside.
        """
        self._sweep()
        for path in self._folders(FINAL):
            if _step_of(path) <= step:
                continue
            if read_manifest(path) is not None:
                _remove(path)
            else:
                _reject(path)

    def _complete(self) -> list[tuple[Path, Manifest]]:
        """Return complete checkpoints with their manifests, oldest first."""
        found: dict[int, tuple[Path, Manifest]] = {}
        # FINAL last: a final folder takes precedence over the one that it replaces.
        for path in [*self._folders(REPLACED), *self._folders(FINAL)]:
            manifest = read_manifest(path)
            if manifest is not None:
                found[manifest.step] = (path, manifest)
        return [found[step] for step in sorted(found)]

    def _ranked(self) -> list[tuple[float, Path]]:
        """Return complete checkpoints that have the metric, with their scores, the best first."""
        scored = []
        for path, manifest in self._complete():
            value = manifest.metrics.get(self._best_name, math.nan)
            if math.isfinite(value):
                scored.append((self._best_sign * value, path))
        # A stable sort: of equals, the older checkpoint comes first.
        return sorted(scored, key=lambda entry: -entry[0])

    def _by_name(self) -> list[Path]:
        """Return folders named as checkpoints, the newest first. A final folder comes before the
        folder that it replaces."""
        return sorted(
            [*self._folders(FINAL), *self._folders(REPLACED)],
            key=lambda p: (-_step_of(p), p.name.startswith(".")),
        )

    def _folders(self, prefix: str) -> list[Path]:
        if not self.folder.is_dir():
            return []
        pattern = re.compile(re.escape(prefix) + r"\d+(\.\d+)?")
        named = [path for path in self.folder.iterdir() if pattern.fullmatch(path.name)]
        # A link may lead to a folder of somebody else, which must not be removed.
        return sorted(path for path in named if path.is_dir() and not path.is_symlink())

    def _sweep(self) -> None:
        """Clean up after a killed process."""
        for path in self._folders(REPLACED):
            final = path.with_name(path.name.replace(REPLACED, FINAL))
            if read_manifest(path) is not None and not final.exists():
                path.rename(final)
        for path in [*self._folders(REPLACED), *self._folders(TEMPORARY)]:
            # A folder with neither mark may be another program's. An empty one lost its mark last.
            is_ours = read_manifest(path) is not None or (path / WRITING).exists()
            if is_ours or not any(path.iterdir()):
                _remove(path)

    @staticmethod
    def _seal(temporary: Path, manifest: Manifest, at_work: Callable[[], None]) -> None:
        """Sync every file to disk, and write the manifest that makes the folder a checkpoint."""
        files: dict[str, FileEntry] = {}
        paths = sorted(temporary.rglob("*"))
        for path in paths:
            if not path.is_file() or path.name == WRITING:
                continue
            # Before the manifest exists: it must not survive a power cut that the files do not.
            with path.open("r+b") as file:
                os.fsync(file.fileno())
            files[path.relative_to(temporary).as_posix()] = {
                "bytes": path.stat().st_size,
                "sha256": digest_file(path, at_work),
            }
        # After the files, since the entry of a file is part of its folder.
        for path in paths:
            if path.is_dir():
                sync_folder(path)
        write_manifest(temporary, Manifest(manifest.step, files, manifest.about, manifest.metrics))
        (temporary / WRITING).unlink()

    @staticmethod
    def _publish(temporary: Path, final: Path) -> None:
        # The old folder stays readable as REPLACED until the new one is in place, so a kill loses
        # neither.
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
        """Return ``True`` if the disk is full. Some writers (``torch.save``) fail on a full disk
        with an unspecific error."""
        vague = isinstance(error, OSError | RuntimeError) and self.folder.exists()
        return is_disk_full(error) or (vague and shutil.disk_usage(self.folder).free < 64 * 1024)

    def _disk_full(self, final: Path, reached: int) -> DiskFullError:
        last = [manifest.bytes for _, manifest in self._complete()]
        # The failed save did not reach its full size. Earlier ones tell it.
        needed = max([reached, *last])
        free = shutil.disk_usage(self.folder if self.folder.exists() else final.anchor).free
        held = f"; {len(last)} earlier checkpoints there are intact" if last else ""
        size = ""
        if needed:
            about = "about" if last else "more than"
            size = f"It needs {about} {human_bytes(needed)}, and "
        return DiskFullError(
            f"{final} was not saved: the disk is full. {size}{human_bytes(free)} are free{held}. "
            "Free some space, put run.dir on another disk, or lower checkpoint.keep (now "
            f"{self.keep})",
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
    """Return the step in a folder's name."""
    return int(path.name.rpartition("_")[2].partition(".")[0])


def _move_aside(path: Path) -> Path:
    """Rename a folder, or a link, so that it is no checkpoint any more. Nothing is removed."""
    return path.rename(_free_name(path.with_name(DAMAGED + path.name.lstrip("."))))


def _reject(path: Path) -> None:
    log.warning("%s is not an intact checkpoint: it is moved to %s", path, _move_aside(path))


def _folder_bytes(path: Path) -> int:
    if not path.exists():
        return 0
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _free_name(path: Path) -> Path:
    """Return ``path``, or the first unused name of ``path.1``, ``path.2`` ..."""
    if not path.exists():
        return path
    numbered = (path.with_name(f"{path.name}.{i}") for i in itertools.count(1))
    return next(name for name in numbered if not name.exists())


def _empty(path: Path) -> None:
    """Free the space at once: a failed writer may keep its file open for as long as its error
    exists."""
    for file in path.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.name not in (MANIFEST, WRITING):
            os.truncate(file, 0)


def _remove(path: Path) -> None:
    """Remove a folder of ours.

    It first gets a temporary name. The file that marks it as ours goes last. So after a kill, the
    rest is taken neither for a complete checkpoint nor for another program's folder.
    """
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
