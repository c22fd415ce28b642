"""Atomic file writes, strict JSON and disk errors.

A file is written under a temporary name and then renamed. A reader sees a complete file or none.
"""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightrft.utils.errors import ResourceError, UserError

FILE_SUFFIXES = (
    ".jsonl",
    ".json",
    ".csv",
    ".parquet",
    ".arrow",
    ".gz",
    ".bz2",
    ".xz",
    ".txt",
    ".yaml",
    ".py",
    ".safetensors",
)


_MARKS_OF_A_PATH = re.compile(
    r"""
      ^[./~]  # a start that a name on the hub, "owner/name" or "name", cannot have
    | /\Z     # a folder
    | \\      # a path of Windows
    | /.*/    # deeper than owner/name
    """,
    re.VERBOSE | re.DOTALL,
)


def is_gguf(path: str | Path) -> bool:
    """Return True if ``path`` is named as a GGUF file, the format of llama.cpp."""
    return Path(path).suffix.lower() == ".gguf"


def looks_like_path(name: str, folder: Path = Path()) -> bool:
    """Return True if ``name`` can only be a path and not a name on the hub.

    The path is relative to ``folder`` and need not exist.
    """
    if _MARKS_OF_A_PATH.search(name):
        return True
    path = folder / Path(name).expanduser()
    if "/" in name and path.parent.is_dir():
        return True
    # Close matches count, so that "data.josnl" is reported as a missing file.
    return bool(difflib.get_close_matches(path.suffix.lower(), FILE_SUFFIXES, n=1, cutoff=0.75))


def nearest_name(path: Path, pattern: str = "*") -> str:
    """Return ``; did you mean ...?`` with the name closest to ``path`` in its folder.

    Only names that match the glob ``pattern`` count. The text is empty if no name is close. Several
    paths with commas between them are shown as a list.
    """
    parts = [part.strip() for part in str(path).split(",")]
    if parts[1:] and all(Path(part).exists() for part in parts):
        return f"; a list is written [{', '.join(parts)}]"
    # ``glob`` of a folder that does not exist yields nothing.
    names = [file.name for file in path.parent.glob(pattern)]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def write_atomic(path: Path, data: str | bytes, *, private: bool = False) -> None:
    """Replace the content of ``path`` by ``data``.

    A reader sees either the old content or the new content, even after a crash.

    Args:
        path: the file to write. Its folder must exist.
        data: the new content. Text is encoded as UTF-8.
        private: if True, only the current user may read the file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            if private and hasattr(os, "fchmod"):  # not on Windows
                os.fchmod(file.fileno(), 0o600)
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            # before the rename: otherwise a crash could leave an empty file under the final name
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: object, *, private: bool = False) -> None:
    """Write ``value`` to ``path`` as indented JSON, atomically.

    Args:
        path: the file to write.
        value: a tree that ``finite`` accepts. Numbers that are not finite become ``null``.
        private: if True, only the current user may read the file.
    """
    text = json.dumps(finite(value), indent=2, ensure_ascii=False)
    write_atomic(path, text + "\n", private=private)


@contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """Yield a temporary folder to fill, and rename it to ``path`` when the body ends.

    An existing folder at ``path`` is replaced. If the body raises, the temporary folder is removed
    and ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.writing")
    replaced = path.with_name(f".{path.name}.replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process was killed between the two renames below.
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    for left in (temporary, replaced):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        # Before the rename: otherwise a power cut could leave a complete folder of empty files.
        for file in filter(Path.is_file, temporary.rglob("*")):
            with file.open("r+b") as opened:
                os.fsync(opened.fileno())
        # A rename cannot replace a folder with files in it, so the old one moves away first.
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` survive a power cut.

    Does nothing on Windows, where folders cannot be opened.
    """
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_line(value: object) -> str:
    """Return ``value`` as one line of strict JSON.

    Dataclasses become objects. A value with a method ``as_json`` becomes the result of that method.
    Numbers that are not finite become ``null``. Bytes become a text that gives their size.
    """
    encode = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return encode(value, default=_as_mapping)
    except ValueError:
        # A number that is not finite: rare, so the tree is copied only in this case.
        return encode(finite(value))


def finite(value: object) -> object:
    """Return a copy of a tree that strict JSON can express.

    Numbers that are not finite become None. Dataclasses become dictionaries.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    is_bytes = isinstance(value, bytes | bytearray)
    # Bytes are a sequence of numbers to Python, and would become a long list.
    if isinstance(value, Sequence) and not is_bytes:
        return [finite(item) for item in value]
    return finite(_as_mapping(value))


def _as_mapping(value: Any) -> object:
    # Before dataclasses, which may define the method too.
    if hasattr(value, "as_json"):
        return value.as_json()
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{human_bytes(len(value))}>"
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # arrays and tensors
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON: {value!r}")


WITHOUT_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNUSABLE = (*WITHOUT_ROOM, errno.EROFS, errno.EIO)
"""Error numbers that concern the disk itself and not one file."""
UNUSABLE_PATH = (
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)
"""Error numbers that concern one path, which another path avoids."""


@contextmanager
def disk_errors(folder: Path, way_out: str) -> Generator[None]:
    """Turn an error of the disk, or of a file below ``folder``, into ``ResourceError``.

    ``way_out`` is appended to the message and says what the user can do.
    """
    try:
        yield
    except Exception as error:
        problem = disk_problem(error, folder)
        if not problem:
            raise
        raise ResourceError(f"{folder} cannot be used ({problem}); {way_out}") from error


def disk_problem(error: BaseException, folder: Path | None = None) -> str:
    """Return a text that says why a file cannot be read or written.

    The causes and contexts of ``error`` are searched too. Some libraries give the error number only
    in their text, so the text is searched for it.

    Returns:
        The reason. Empty for a ``UserError``, and for an error that concerns neither the disk nor a
        file below ``folder``.
    """
    if isinstance(error, UserError):
        return ""
    for cause in _causes(error):
        number, name = _number_and_file(cause)
        if number is None:
            continue
        if number in UNUSABLE or _is_inside(folder, name, cause):
            return f"{os.strerror(number)}: {name}" if name else os.strerror(number)
    return ""


def path_problem(error: BaseException) -> str:
    """Return a text that says why the path that ``error`` names cannot be used, or ""."""
    number, name = _number_and_file(error)
    return f"{os.strerror(number)}: {name}" if name and number in UNUSABLE_PATH else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, then what it was raised from or during, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _number_and_file(error: BaseException) -> tuple[int | None, str]:
    """Return the error number of ``error``, or None, and the file that it names, or ""."""
    if not isinstance(error, OSError):
        return _number_in_text(error), ""
    number = error.errno or _number_in_text(error)
    # Functions that were given a file descriptor set its number in place of a name.
    if isinstance(error.filename, int | None):
        return number, ""
    return number, os.fsdecode(error.filename)


def _is_inside(folder: Path | None, name: str, error: BaseException) -> bool:
    """Return True if ``error``, which names the file ``name``, concerns a file below ``folder``."""
    if folder is None:
        return False
    if name:
        return Path(name).is_relative_to(folder)
    # Libraries that give the number in their text alone give no name.
    return _number_in_text(error) is not None


def _number_in_text(error: BaseException) -> int | None:
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def is_disk_full(error: BaseException) -> bool:
    """Return True if ``error``, or a cause of it, says that no space is left.

    The text of the error is searched too, because some libraries do not set ``errno``.
    """
    for cause in _causes(error):
        number, _ = _number_and_file(cause)
        if number in WITHOUT_ROOM or "No space left on device" in str(cause):
            return True
    return False


def human_bytes(count: float) -> str:
    """Return a number of bytes as text, e.g. ``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
