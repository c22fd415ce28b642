"""Checkpoints that are whole or not there, kept by number and by merit, and checked before they are trusted."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrft.utils.errors import CheckpointError, ResourceError
from lightrft.utils.files import human_bytes, is_disk_full, sync_folder, write_atomic
from lightrft.utils.state import load_state, save_state

__all__ = ["CheckpointStore", "DiskFullError", "Manifest", "load_state", "read_manifest", "save_state", "verify"]

log = logging.getLogger(__name__)

FORMAT = "lightrft-checkpoint/1"
MANIFEST = "manifest.json"
WRITING = ".writing"  # marks a folder as ours from its first moment until its manifest is there
PART = 2**24
"""Bytes that are read at once."""
FINAL, TEMPORARY, REPLACED = "step_", ".writing_step_", ".replaced_step_"


class DiskFullError(ResourceError):
    """A checkpoint did not fit; nothing of it is left and earlier ones are intact. Sizes in bytes, where they are known."""

    shared_by_ranks = True

    def __init__(self, message: str, needed: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a complete checkpoint says of itself. ``files``: relative path to ``{"bytes", "sha256"}``; ``metrics``: the values
    by which it may be the best; ``about``: what it belongs to."""

    step: int
    files: Mapping[str, Mapping[str, Any]]
    about: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


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
        Raises ``DiskFullError`` when it does not fit, ``CheckpointError`` when a folder of that name is not a checkpoint.
        """
        final = self.folder / f"{FINAL}{step:06d}"
        if final.exists() and read_manifest(final) is None:
            raise CheckpointError(f"{final} exists and is not a checkpoint of ours; move it away")
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

    def best(self) -> Path | None:
        """The complete checkpoint with the best metric; the older of equals."""
        scored = []
        for step, path in self.steps().items():
            manifest = read_manifest(path)
            value = manifest.metrics.get(self._best_name or "") if manifest else None
            if value is not None and math.isfinite(value):
                scored.append((self._best_sign * value, -step, path))
        return max(scored)[2] if scored else None

    def discard_after(self, step: int) -> None:
        """Remove checkpoints newer than ``step``: a run that goes on from there will write others."""
        self._sweep()
        for newer, path in self.steps().items():
            if newer > step:
                _remove(path)

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
            files[path.relative_to(temporary).as_posix()] = {"bytes": path.stat().st_size, "sha256": _digest(path, at_work)}
        for folder in [p for p in temporary.rglob("*") if p.is_dir()]:
            sync_folder(folder)
        document = {
            "format": FORMAT,
            "step": manifest.step,
            "about": manifest.about,
            "metrics": manifest.metrics,
            "files": files,
        }
        write_atomic(temporary / MANIFEST, json.dumps(document, indent=1))
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
        return DiskFullError(
            f"{final} was not saved: the disk is full. It needs {'about' if last else 'more than'} {human_bytes(needed)}, and "
            f"{human_bytes(free)} are free{held}. Free some space, put run.dir on another disk, or lower run.checkpoint_keep "
            f"(now {self.keep})",
            needed,
            free,
        )


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a complete checkpoint; ``None`` for any other folder."""
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            return None
        return Manifest(int(document["step"]), document["files"], document["about"], document["metrics"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is passed over: its manifest cannot be read (%s: %s)", path, type(error).__name__, error)
        return None


def verify(path: Path, about: Mapping[str, Any] | None = None, at_work: Callable[[], None] = lambda: None) -> Manifest:
    """The manifest of the checkpoint ``path``, once every file is there, whole and unchanged. ``at_work`` is called between parts of
    files, all of which are read.

    Raises ``CheckpointError`` that names what is wrong: no checkpoint, a file that is missing, of another size or content, or
    an entry of ``about`` that differs from what was saved.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise CheckpointError(f"{path} is not a complete checkpoint (no readable {MANIFEST}); use a step_ folder of checkpoints/")
    way_out = f"move {path} away to go on from an earlier checkpoint"
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {way_out}")
        if (size := file.stat().st_size) != entry["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes, {entry['bytes']} were saved; {way_out}")
        if _digest(file, at_work) != entry["sha256"]:
            raise CheckpointError(f"{file} has the right size but not the content that was saved; {way_out}")
    expected = json.loads(json.dumps(dict(about or {})))
    differing = [
        f"  {key}: {manifest.about.get(key)!r} in the checkpoint, {value!r} here"
        for key, value in expected.items()
        if manifest.about.get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"{path} belongs to something else; give the model and settings that it was saved with, or set run.resume to "
            "another checkpoint. They differ in:\n" + "\n".join(differing)
        )
    return manifest


def _digest(path: Path, at_work: Callable[[], None]) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(PART):
            found.update(part)
            at_work()
    return found.hexdigest()


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
