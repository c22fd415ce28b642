"""Keep the files of an earlier run until the run that replaces it has results.

``set_aside`` moves files into a hidden folder, which is renamed once all are there. So a process
may be killed at any time, and ``recover`` knows what is left to do.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)

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
