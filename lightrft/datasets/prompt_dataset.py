"""The dataset of prompts for the policy."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from lightrft.config.data import DataConfig
from lightrft.datasets.cache_key import stamps, token_cache_of
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.column_cache import ColumnCache, Entry, Names
from lightrft.datasets.judgement.judgement_rows import JudgementRows
from lightrft.datasets.media import SupportedMedia
from lightrft.datasets.media.prefetch import Fetcher
from lightrft.datasets.mixing import blend
from lightrft.datasets.open_source import media_root, open_source, source_name
from lightrft.datasets.row_parser import ParsedRow, ends_with_assistant
from lightrft.datasets.row_tables import (
    Indexes,
    MalformedRow,
    Row,
    Rows,
    TextIndex,
    look_up,
    with_way_out,
)
from lightrft.datasets.row_warnings import (
    UnknownText,
    first_place,
    note_label,
    note_text,
    note_unread,
    unread_columns,
)
from lightrft.datasets.rows.recorded_row import recorded
from lightrft.datasets.rows.row_reader import read_record
from lightrft.types import Prompt
from lightrft.utils.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Record(Protocol):
    """A parsed row, of any kind."""

    @property
    def row(self) -> Row: ...


A = TypeVar("A")
R = TypeVar("R", bound=Record)
T = TypeVar("T")

Columns = dict[str, Any]
"""Stored columns of numbers: growing arrays, or arrays mapped from a file."""

Read = Callable[..., R]
"""A function that parses a row, such as ``read_record`` with its ``columns`` filled in."""

Keep = Callable[[int, Sequence[tuple[int, R]]], list[str]]

CHUNK = 1024
"""Number of rows that are encoded together."""


class Sources(Generic[R]):
    """The opened sources of a ``DataConfig``, with counts of the rows read and left out.

    Args:
        config: the settings of the data.
        reads: media that the model reads.
        read: parses a row.
    """

    def __init__(self, config: DataConfig, reads: SupportedMedia, read: Read[R]) -> None:
        if not config.sources:
            raise ConfigError(
                "data.sources is empty; name a file, a folder, a data set or module:function"
            )
        self.config = config
        self.rows: list[Rows] = []
        self.names = [source_name(s) for s in config.sources]
        self.reads = reads
        self._read = read
        self._roots = [media_root(config.media.root, s.path) for s in config.sources]
        self.counts: Counter[str] = Counter()
        self.first_problem = ""
        # The number of each data source, in the order of their first rows.
        self.data_sources: dict[str, int] = {}

    def record(self, source: int, row: int) -> R:
        """Return row ``row`` of source ``source``. Raises ``MalformedRow``."""
        rows = self.rows[source]
        where, given = rows.where(row), recorded(rows[row])
        return self._read(given, where=where, reads=self.reads, root=self._roots[source])

    def data_source(self, record: ParsedRow, source: int) -> str:
        """Return the data source of a record of source ``source``, and note it."""
        name = record.data_source or self.names[source]
        self.data_sources.setdefault(name, len(self.data_sources))
        return name

    def where(self, source: int, row: int) -> str:
        """Return the location of row ``row`` of source ``source``, for messages."""
        return self.rows[source].where(row)

    def chunks(self, source: int) -> Iterator[list[tuple[int, R]]]:
        """Yield chunks of numbered records of a source.

        A bad row is an error or is counted, depending on ``data.bad_rows``.
        """
        chunk: list[tuple[int, R]] = []
        for row in range(len(self.rows[source])):
            # Before the row is read: a bad row is one of all rows, too.
            self.counts["rows"] += 1
            try:
                chunk.append((row, self.record(source, row)))
            except MalformedRow as error:
                self.skip(error)
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
        yield chunk

    def skip(self, error: MalformedRow) -> None:
        """Raise ``error`` if ``data.bad_rows`` is ``error``, else count a malformed row."""
        if self.config.bad_rows == "error":
            raise with_way_out(error)
        self.counts["malformed"] += 1
        self.first_problem = self.first_problem or str(error)

    def lose(self, error: MalformedRow) -> None:
        """Raise ``error`` if ``data.bad_rows`` is ``error``, else count an unreadable row.

        The media of such a row were readable on construction.
        """
        if self.config.bad_rows == "error":
            raise with_way_out(error)
        self.counts["unreadable"] += 1

    def made(
        self,
        rows: Sequence[A],
        made: Sequence[list[str] | MalformedRow],
    ) -> list[tuple[A, list[str]]]:
        """Return the pairs of ``rows`` and ``made`` without errors. Errors go to ``skip``."""
        pairs: list[tuple[A, list[str]]] = []
        for row, result in zip(rows, made):
            if isinstance(result, MalformedRow):
                self.skip(result)
            else:
                pairs.append((row, result))
        return pairs

    def overlong(self, where: str, tokens: int, limit: int, setting: str) -> None:
        """Raise an error if ``data.overlong_prompts`` is ``error``, else count an overlong row.

        Args:
            where: location of the row, for messages.
            tokens: number of tokens of the row.
            limit: largest number of tokens.
            setting: name of the setting of the limit.

        Raises:
            DataError: ``data.overlong_prompts`` is ``error``.
        """
        problem = f"{where}: {tokens} tokens, more than {setting} = {limit}"
        if self.config.overlong_prompts == "error":
            raise DataError(f"{problem}. Raise it, or set data.overlong_prompts: drop or truncate")
        self.counts["overlong"] += 1
        self.first_problem = self.first_problem or problem

    def read(
        self,
        keep: Keep[R],
        kept: Columns,
        cache: ColumnCache | None,
        seed: int,
    ) -> tuple[np.ndarray, Sequence[str]]:
        """Open the sources and encode their rows, or restore them from the cache.

        Args:
            keep: encodes some numbered records of a source into ``kept``, and returns the names of
                the stored records.
            kept: the columns that ``keep`` fills. They are replaced by cached columns if there are
                any.
            cache: the token cache. None means no cache.
            seed: the seed of the mixing order.

        Returns:
            The order of all stored entries, and a unique name for each, in that order.

        Raises:
            DataError: a source cannot be read, has a bad row that must not be skipped, or has no
                rows left.
        """
        if cache is None:
            lengths, names, _ = self._encode(keep)
        else:
            with cache.locked():
                lengths, names = self._cached(keep, kept, cache)
        # Outside the lock: it depends on settings that the cache ignores, such as weights.
        order = self.order(lengths, seed)
        # Names of a cache are unique already, and stay in their file.
        if self.config.blend == "concat" and isinstance(names, Names):
            return order, names
        return order, unique_names([names[k] for k in order])

    def _encode(self, keep: Keep[R]) -> tuple[list[int], list[str], list[Indexes]]:
        """Encode every row.

        Return the number of stored rows per source, their names, and the indexes of the files.
        """
        indexes: list[Indexes] = [{} for _ in self.config.sources]
        self._open(indexes)
        lengths: list[int] = []
        names: list[str] = []
        for s in range(len(self.rows)):
            start = len(names)
            for chunk in self.chunks(s):
                names += keep(s, chunk)
                # After the encoding, which reads tools, weights and fields of templates.
                for _, record in chunk:
                    note_unread(self.counts, record.row, s)
            lengths.append(len(names) - start)
        return lengths, names, indexes

    def _cached(
        self, keep: Keep[R], kept: Columns, cache: ColumnCache
    ) -> tuple[list[int], Sequence[str]]:
        """Restore the rows from ``cache``, or encode them and write it.

        Return the number of stored rows per source, and their names.
        """
        entry = cache.read()
        if entry is not None:
            return self._restore(entry, kept)
        before = stamps(self.config)
        lengths, names, indexes = self._encode(keep)
        # a file that changed during reading must not be cached under the digest of one version
        if stamps(self.config) == before:
            cache.write(self._entry(kept, lengths, names, indexes))
        return lengths, names

    def _entry(
        self,
        kept: Columns,
        lengths: list[int],
        names: list[str],
        indexes: Sequence[Indexes],
    ) -> Entry:
        """Return what the cache stores, which ``_restore`` reads."""
        columns = {f"kept/{name}": np.asarray(column) for name, column in kept.items()}
        files: list[list[tuple[str, int, str]]] = []
        for s, index in enumerate(indexes):
            files.append([])
            for k, (path, known) in enumerate(index.items()):
                columns[f"offsets/{s}/{k}"] = np.asarray(known.offsets)
                columns[f"lines/{s}/{k}"] = np.asarray(known.lines)
                files[-1].append((path, known.malformed, known.first_problem))
        facts = {
            "counts": self.counts,
            "first_problem": self.first_problem,
            "data_sources": list(self.data_sources),
            "lengths": lengths,
            "unique": len(set(names)) == len(names),
            "files": files,
        }
        return Entry(columns, names, facts)

    def _restore(self, entry: Entry, kept: Columns) -> tuple[list[int], Sequence[str]]:
        """Restore columns, counts and indexes from ``entry``. Return the same as ``_cached``."""
        facts, columns = entry.facts, entry.columns
        indexes: list[Indexes] = []
        for s, files in enumerate(facts["files"]):
            index: Indexes = {}
            for k, (path, malformed, problem) in enumerate(files):
                offsets, lines = columns[f"offsets/{s}/{k}"], columns[f"lines/{s}/{k}"]
                index[path] = TextIndex(offsets, lines, malformed, problem)
            indexes.append(index)
        self._open(indexes)
        kept.update({name: columns[f"kept/{name}"] for name in kept})
        # _open() has counted malformed rows, which the stored counts contain
        self.counts.clear()
        self.counts.update(facts["counts"])
        self.first_problem = facts["first_problem"]
        self.data_sources = {name: k for k, name in enumerate(facts["data_sources"])}
        return facts["lengths"], entry.names if facts["unique"] else list(entry.names)

    def _open(self, indexes: Sequence[Indexes]) -> None:
        self.rows = [
            open_source(source, self.config.bad_rows, index)
            for source, index in zip(self.config.sources, indexes)
        ]
        self.counts["malformed"] += sum(rows.malformed for rows in self.rows)
        problems = [rows.first_problem for rows in self.rows]
        self.first_problem = next(filter(None, problems), "")
        if self.config.judgement is not None:
            self.rows = [JudgementRows(rows, self.config) for rows in self.rows]

    def order(self, lengths: Sequence[int], seed: int) -> np.ndarray:
        """Return the mixing order of the stored rows, given the number of rows of each source.

        Raises ``DataError`` with the counts if a source has no rows left.
        """
        for spec, kept in zip(self.config.sources, lengths):
            if not kept:
                kinds = ("rows", "malformed", "overlong")
                counts = ", ".join(f"{self.counts[kind]} {kind}" for kind in kinds)
                why = f"; the first: {self.first_problem}" if self.first_problem else ""
                raise DataError(f"data.sources: nothing is left of {spec.path} ({counts}){why}")
        weights = [source.weight for source in self.config.sources]
        return blend(lengths, weights, self.config.blend, shuffle=self.config.shuffle, seed=seed)


class EncodedDataset(Generic[T]):
    """The parts that datasets of prompts and of training examples share.

    ``counts`` has the number of rows by outcome. Subclasses set all attributes.
    """

    feeds_rewards: ClassVar[bool] = False
    """Reward functions get the columns that no prompt has."""
    counts: Counter[str]
    encoder: ChatEncoder
    _sources: Sources[Any]
    _fetcher: Fetcher[T]
    _kept: Columns
    _order: np.ndarray
    _ids: Sequence[str]

    def __len__(self) -> int:
        return len(self._order)

    def _stored(self, i: int, kind: str) -> tuple[int, int]:
        """Return the number of entry ``i`` among the stored rows, and its first token's position.

        Raises ``IndexError``, which names the ``kind`` of the entry.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"{kind} {i} of {len(self)}")
        k = int(self._order[i])
        start = self._kept["ends"][k - 1] if k else 0
        return k, start

    def fetch(self, indices: Sequence[int]) -> list[T | MalformedRow]:
        """Return the entries at ``indices``, with media decoded concurrently.

        An unreadable entry is returned as its ``MalformedRow`` error.
        """
        return self._fetcher.fetch(indices)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start decoding the media of the entries at ``indices`` for the next ``fetch``."""
        self._fetcher.prefetch(indices)

    def lose(self, error: MalformedRow) -> None:
        """Raise ``error`` if ``data.bad_rows`` is ``error``, else count an unreadable entry."""
        self._sources.lose(error)

    @property
    def first_problem(self) -> str:
        """Return the reason why the first row was left out. Empty if none was."""
        return self._sources.first_problem

    def first_with(self, doubt: str) -> str:
        """Return the location of the first row that was counted under ``doubt``.

        See ``datasets.row_warnings`` for the counts.
        """
        return self._sources.where(*first_place(self.counts, doubt))

    @property
    def unread(self) -> dict[str, dict[str, int]]:
        """Return the columns that nothing has read with their numbers of rows, by source."""
        sources = [source.path for source in self._sources.config.sources]
        return {sources[s]: columns for s, columns in unread_columns(self.counts).items()}

    @property
    def ids(self) -> Sequence[str]:
        """Return the unique id of each entry, in the order of the dataset."""
        return self._ids

    @property
    def data_sources(self) -> Sequence[str]:
        """Return the names of all data sources of the entries, in the order of their rows."""
        return tuple(self._sources.data_sources)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest entry."""
        return int(np.diff(np.asarray(self._kept["ends"], dtype=np.int64), prepend=0).max())

    def prompt_keys(self) -> Iterator[bytes]:
        """Yield a key of the tokens of each stored prompt without media. Equal prompts have one."""
        return (key for _, key in self.keyed_prompts())

    def keyed_prompts(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and key of each stored prompt without media; see ``prompt_keys``."""
        tokens = np.asarray(self._kept["tokens"])
        skipped = list(self.encoder.placeholders)
        starts, ends, _ = self._bounds()
        for k, (start, end) in enumerate(zip(starts, ends)):
            ids = tokens[start:end]
            # equal tokens may stand for other media
            if not (skipped and bool(np.isin(ids, skipped).any())):
                yield k, ids.tobytes()

    def token_counts(self) -> dict[str, list[int]]:
        """Return the number of tokens of each stored ``prompt``, and of each ``response``."""
        starts, ends, responses = self._bounds()
        return {"prompt": (ends - starts).tolist(), "response": responses.tolist()}

    def _bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the start and the end of each stored prompt, and the length of each response."""
        ends = np.asarray(self._kept["ends"], dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        if "split" not in self._kept:
            return starts, ends, ends[:0]
        splits = np.asarray(self._kept["split"], dtype=np.int64)
        return starts, splits, ends - splits

    @property
    def media_kinds(self) -> set[str]:
        """The kinds of media whose placeholders some entry has. It reads all tokens."""
        processor = self.encoder.processor
        if processor is None:
            return set()
        tokens = np.asarray(self._kept["tokens"])
        return {kind for kind, token in processor.tokens.items() if bool((tokens == token).any())}


COLUMNS = {"tokens": "i", "ends": "Q", "source": "H", "row": "Q", "cut_rows": "Q", "cuts": "Q"}
"""Stored columns of the prompts.

They are the concatenated tokens, the end, source and row of each prompt, and the truncated prompts
with their cuts.
"""


class PromptDataset(EncodedDataset[Prompt]):
    """The prompts of ``config``, encoded once.

    Rows stay in their files and are read again on access. With ``processor``, rows may contain
    media. Media are measured on construction, decoded on access, and never truncated. The dataset
    can be pickled.

    ``counts`` contains:

    * ``rows``: rows read.
    * ``malformed``: rows skipped.
    * ``overlong``: rows dropped because they exceed ``data.max_prompt_tokens``.
    * ``truncated``: prompts cut at the start of their last message.
    * ``special_tokens``: prompts that spell a special token as text.
    * ``media_words``: prompts that spell a marker of media as text.
    * ``prefilled``: prompts that end with an assistant turn which the policy continues.
    * ``answered``: conversations that end with an assistant turn, which is left out.
    * ``prompts``: the length of the dataset.
    * ``unreadable``: prompts that became unreadable later.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        seed: seed of the order of mixed sources.
        processor: the media processor (see ``lightrft.models.processors``). None for a model that
            reads only text.

    Raises:
        DataError: a row cannot be used, or no prompt is left.
        ConfigError: the settings do not fit the tokenizer.
        ModelError: the tokenizer lacks a chat template or token that the settings need.
    """

    feeds_rewards: ClassVar[bool] = True
    """Reward functions get the columns that no prompt has."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        processor: Any = None,
    ) -> None:
        self.config = config
        self.encoder = ChatEncoder(config, tokenizer, processor)
        read = partial(read_record, columns=config.columns, prefill=config.prefill, is_prompt=True)
        self._sources = Sources(config, self.encoder.reads, read)
        self._fetcher = Fetcher(self.prompt, self.encoder.media)
        self._unknown = UnknownText(tokenizer)
        self.counts = self._sources.counts
        self.counts.update(truncated=0, overlong=0, special_tokens=0)
        cache = token_cache_of(config, tokenizer, "prompts", {}, processor)
        self._kept: Columns = {name: array(kind) for name, kind in COLUMNS.items()}
        self._order, self._ids = self._sources.read(self._add, self._kept, cache, seed)
        self._cuts = dict(zip(self._kept["cut_rows"].tolist(), self._kept["cuts"].tolist()))
        self.counts["prompts"] = len(self._order)

    def __getitem__(self, i: int) -> Prompt:
        return self.prompt(i)

    def prompt(self, i: int, *, media: bool = True) -> Prompt:
        """Return prompt ``i``, without its media if ``media`` is False.

        Raises ``MalformedRow`` if its media have become unreadable.
        """
        k, start = self._stored(i, "prompt")
        source, end = int(self._kept["source"][k]), self._kept["ends"][k]
        record, cut = self.record(i)
        text = self.encoder.prompt(record, cut)
        prompt = Prompt(
            id=self._ids[i],
            token_ids=self._kept["tokens"][start:end].tolist(),
            text=self.encoder.readable(text),
            label=record.label,
            reference=_reference(record),
            data_source=record.data_source or self._sources.names[source],
            columns=record.columns,
            request=record.request,
        )
        if media:
            self.encoder.attach(prompt, record, text)
        return prompt

    def record(self, i: int) -> tuple[ParsedRow, int]:
        """Return the row of prompt ``i``, and the number of characters cut from its last message.

        Raises ``MalformedRow`` if the row has become unreadable.
        """
        k, _ = self._stored(i, "prompt")
        row = self._sources.record(int(self._kept["source"][k]), int(self._kept["row"][k]))
        return row, self._cuts.get(k, 0)

    @property
    def reads_media(self) -> bool:
        """Return True if prompts may have media, which take time to decode and memory to store."""
        return self.encoder.media is not None

    def places(self, ids: Sequence[str]) -> list[int]:
        """Return the indices of the prompts called ``ids``.

        Raises ``CheckpointError`` for an unknown id.
        """
        wanted = set(ids)
        found = {name: i for i, name in enumerate(self._ids) if name in wanted}
        try:
            return [found[name] for name in ids]
        except KeyError as error:
            problem = f"the checkpoint holds responses to prompt {error}"
            raise CheckpointError(f"{problem}, which the data does not have") from None

    def _add(self, source: int, chunk: Sequence[tuple[int, ParsedRow]]) -> list[str]:
        """Encode records and store the prompts that fit. Return their names."""
        shown: list[tuple[int, ParsedRow, str]] = []
        for row, record in chunk:
            try:
                shown.append((row, record, self.encoder.prompt(record)))
            except MalformedRow as error:
                self._sources.skip(error)
        expanded = self.encoder.expanded([(record, [text]) for _, record, text in shown])
        good = self._sources.made(shown, expanded)
        # one call for all: a fast tokenizer encodes them in parallel
        encoded = self.encoder.encode_prompts([full for _, (full,) in good])
        names = []
        for ((row, record, text), _), ids in zip(good, encoded):
            fitting = self._fitting(record, ids)
            if fitting is None:
                continue
            cut, ids = fitting
            self.counts["special_tokens"] += self.encoder.is_shielded(text)
            self.counts["media_words"] += bool(record.words)
            if ends_with_assistant(record.prompt):
                self.counts["prefilled" if record.is_begun else "answered"] += 1
            self._keep(source, row, cut, ids)
            note_text(self.counts, self._unknown.count(text, ids), len(ids), source, row)
            data_source = self._sources.data_source(record, source)
            for name in record.gold:
                look_up(record.row, name)  # recorded as read
            gold = _reference(record) if record.label is None else record.label
            note_label(self.counts, data_source, gold, source, row)
            names.append(record.id or f"{self._sources.names[source]}/{row}")
        return names

    def _fitting(self, record: ParsedRow, ids: list[int]) -> tuple[int, list[int]] | None:
        """Return the cut of a prompt and its tokens, or None for a prompt that is left out.

        Raises ``DataError`` if ``data.overlong_prompts`` is ``error`` and the prompt is too long.
        """
        limit = self.config.max_prompt_tokens
        if len(ids) <= limit:
            return 0, ids
        shorter = None
        # media cannot be cut: their placeholders must fit their features
        if self.config.overlong_prompts == "truncate" and not record.media:
            shorter = self._truncate(record, ids)
        if shorter is None:
            self._sources.overlong(record.where, len(ids), limit, "data.max_prompt_tokens")
        else:
            self.counts["truncated"] += 1
        return shorter

    def _keep(self, source: int, row: int, cut: int, ids: list[int]) -> None:
        kept = self._kept
        # cuts are rare, so they are stored by the index of their prompt
        if cut:
            kept["cut_rows"].append(len(kept["ends"]))
            kept["cuts"].append(cut)
        kept["tokens"].extend(ids)
        # The end after the tokens: a prompt is from the end before it to its own.
        kept["ends"].append(len(kept["tokens"]))
        kept["source"].append(source)
        kept["row"].append(row)

    def _truncate(self, record: ParsedRow, ids: list[int]) -> tuple[int, list[int]] | None:
        """Return the smallest cut of the last message that fits, and the resulting tokens.

        The cut is a number of characters. Returns None if no cut suffices.
        """
        limit = self.config.max_prompt_tokens
        text = self.encoder.last_message(record)
        # invariant: a cut of low characters is too small, and high is the smallest cut known to fit
        low = 0
        high = len(text) - 1
        best = self._at(record, high)
        if len(text) < 2 or len(best) > limit:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._at(record, middle)
            if len(tried) <= limit:
                high, best = middle, tried
            else:
                low = middle
        return high, best

    def _at(self, record: ParsedRow, cut: int) -> list[int]:
        return self.encoder.encode_prompts([self.encoder.prompt(record, cut)])[0]


def _reference(record: ParsedRow) -> object:
    """Return the worked solution of a row, else its answer."""
    return record.answer if record.reference is None else record.reference


def unique_names(names: Sequence[str]) -> list[str]:
    """Return ``names`` with suffixes ``~2``, ``~3`` ... on repeated names."""
    seen: Counter[str] = Counter()
    taken = set(names)
    unique = []
    for name in names:
        seen[name] += 1
        given = name if seen[name] == 1 else f"{name}~{seen[name]}"
        while seen[name] > 1 and given in taken:
            seen[name] += 1
            given = f"{name}~{seen[name]}"
        taken.add(given)
        unique.append(given)
    return unique
