"""A cache of columns on disk, such as token ids. The next start maps them into memory instead of
computing them again.

An entry is one Arrow file: a row of lists, followed by a digest of all bytes before it. It is
written under a temporary name and then renamed, so an interrupted write leaves no partial entry. An
entry that cannot be read is built again.

The key of a token cache entry is a digest of everything that determines the tokens.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lightrft.config.data import DataConfig
from lightrft.datasets.open_source import files_of
from lightrft.utils.errors import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_log = logging.getLogger(__name__)
DIGEST_BYTES = 32
NAMES, FACTS = "names", b"lightrft"


class Names(Sequence[str]):
    """The strings of an Arrow array as a sequence."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[str]: ...

    def __getitem__(self, i: int | slice) -> str | Sequence[str]:
        return Names(self._array[i]) if isinstance(i, slice) else self._array[i].as_py()

    def __iter__(self) -> Iterator[str]:
        return iter(self._array.to_pylist())


@dataclass(frozen=True, slots=True)
class Entry:
    """The stored content of a dataset.

    Args:
        columns: arrays of numbers by name.
        names: names of the stored examples or prompts.
        facts: further values that JSON can express.
    """

    columns: Mapping[str, np.ndarray]
    names: Sequence[str]
    facts: Mapping[str, Any] = field(default_factory=dict)


class ColumnCache:
    """The entry at ``path``, which may not exist yet.

    Args:
        path: file of the entry.
        setting: the setting that names its folder, for messages.
    """

    def __init__(self, path: Path, setting: str) -> None:
        self.path = path
        self.setting = setting

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock the entry, so that only one process builds it.

        The system releases the lock of a killed process. Where the folder or its file system
        supports no lock, several processes may build the same entry.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.with_suffix(".lock").open("wb")
        except OSError:
            yield
            return
        with file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self) -> Entry | None:
        """Return the entry, mapped into memory.

        Returns None if there is no entry, or if it is damaged. Damage is logged.
        """
        import pyarrow as pa

        if not self.path.is_file():
            return None
        try:
            whole = pa.memory_map(str(self.path)).read_buffer()
            body = whole.slice(0, max(0, whole.size - DIGEST_BYTES))
            if _digest(body) != whole.slice(body.size).to_pybytes():
                raise ValueError("its digest does not match its content")
            table = pa.ipc.open_file(body).read_all()
            lists = {name: table.column(name).chunk(0) for name in table.column_names}
            names = Names(lists.pop(NAMES).values)
            # Without a copy: a column stays in its file, shared by all ranks of the machine.
            columns = {
                name: found.values.to_numpy(zero_copy_only=True) for name, found in lists.items()
            }
            return Entry(columns, names, json.loads(table.schema.metadata[FACTS]))
        except (OSError, ValueError, KeyError, IndexError, pa.ArrowException) as error:
            _log.warning(
                "%s: %s is damaged and is built again: %s",
                self.setting,
                self.path,
                first_line(error),
            )
            return None

    def write(self, entry: Entry) -> None:
        """Store ``entry`` atomically.

        A failure is logged and not raised, because the next start can compute the entry again.
        """
        import pyarrow as pa

        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        arrays = {name: pa.array(column) for name, column in entry.columns.items()}
        arrays[NAMES] = pa.array(list(entry.names), pa.large_string())
        # One row of lists, because the columns of a table must have one length. Large lists have
        # 64-bit offsets: tokens may be more than 2**31.
        rows = {
            name: pa.LargeListArray.from_arrays(pa.array([0, len(a)], pa.int64()), a)
            for name, a in arrays.items()
        }
        table = pa.table(rows).replace_schema_metadata({FACTS: json.dumps(dict(entry.facts))})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # left by a killed process: this one has the lock, so no other is writing
            for left in self.path.parent.glob(f".{self.path.name}.*.tmp"):
                left.unlink(missing_ok=True)
            with temporary.open("wb") as file:
                with pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
                file.flush()
                # maps the flushed file, so the digest takes no second copy in memory
                file.write(_digest(pa.memory_map(str(temporary)).read_buffer()))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            _log.warning(
                "%s: %s cannot be written, so the next start computes it again: %s",
                self.setting,
                self.path,
                error,
            )
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


MIB = 2**20
IRRELEVANT = {"shuffle", "blend", "media", "token_cache", "token_cache_min_mb"}
"""Settings of the data that do not change the tokens of a row."""
LIBRARIES = ("transformers", "tokenizers", "jinja2", "pyarrow")


def token_cache_of(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    purpose: str,
    options: Mapping[str, object],
    processor: Any = None,
) -> ColumnCache | None:
    """Return the cache entry of ``config``, or None if its tokens are not cached.

    The log gives the reason. Tokens are not cached in these cases:

    * A source is a function or comes from the hub.
    * A reader is a user's function.
    * The model reads media.
    * The tokenizer has no fast backend or does not come from transformers.
    * The chat template writes the date.
    * The files are smaller in total than ``token_cache_min_mb``.

    Args:
        config: the data.
        tokenizer: the tokenizer, with its chat template.
        purpose: the result of the encoding, such as ``prompts``.
        options: further settings that determine the tokens.
        processor: the processor of a model that reads media, else None.
    """
    if config.token_cache is None:
        return None
    found = [files_of(source) for source in config.sources]
    if obstacle := _obstacle(config, tokenizer, processor, all(found)):
        problem = "are not kept, and each start tokenizes them"
        _log.info("data.token_cache: the tokens of %s %s: %s", purpose, problem, obstacle)
        return None
    files = list(itertools.chain.from_iterable(filter(None, found)))
    # small files are tokenized faster than they are looked up
    if sum(file.stat().st_size for file in files) < config.token_cache_min_mb * MIB:
        return None
    made_of = {
        "purpose": purpose,
        "options": dict(options),
        "settings": _settings(config),
        "tokenizer": _tokenizer_digest(tokenizer),
        "files": [[str(file), digest_of_file(file)] for file in files],
        "code": _code_digest(),
        # Their next versions may tokenize or render otherwise.
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
    }
    # Sorted, since the order of options must not change the key.
    text = json.dumps(made_of, sort_keys=True, default=str)
    key = hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
    return ColumnCache(Path(config.token_cache).expanduser() / f"{key}.arrow", "data.token_cache")


def _obstacle(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, processor: Any, files: bool
) -> str:
    """Return the reason why tokens cannot be cached, or an empty text.

    ``files`` is True if every source consists of local files.
    """
    if processor is not None:
        return "the model reads media"
    if not files:
        return "a source is not a file of this machine"
    if any(source.reader is not None and ":" in source.reader for source in config.sources):
        return "a reader is a user's function, which may change"
    if config.judgement is not None and config.judgement.template is not None:
        return "the template of judgements is a user's file, which may change"
    if not hasattr(tokenizer, "backend_tokenizer"):
        return "the tokenizer is not a fast one"
    # the digest does not cover the code of a tokenizer from elsewhere
    if not type(tokenizer).__module__.startswith("transformers."):
        return "the tokenizer is not one of transformers' own"
    if "strftime" in str(tokenizer.chat_template):
        return "the chat template writes the date"
    return ""


def digest_of_file(path: Path) -> str:
    """Return a digest of the content of ``path``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def stamps(config: DataConfig) -> Sequence[tuple[str, int, int]]:
    """Return path, size and modification time of every file of ``config``.

    The values are equal before and after reading if no file changed in between.
    """
    found = []
    for source in config.sources:
        for file in files_of(source) or ():
            stat = file.stat()
            found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return found


def _settings(config: DataConfig) -> dict[str, object]:
    tree = config.model_dump(mode="json", exclude=IRRELEVANT)
    for source in tree["sources"]:
        # the weight changes how often a row is read, not its tokens
        del source["weight"]
    return tree


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    parts = (
        type(tokenizer).__name__,
        tokenizer.backend_tokenizer.to_str(),
        str(tokenizer.chat_template),
        sorted(map(str, tokenizer.special_tokens_map.items())),
        sorted(f"{k}: {t.content} {t.special}" for k, t in tokenizer.added_tokens_decoder.items()),
        str(tokenizer.split_special_tokens),
    )
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=32).hexdigest()


@functools.cache
def _code_digest() -> str:
    """Return a digest of the code that tokenizes rows.

    New code then ignores entries of old code.
    """
    here = Path(__file__).parent
    files = [*sorted(here.rglob("*.py")), here.parent / "utils" / "chat_template.py"]
    code = b"".join(file.read_bytes() for file in files)
    return hashlib.blake2b(code, digest_size=32).hexdigest()
