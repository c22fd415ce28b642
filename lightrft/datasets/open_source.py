"""Opening of a ``SourceConfig`` as rows.

A source is a file, a folder, a saved dataset, a hub dataset or a function.
"""

from __future__ import annotations

import dataclasses
import glob
import inspect
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightrft.config.data import SourceConfig
from lightrft.datasets import benchmarks as _benchmarks  # noqa: F401  fills READERS
from lightrft.datasets.row_tables import (
    BOM,
    OPENERS,
    READERS,
    ConcatRows,
    Csv,
    Indexes,
    InMemoryRows,
    JsonLinesRows,
    LimitRows,
    Malformed,
    MalformedRow,
    MappedRows,
    Rows,
    Skipped,
    TableRows,
    as_row,
    suffix_of,
    utf8_of,
)
from lightrft.utils.atomic_files import looks_like_path, nearest_name
from lightrft.utils.errors import ConfigError, DataError, UserError, first_line
from lightrft.utils.registry import resolve
from lightrft.utils.yaml_text import parse_json

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def open_source(
    source: SourceConfig, malformed: Malformed = "error", indexes: Indexes | None = None
) -> Rows:
    """Return the rows of ``source``, converted by its reader.

    Args:
        source: the source.
        malformed: ``error`` raises for a row that cannot be parsed. ``skip`` counts it.
        indexes: known indexes of files of JSON lines. These files are not scanned again, and new
            indexes are added. None scans all files.

    Raises:
        DataError: the source does not exist, has no rows, or has a malformed row under ``error``.
        ConfigError: the source has options that nothing reads.
    """
    rows = _open(source, malformed, indexes)
    if source.limit is not None:
        rows = LimitRows(rows, source.limit)
    if len(rows) == 0:
        skipped = f"; {rows.malformed} malformed rows were skipped" if rows.malformed else ""
        raise DataError(f"data.sources: {source.path} has no rows{skipped}; name another file")
    setting = "data.sources.reader_options"
    if source.reader is None:
        _refuse(source.reader_options, setting, "a reader; name one in data.sources.reader")
        return rows
    reader = READERS[source.reader]
    # here, so that a wrong option is an error of the setting, not of the first row
    _check_keywords(reader, source.reader_options, f"reader {source.reader!r}", setting, ({},))
    return MappedRows(rows, reader, source.reader, source.reader_options)


def source_name(source: SourceConfig) -> str:
    """Return the name of the rows of ``source`` that do not name their data source."""
    if source.name:
        return source.name
    if is_function(source.path):
        # The function's own name is often as general as ``rows``.
        where, _, _ = source.path.rpartition(":")
        return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    path = Path(source.path)
    stem = Path(path.stem).stem if path.suffix in OPENERS else path.stem
    return stem or source.path


def media_root(root: str, path: str) -> Path:
    """Return the folder of relative media paths in the source ``path``.

    It is ``root`` if that is set, else the folder of the source's own file.
    """
    if root:
        return Path(root).expanduser()
    source = Path(path).expanduser()
    is_local = source.exists() or glob.has_magic(path)
    if is_function(path) or not is_local:
        return Path()
    # the innermost folder that exists: it holds all files of a pattern
    return next(folder for folder in (source, *source.parents) if folder.is_dir())


def is_function(path: str) -> bool:
    """Return True if ``path`` has the form ``module:function`` or ``file.py:function``."""
    where, _, attribute = path.rpartition(":")
    if not where or not attribute.isidentifier():
        return False
    return "://" not in path and not Path(path).exists()


def files_of(source: SourceConfig) -> list[Path] | None:
    """Return every file of ``source`` in reading order, or None for a function or a hub dataset.

    Raises ``DataError`` if there are no files.
    """
    path = Path(source.path).expanduser()
    if is_function(source.path):
        return None
    if _is_saved(path):
        return sorted(filter(Path.is_file, path.rglob("*")))
    if path.is_dir():
        return _files_of_folder(path, source)
    if path.is_file():
        return [path]
    if glob.has_magic(source.path):
        # glob instead of Path.glob, which takes no absolute pattern
        names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        files = list(filter(Path.is_file, map(Path, names)))
        if not files:
            raise DataError(f"data.sources: no file matches {source.path}")
        return files
    # Last, because a local file or folder may have a name that a hub dataset could have too.
    if HUB_NAME.fullmatch(source.path) and not looks_like_path(source.path):
        return None
    raise DataError(f"data.sources: there is no file or folder {source.path}{nearest_name(path)}")


def is_on_hub(source: SourceConfig) -> bool:
    """Return True if the rows of ``source`` are a data set of the hub."""
    with suppress(DataError):
        return files_of(source) is None and not is_function(source.path)
    return False


def _open(source: SourceConfig, malformed: Malformed, indexes: Indexes | None) -> Rows:
    if is_function(source.path):
        return _from_function(source, malformed)
    _refuse(
        source.options,
        "data.sources.options",
        f"a function source (module:function); {source.path} is none",
    )
    path = Path(source.path).expanduser()
    files = files_of(source)
    if files is None:
        table = _load(source.path, source.path, name=source.subset, split=source.split)
        return TableRows(table, f"{source.path}[{source.split}]")
    if _is_saved(path):
        return _from_saved(path, source)
    opened = [_from_file(f, malformed, source.limit, indexes) for f in files]
    return opened[0] if path.is_file() else ConcatRows(opened)


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _files_of_folder(path: Path, source: SourceConfig) -> list[Path]:
    known = [file for file in path.rglob("*") if suffix_of(file) in SUFFIXES]
    # Sorted, so that the order of rows does not depend on the file system.
    files = sorted(filter(Path.is_file, known))
    if not files:
        wanted = f"a folder with {', '.join(SUFFIXES)} files"
        raise DataError(f"data.sources: {path} is neither a saved data set nor {wanted}")
    named = [file for file in files if _split_of(file, (source.split,))]
    if not named:
        others = {_split_of(file, SPLITS) for file in files} - {None}
        if others:
            listed = ", ".join(sorted(map(str, others)))
            problem = f"has no files of split {source.split!r}, but of: {listed}"
            raise DataError(f"data.sources: {path} {problem}")
        # no file name contains a split, so the folder is one
        named = files
    kinds = sorted({suffix_of(file) for file in named})
    if len(kinds) > 1:
        way_out = f"say which with a pattern, e.g. {path}/*{kinds[-1]}"
        raise DataError(f"data.sources: {path} mixes {' and '.join(kinds)} files; {way_out}")
    return named


def _split_of(file: Path, splits: Sequence[str]) -> str | None:
    words = re.split(r"[^a-z0-9]+", file.stem.lower())
    for split in splits:
        if split.lower() in words:
            return split
    return None


def _from_file(
    path: Path, malformed: Malformed, limit: int | None, indexes: Indexes | None
) -> Rows:
    kind = suffix_of(path)
    if kind == ".csv":
        return Csv(path, malformed, limit)
    if kind == ".jsonl":
        return JsonLinesRows(path, malformed, limit, indexes)
    if kind == ".json":
        return _from_json(path, malformed, limit, indexes)
    if path.suffix in (".parquet", ".arrow"):
        table = _load(path.suffix[1:], str(path), data_files=[str(path)], split="train")
        return TableRows(table, str(path))
    packed = f"{', '.join(OPENERS)} behind a text file's name"
    raise DataError(
        f"data.sources: {path} is not one of {', '.join(SUFFIXES)} ({packed}); write its rows as "
        ".jsonl, one JSON object a line"
    )


def _from_json(
    path: Path, malformed: Malformed, limit: int | None, indexes: Indexes | None
) -> Rows:
    """Return the rows of a list of objects, or of JSON lines in a ``.json`` file."""
    text = utf8_of(path)
    with path.open("rb") if text is None else io.BytesIO(text) as file:
        head = file.read(4096).removeprefix(BOM).lstrip()
    # JSON lines are objects, so a list can only be the whole file.
    if not head.startswith(b"["):
        return JsonLinesRows(path, malformed, limit, indexes)
    try:
        items = parse_json(path.read_bytes() if text is None else text)
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at column {error.colno}"
        raise DataError(
            f"{path}, line {error.lineno}: not JSON: {problem}. Mend that place of the file"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    return _listed(items, str(path), malformed)


def _listed(items: Iterable[object], name: str, malformed: Malformed) -> InMemoryRows:
    good = []
    skipped = Skipped(malformed)
    for i, item in enumerate(items):
        try:
            good.append(as_row(item, f"{name}, row {i + 1}"))
        except MalformedRow as error:
            skipped.add(str(error))
    return InMemoryRows(good, name, skipped.count, skipped.first)


def _from_saved(path: Path, source: SourceConfig) -> Rows:
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # the library's errors have no common class
        raise DataError(
            f"data.sources: {path} is not a readable saved data set: {first_line(error)}"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        if source.split not in saved:
            have = ", ".join(map(str, saved))
            raise DataError(f"data.sources: {path} has no split {source.split!r}; it has: {have}")
        saved = saved[source.split]
    return TableRows(_undecoded(saved), str(path))


def _undecoded(dataset: Any) -> Any:
    """Return ``dataset`` with its media as stored bytes or paths."""

    def undecoded_feature(feature: Any) -> Any:
        if isinstance(feature, dict):
            return {name: undecoded_feature(inner) for name, inner in feature.items()}
        if isinstance(feature, list):
            return [undecoded_feature(inner) for inner in feature]
        if not dataclasses.is_dataclass(feature):
            return feature
        # Decoded on access by this package, with its limits.
        if getattr(feature, "decode", False) is True:
            return dataclasses.replace(feature, decode=False)
        if hasattr(feature, "feature"):
            return dataclasses.replace(feature, feature=undecoded_feature(feature.feature))
        return feature

    for name, feature in (dataset.features or {}).items():
        plain = undecoded_feature(feature)
        if plain != feature:
            dataset = dataset.cast_column(name, plain)
    return dataset


def _load(kind: str, shown_as: str, **options: Any) -> Any:
    """Call ``datasets.load_dataset`` without progress bars.

    Raises ``DataError`` with the failed attempt.
    """
    import datasets

    # restored below, since the setting belongs to the whole process
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return _undecoded(datasets.load_dataset(kind, **options))
    except Exception as error:  # the library's errors have no common class
        if kind != shown_as:
            raise DataError(f"data.sources: cannot read {shown_as}: {first_line(error)}") from error
        reason = f"(split {options['split']!r}): {type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"data.sources: {shown_as} is no file or folder here, "
            f"and as a data set of the hub it cannot be loaded {reason}. "
            "Check the name and the network, or give a path to local files"
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()


def _from_function(source: SourceConfig, malformed: Malformed) -> Rows:
    function = resolve(source.path, "data source")
    options = dict(source.options)
    if "split" not in options and "split" in _parameters(function):
        options["split"] = source.split
    _check_keywords(function, options, source.path, "data.sources.options", ())
    try:
        made = function(**options)
        # a table has a length and can be indexed by position
        is_indexed = hasattr(made, "__len__") and hasattr(made, "__getitem__")
        if isinstance(made, Mapping) or not is_indexed:
            return _listed(itertools.islice(made, source.limit), source.path, malformed)
        # a data set of the hub would decode every picture of a row on access
        if hasattr(made, "cast_column"):
            return TableRows(_undecoded(made), source.path)
        return InMemoryRows(made, source.path)
    except UserError:
        raise
    except Exception as error:  # whatever a user's function raises
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"data.sources: {source.path} raised {problem}") from error


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _check_keywords(
    function: Callable[..., object],
    options: Mapping[str, object],
    what: str,
    setting: str,
    positional: tuple[object, ...],
) -> None:
    try:
        inspect.signature(function).bind(*positional, **options)
    except TypeError as error:
        raise ConfigError(
            f"{setting}: {what} takes ({', '.join(_parameters(function))}): {error}"
        ) from None


def _refuse(options: Mapping[str, object], setting: str, who: str) -> None:
    if options:
        raise ConfigError(f"{setting} ({', '.join(options)}) are read by {who}")
