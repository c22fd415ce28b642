"""Functions, rows and models of the running program, as files that settings name.

The name of a file has a digest of its content. The settings of a run therefore say which functions,
rows and models it had, and a run is resumed only with the same ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from os import PathLike, fspath
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

from lightrft.config.base import Settings, Tree, has_setting, is_branch
from lightrft.config.data import SourceConfig
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import ConfigError, first_line
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
    value = natural(value)
    if (id(value), key) in written:
        return written[id(value), key][1]
    if _ROWS.search(key):
        _check_texts(value, key)
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
    if isinstance(value, PathLike):  # a run is its folder, and its model a folder in it
        is_trained = re.search(r"^(model|reference|teacher)(\.path)?$", key)
        return fspath(value.model if is_trained and hasattr(value, "model") else value)
    if isinstance(value, type):
        raise ConfigError(f"{key}: {value.__name__} is a class; {_object_of(value)}")
    if pair := _pair(value):
        found = _model(*pair, folder, key)
        written[id(value), key] = value, found
        return found
    if isinstance(value, list | tuple):
        return [plain(each, folder, f"{key}.{k}", written) for k, each in enumerate(value)]
    if callable(getattr(value, "save_pretrained", None)):  # a tokenizer or a processor
        return str(_saved(value, folder, "tokenizer"))
    if callable(value) and not hasattr(value, "parameters"):  # no module of torch
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
    taken = next((text for keys, text in _TAKEN if keys.search(key)), "")
    raise ConfigError(f"{key}: a value of type {type(value).__name__} cannot be a setting{taken}")


_TAKEN = (
    (
        _ROWS,
        "; give rows: a list of tables, a datasets.Dataset, a frame of pandas, or an iterator of "
        "tables",
    ),
    (
        re.compile(r"^(model|reference|teacher|critic|models)\b(?!\.[a-z_]+\.)"),
        "; give a folder, a name of the hub, or (model, tokenizer) with a model of transformers "
        "or peft",
    ),
)
"""What settings that take more than text and numbers take, by key."""


def natural(value: Any) -> Any:
    """Return a value as settings have it: an object of settings as a table, a dtype as text."""
    if isinstance(value, Settings):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not callable(value):
        return _changed_by(value)
    return value


def _changed_by(value: Any) -> Tree:
    """Return the fields of a dataclass, such as another framework's config, that it was given."""
    found = {}
    for each in dataclasses.fields(value):
        default = each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        given = getattr(value, each.name)
        if each.init and given is not None and given != default:
            found[each.name] = given
    return found


def _object_of(kind: type) -> str:
    """Return advice to give an object of a class."""
    how = ".from_pretrained(...)" if hasattr(kind, "from_pretrained") else "()"
    return f"give an object of it, such as {kind.__name__}{how}"


def is_rows(value: object) -> bool:
    """Return True for rows: a list of tables, a ``datasets.Dataset``, a frame or an iterator.

    Chats without a table around them are rows too. A list of sources, as ``data.sources`` has it,
    is none.
    """
    if isinstance(value, list | tuple):
        tables = bool(value) and all(map(is_branch, value))
        return (tables and not all(map(_is_source, value))) or (
            bool(value) and all(map(is_chat, value))
        )
    if isinstance(value, str | Mapping | PurePath | Settings) or callable(value):
        return not isinstance(value, str | PurePath | Settings) and _package(value) == "datasets"
    return _package(value) in _FRAMES or isinstance(value, Iterator) or _is_sequence(value)


_FRAMES = ("datasets", "pandas", "polars", "pyarrow")
"""Packages whose objects are rows."""


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_sequence(value: object) -> bool:
    """Return True for an object with a length and items, such as a ``torch`` data set."""
    return callable(getattr(value, "__getitem__", None)) and callable(
        getattr(value, "__len__", None)
    )


def is_chat(value: object) -> bool:
    """Return True for a list of messages."""
    keys = ({"role", "content"}, {"from", "value"})
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(is_branch(one) and any(k <= one.keys() for k in keys) for one in value)


def _is_source(value: Mapping[str, object]) -> bool:
    return "path" in value and value.keys() <= SourceConfig.model_fields.keys()


def rows_of_columns(cls: type[Settings], key: str, value: object) -> list[Tree] | None:
    """Return the rows of a table of columns, as ``Dataset.from_dict`` takes, or None for another.

    Args:
        cls: Settings of the verb.
        key: Setting of the value, such as ``data``.
        value: A table, such as ``{"prompt": [...], "label": [...]}``.

    Raises:
        ConfigError: The columns have different lengths, or are splits.
    """
    if not is_branch(value) or not value:
        return None
    if not any(has_setting(cls, f"{key}.{name}") for name in value) and all(
        map(is_rows, value.values())
    ):
        raise _of_splits(key, value)
    columns = {name: each for name, each in value.items() if isinstance(each, list | tuple)}
    if len(columns) < len(value) or all(has_setting(cls, f"{key}.{name}") for name in value):
        return None
    lengths = {name: len(each) for name, each in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{key}: the columns have different lengths: {lengths}")
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def is_model(value: object) -> bool:
    """Return True for a model of transformers or peft."""
    return callable(getattr(value, "save_pretrained", None)) and hasattr(value, "state_dict")


def _pair(value: Any) -> tuple[Any, Any] | None:
    """Return a model with its tokenizer, in either order, or without one. None for other values."""
    parts = list(value) if isinstance(value, list | tuple) and len(value) == 2 else [value]
    parts = [_unwrapped(one) for one in parts]
    models = [one for one in parts if is_model(one)]
    if len(models) != 1:
        return None
    return models[0], next((one for one in parts if one is not models[0]), None)


def _unwrapped(value: Any) -> Any:
    """Return the model inside wrappers, such as that of ``torch.compile``."""
    while hasattr(value, "state_dict") and set(value._modules) in ({"_orig_mod"}, {"module"}):
        [value] = value._modules.values()
    return value


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
        raise _of_splits(key, rows)
    folder.mkdir(parents=True, exist_ok=True)
    if not _has_media(rows):
        found = list(_tables(rows, key))
        with suppress(TypeError):  # a value that is not of JSON, such as an image
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
            # Half of a surrogate pair is then the escape that JSON has for it.
            data = text.encode(errors="backslashreplace")
            return _written(folder, "rows", ".jsonl", data)
        rows = _arrow(found, key)
    with TemporaryDirectory(dir=folder) as scratch:
        file = Path(scratch) / "rows.parquet"
        rows.to_parquet(str(file))
        return _written(folder, "rows", ".parquet", file.read_bytes())


def _written(folder: Path, name: str, suffix: str, data: bytes) -> Path:
    file = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:DIGITS]}{suffix}"
    if not file.is_file():
        write_atomic(file, data)
    return file


def _of_splits(key: str, splits: Mapping[str, Any]) -> ConfigError:
    names = list(splits)
    return ConfigError(
        f"{key}: the data set has the splits {', '.join(names)}; choose one of them, as in "
        f"dataset[{names[0]!r}]"
    )


def _check_texts(value: object, key: str) -> None:
    """Raise ``ConfigError`` for prompts in place of rows: texts that name no file."""
    texts = value if isinstance(value, list | tuple) else []
    if not texts or not all(isinstance(one, str) for one in texts):
        return
    if not any("/" in one or "." in one or Path(one).exists() for one in texts):
        raise ConfigError(
            f"{key}: {texts[0]!r} names no file, and a row is a table; write "
            '[{"prompt": text} for text in texts]'
        )


def _arrow(rows: list[Tree], key: str) -> Any:
    """Return rows with values that are not of JSON, such as images, as a ``datasets.Dataset``."""
    from datasets import Dataset

    try:
        return Dataset.from_list(rows)
    except (ValueError, TypeError, NotImplementedError) as error:
        for k, row in enumerate(rows):
            for name, each in row.items():
                try:
                    Dataset.from_list([{name: each}])
                except (ValueError, TypeError, NotImplementedError):
                    raise ConfigError(
                        f"{key}: row {k}, column {name!r}: a value of type {type(each).__name__} "
                        "cannot be written; give text, a number, an image, or a list or table of "
                        "these"
                    ) from None
        raise ConfigError(
            f"{key}: the rows are no table ({first_line(error)}); give a column values of one type"
        ) from None


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
    elif not hasattr(rows, "__iter__"):  # a data set of torch need not end by an error
        rows = map(rows.__getitem__, range(len(rows)))
    k = -1
    for k, row in enumerate(rows):
        if is_chat(row):
            row = {"messages": row}
        if not is_branch(row):
            raise ConfigError(
                f"{key}: row {k} is of type {type(row).__name__}, not a table such as "
                '{"prompt": "...", "label": "..."}'
            )
        if k == MOST_ROWS and not hasattr(rows, "__len__"):
            raise ConfigError(
                f"{key}: the iterator gave {MOST_ROWS:,} rows, and has more; end it, as by "
                "itertools.islice(rows, 1000), or write the rows to a file"
            )
        if "input_ids" in row and not any(
            isinstance(each, str | list) and each and not isinstance(each[0], int)
            for each in row.values()
        ):
            raise ConfigError(
                f"{key}: row {k} has token ids, and the run tokenizes text itself; give columns of "
                "text, such as prompt and response, or messages"
            )
        yield {str(name): _value(each) for name, each in row.items()}
    if k < 0:
        raise ConfigError(f"{key}: there are no rows; an iterator gives its rows once")


MOST_ROWS = 5_000_000
"""Most rows of an iterator, which may have no end."""


def _value(value: Any) -> Any:
    """Return a value of a row as JSON has it, if it can be one."""
    if isinstance(value, float | datetime) and value != value:  # NaN of numbers or of times
        return None
    if isinstance(value, Decimal | date | time | UUID):
        return str(value)
    if is_branch(value):
        return {str(name): _value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_value(each) for each in value]
    if type(value).__module__ in ("numpy", "torch") and callable(getattr(value, "tolist", None)):
        return _value(value.tolist())
    return value


def _model(model: Any, tokenizer: Any, folder: Path, key: str) -> Tree | str:
    """Write a model with its tokenizer, and return the settings of its folder.

    Args:
        model: The model.
        tokenizer: Its tokenizer or processor, or None.
        folder: Where the folder is made.
        key: The setting, for messages.
    """
    kind = type(model).__name__
    if key.startswith("reward.terms"):
        raise ConfigError(
            f"{key}: a {kind} is a model, not a function; give it with its tokenizer in reward.models"
        )
    is_path = key.endswith("path")
    if not is_path and not callable(getattr(tokenizer, "save_pretrained", None)):
        has = "" if tokenizer is None else f", and {tokenizer!r:.60} is none"
        raise ConfigError(f"{key}: a {kind} needs its tokenizer{has}; write (model, tokenizer)")
    if any(each.is_meta for each in model.parameters()):
        raise ConfigError(
            f"{key}: the weights of the {kind} are on the device meta, which holds no numbers; "
            "load the model without it"
        )
    try:
        path = str(_saved(model, folder, "model", tokenizer))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{key}: the {kind} cannot be written ({first_line(error)}); give a model as "
            "from_pretrained loads it, without quantization, or the folder that holds it"
        ) from error
    is_text = is_path or re.search(r"^(reference|base_model|models\.\d+(\.model)?)$", key)
    return path if is_text else {"path": path}


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
