"""Files from which transformers builds the processor of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from transformers.utils import cached_file

from lightrft.config.model import ModelConfig

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
_FILE_NAME = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.[A-Za-z]\w{0,7}")
"""Matches a path in the folder of the model: no absolute path, and no part that starts with a dot.
"""


def processor_texts(config: ModelConfig) -> dict[str, str]:
    """Return the texts of the files of the model's processor, by name; none for a missing file."""
    return {name: text.decode() for name, text in _contents(config, PROCESSOR_FILES)}


def settings_files(config: ModelConfig, texts: Iterable[str]) -> dict[str, bytes]:
    """Return the files of the model that settings of its processor name, such as a font.

    Args:
        config: Settings with the path of the model.
        texts: The settings, as JSON.

    Returns:
        Contents by name. Names without a file are left out.
    """
    return dict(_contents(config, sorted(set(_named(map(json.loads, texts))))))


def files_named_in(folder: Path) -> set[str]:
    """Return the file names in the settings of the processor in ``folder``."""
    files = [folder / name for name in PROCESSOR_FILES]
    return set(_named(json.loads(file.read_bytes()) for file in files if file.is_file()))


def copy_named_files(source: Path, folder: Path) -> None:
    """Copy what the settings of the processor in ``folder`` name and ``source`` has."""
    for name in sorted(files_named_in(folder)):
        if (source / name).is_file():
            write_missing(folder / name, (source / name).read_bytes())


def write_missing(file: Path, content: bytes) -> None:
    """Write ``file`` unless it is there: its folder has files that are newer than those named."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _named(settings: object) -> Iterator[str]:
    """Yield the strings in ``settings``, at any depth, that may name a file of the model."""
    if isinstance(settings, str):
        if _FILE_NAME.fullmatch(settings):
            yield settings
    elif isinstance(settings, Mapping):
        yield from _named(settings.values())
    elif isinstance(settings, Iterable):
        for value in settings:
            yield from _named(value)


def _contents(config: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files that the model has."""
    for name in names:
        file = cached_file(
            config.path,
            name,
            revision=config.revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            yield name, Path(file).read_bytes()
