"""Digests of the files that settings name, so that a resumed run notices a change under a path."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from lightrft.config.base import Settings
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import ConfigError
from lightrft.utils.peft_folder import named_base

log = logging.getLogger(__name__)

FILE, FUNCTIONS = "inputs.json", "functions"
WHOLE = 64 * 2**20
"""Size in bytes up to which a file is read as a whole. Of a larger one, blocks are read."""
BLOCKS, BLOCK = 64, 2**20
"""Number and size in bytes of the blocks of a large file, evenly spaced."""
MOST_FILES = 1000
"""Number of files of a folder that are read."""
FUNCTION = "function "
"""Start of the digest of the file of a function."""
DIGITS = 8
"""Digits of a digest in the name of the copy of such a file."""
_FUNCTION = re.compile(r"(?P<file>.+\.py):\w+")
NOT_READ = ("root", "roots", "token_file", "weights_token_file")
"""Settings of folders of media, whose files rows name, and of secrets."""
MEASURED = ("eval",)
"""Settings that may differ in a resumed run, and whose files decide what its metrics mean."""
MOST_LETTERS = 4096
"""Length of the longest path."""


def input_digests(config: Settings, ignore: Collection[str]) -> dict[str, str]:
    """Return a digest of what each path of ``config`` holds, by its dotted key.

    Names on a hub, folders of media and keys below ``ignore`` are left out.
    """
    found = {}
    for key, value in _named(config):
        if any(key == name or key.startswith(f"{name}.") for name in ignore):
            continue
        function = _FUNCTION.fullmatch(value)
        # A template may stand in place of the name of its file.
        if not value or "\n" in value or len(value) > MOST_LETTERS:
            continue
        files = list(_files(Path(function["file"] if function else value).expanduser()))
        if files:
            found[key] = f"{FUNCTION if function else ''}{digest_of(files)}"
    return found


def _named(value: object, key: str = "", is_path: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys and the values of the settings that name a path or a function."""
    if isinstance(value, Settings):
        kind = type(value)
        for name in kind.model_fields:
            named = name in (*kind.paths, *kind.functions) and name not in NOT_READ
            yield from _named(getattr(value, name), f"{key}.{name}".lstrip("."), named)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _named(each, f"{key}.{name}", is_path)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _named(each, f"{key}.{number}", is_path)
    elif is_path and isinstance(value, str):
        yield key, value


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a path: a file, a folder or a pattern."""
    places = [path] if not glob.has_magic(str(path)) else map(Path, sorted(glob.glob(str(path))))  # noqa: PTH207 a pattern may be absolute
    for place in places:
        if place.is_dir():
            below = (file for file in sorted(place.rglob("*")) if file.is_file())
            yield from (file for _, file in zip(range(MOST_FILES), below))
            with suppress(OSError, ValueError):
                # Adapters change the weights of a model in another folder.
                base, _ = named_base(place)
                yield from _files(Path(base).expanduser()) if base else ()
        elif place.is_file():
            yield place


def digest_of(files: list[Path]) -> str:
    """Return a digest of the names, sizes and contents of ``files``."""
    found = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE:
                found.update(file.read())
                continue
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                found.update(file.read(BLOCK))
    return found.hexdigest()


def check_same_inputs(path: Path, digests: dict[str, str], problem: str) -> None:
    """Compare ``digests`` with those of the run in the folder ``path``.

    A changed function is a warning: a reward may be mended between two parts of a run. So are
    changed files of ``MEASURED``, which change nothing but metrics.

    Args:
        path: the run folder. One without ``inputs.json`` is accepted.
        digests: the result of ``input_digests``.
        problem: the ways out, for the message.

    Raises:
        ConfigError: a file under the same path has changed.
    """
    try:
        before = json.loads((path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    changed = [key for key, digest in digests.items() if before.get(key, digest) != digest]
    functions = [key for key in changed if digests[key].startswith(FUNCTION)]
    for key in functions:
        log.warning("%s: the file of the function has changed since the run began", key)
    measured = [key for key in changed if key.startswith(MEASURED) and key not in functions]
    for key in measured:
        log.warning(
            "%s: its files have changed since the run began, so metrics before and after this step "
            "are of other data; set another run.name to keep them apart",
            key,
        )
    others = [key for key in changed if key not in (*functions, *measured)]
    if others:
        raise ConfigError(
            f"{path} holds a run whose inputs have changed since it began, under the same path: "
            f"{', '.join(others)}; restore them, {problem}"
        )


def write_inputs(path: Path, config: Settings, digests: dict[str, str]) -> None:
    """Write ``inputs.json`` and a copy of the file of each function to a run folder.

    The name of a copy has a digest, so that the copy of a function that changes between two parts
    of a run stays.

    Args:
        path: the run folder.
        config: the settings of the run.
        digests: the result of ``input_digests``.
    """
    write_atomic(path / FILE, json.dumps(digests, indent=1) + "\n")
    for key, value in _named(config):
        function = _FUNCTION.fullmatch(value)
        if function and key in digests:
            file = Path(function["file"]).expanduser()
            digest = digests[key].removeprefix(FUNCTION)[:DIGITS]
            (path / FUNCTIONS).mkdir(exist_ok=True)
            write_atomic(path / FUNCTIONS / f"{file.stem}-{digest}.py", file.read_bytes())
