"""Functions, rows and models of the running program, as files that settings name.

The name of a file has a digest of its content. The settings of a run therefore say which functions,
rows and models it had, and a run is resumed only with the same ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightrft.config.base import Settings, Tree, has_setting, is_branch
from lightrft.config.data import SourceConfig
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import ConfigError
from lightrft.utils.memory_function import DIGITS, name_of_function

FOLDER = "inputs"
"""Folder of these files, next to the run folders."""


_ROWS = re.compile(r"(^|\.)(sources(\.\d+(\.path)?)?|data)$")
"""Keys whose values may be rows."""


Written = dict[tuple[int, str], tuple[Any, Any]]
"""Values that became files, each with its settings, by identity and key."""


def plain(value: Any, folder: Path, key: str = "", written: Written | None = None) -> Any:
    """Return ``value`` as in YAML. Functions, rows and models become files in ``folder``.

    Args:
        value: A value of settings.
        folder: Where files are written.
        key: The dotted key of the value, for messages.
        written: Values that earlier calls have written, to which this call adds its own. An
            iterator gives its rows only once.

    Raises:
        ConfigError: The value cannot be a setting, or cannot be written.
    """
    written = {} if written is None else written
    if isinstance(value, Settings):
        value = value.model_dump(exclude_unset=True)
    if (id(value), key) in written:
        return written[id(value), key][1]
    if _ROWS.search(key) and is_rows(value):
        path = str(write_rows(value, folder, key))
        source = {"path": path, "name": "rows"}
        found = path if key.endswith("path") else [source] if key.endswith("data") else source
        written[id(value), key] = value, found
        return found
    if is_branch(value):
        return {
            name: plain(each, folder, f"{key}.{name}".lstrip("."), written)
            for name, each in value.items()
        }
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_model(value):
        found = _model(value, folder, key)
        written[id(value), key] = value, found
        return found
    if isinstance(value, list | tuple):
        return [plain(each, folder, f"{key}.{k}", written) for k, each in enumerate(value)]
    if callable(getattr(value, "save_pretrained", None)):  # a tokenizer or a processor
        return str(_saved(value, folder, "tokenizer"))
    if isinstance(value, type):
        name = value.__name__
        raise ConfigError(f"{key}: {name} is a class; give an object of it, such as {name}()")
    if callable(value):
        # Here, since it imports what only a program with functions needs.
        from lightrft.rewards.program_function import Here

        if isinstance(value, Here):
            if key.partition(".")[0] != "reward":
                raise ConfigError(f"{key}: here() is for rewards; give the function itself")
            return value.write(folder)
        return name_of_function(value, folder)
    if callable(item := getattr(value, "item", None)):  # a number of numpy or torch
        with suppress(ValueError, RuntimeError):
            return item()
    raise ConfigError(f"{key}: a value of type {type(value).__name__} cannot be a setting")


def is_rows(value: object) -> bool:
    """Return True for rows: a list of tables, a ``datasets.Dataset``, a frame or an iterator.

    A list of sources, as ``data.sources`` has it, is none.
    """
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_branch, value)) and not all(map(_is_source, value))
    package = type(value).__module__.partition(".")[0]
    return package in ("datasets", "pandas", "polars", "pyarrow") or isinstance(value, Iterator)


def _is_source(value: Mapping[str, object]) -> bool:
    return "path" in value and value.keys() <= SourceConfig.model_fields.keys()


def rows_of_columns(cls: type[Settings], key: str, value: object) -> list[Tree] | None:
    """Return the rows of a table of columns, as ``Dataset.from_dict`` takes, or None for another.

    Args:
        cls: Settings of the verb.
        key: Setting of the value, such as ``data``.
        value: A table, such as ``{"prompt": [...], "label": [...]}``.

    Raises:
        ConfigError: The columns have different lengths.
    """
    if not is_branch(value) or not value:
        return None
    columns = {name: each for name, each in value.items() if isinstance(each, list | tuple)}
    if len(columns) < len(value) or all(has_setting(cls, f"{key}.{name}") for name in value):
        return None
    lengths = {name: len(each) for name, each in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{key}: the columns have different lengths: {lengths}")
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def is_model(value: object) -> bool:
    """Return True for a model of transformers or peft, alone or in a pair with its tokenizer."""
    one = value[0] if isinstance(value, tuple) and len(value) == 2 else value
    return callable(getattr(one, "save_pretrained", None)) and hasattr(one, "state_dict")


def write_rows(rows: Any, folder: Path, key: str) -> Path:
    """Write ``rows`` to a file in ``folder``, unless it is there, and return its path.

    Args:
        rows: As ``is_rows`` accepts.
        folder: Where the file is written.
        key: The setting, for messages.

    Raises:
        ConfigError: There are no rows, several splits, or a row is not a table.
    """
    if isinstance(rows, Mapping):
        raise ConfigError(
            f"{key}: the data set has the splits {', '.join(rows)}; choose one of them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not _has_media(rows):
        found = list(_tables(rows, key))
        with suppress(TypeError):  # a value that is not of JSON, such as an image
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
            # Half of a surrogate pair is then the escape that JSON has for it.
            data = text.encode(errors="backslashreplace")
            return _written(folder, "rows", ".jsonl", data)
        from datasets import Dataset

        rows = Dataset.from_list(found)
    with TemporaryDirectory(dir=folder) as scratch:
        file = Path(scratch) / "rows.parquet"
        rows.to_parquet(str(file))
        return _written(folder, "rows", ".parquet", file.read_bytes())


def _written(folder: Path, name: str, suffix: str, data: bytes) -> Path:
    file = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:DIGITS]}{suffix}"
    if not file.is_file():
        write_atomic(file, data)
    return file


def _has_media(rows: Any) -> bool:
    """Return True for a ``datasets.Dataset`` with columns of images, sounds or videos."""
    features = getattr(rows, "features", None)
    if features is None or not callable(getattr(rows, "to_parquet", None)):
        return False
    from datasets.features.features import require_decoding

    return any(map(require_decoding, features.values()))


def _tables(rows: Any, key: str) -> Iterator[Tree]:
    """Yield each row as a table of plain values. A missing value of a frame is None."""
    if callable(getattr(rows, "collect", None)):  # a lazy frame of polars
        rows = rows.collect()
    if callable(getattr(rows, "to_dicts", None)):  # polars
        rows = rows.to_dicts()
    elif callable(getattr(rows, "to_pylist", None)):  # pyarrow
        rows = rows.to_pylist()
    elif callable(getattr(rows, "to_dict", None)) and hasattr(rows, "columns"):  # pandas
        rows = rows.to_dict("records")
    empty = True
    for k, row in enumerate(rows):
        if not is_branch(row):
            raise ConfigError(f"{key}: row {k} is of type {type(row).__name__}, not a table")
        empty = False
        yield {str(name): _value(each) for name, each in row.items()}
    if empty:
        raise ConfigError(f"{key}: there are no rows")


def _value(value: Any) -> Any:
    """Return a value of a row as JSON has it, if it can be one."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if is_branch(value):
        return {str(name): _value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_value(each) for each in value]
    if type(value).__module__ in ("numpy", "torch") and callable(getattr(value, "tolist", None)):
        return _value(value.tolist())
    return value


def _model(value: Any, folder: Path, key: str) -> Tree | str:
    """Write a model, with its tokenizer if it is there, and return the settings of its folder."""
    model, tokenizer = value if isinstance(value, tuple) else (value, None)
    is_section = not key.endswith(("path", "reference"))
    if tokenizer is None and is_section:
        raise ConfigError(
            f"{key}: a {type(model).__name__} needs its tokenizer; write {key}=(model, tokenizer)"
        )
    path = str(_saved(model, folder, "model", tokenizer))
    return {"path": path} if is_section else path


def _saved(value: Any, folder: Path, name: str, tokenizer: Any = None) -> Path:
    """Write ``value`` to a folder as transformers does, unless it is there, and return its path.

    Args:
        value: A model, a tokenizer or a processor.
        folder: Where the folder is made.
        name: Start of its name.
        tokenizer: Tokenizer or processor of a model.
    """
    from lightrft.models.loading.save_model import save_model

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as made:
        scratch = Path(made) / name
        if is_model(value):
            # A processor holds its tokenizer, and is written with it.
            save_model(value, getattr(tokenizer, "tokenizer", tokenizer), scratch)
        for each in (tokenizer,) if is_model(value) else (value,):
            if each is not None:
                each.save_pretrained(str(scratch))
        path = folder / f"{name}-{_digest(scratch)}"
        # Several ranks may write the same folder.
        with suppress(OSError):
            scratch.rename(path)
    return path


def _digest(folder: Path) -> str:
    """Return the digest of the names and contents of the files of ``folder``."""
    digest = hashlib.sha256()
    for file in sorted(filter(Path.is_file, folder.rglob("*"))):
        digest.update(str(file.relative_to(folder)).encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:DIGITS]
