"""The key of a token cache entry.

It is a digest of everything that determines the tokens of a dataset.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.config.data import DataConfig
from lightrft.datasets.column_cache import ColumnCache
from lightrft.datasets.open_source import files_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

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
