"""The dataset of encoded rows, for prompts and training examples, mixed from its sources."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from lightrft.config.data import DataConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.column_cache import ColumnCache, Entry, Names, stamps, token_cache_of
from lightrft.datasets.judgement.judgement_rows import JudgementRows
from lightrft.datasets.media.prefetch import Fetcher
from lightrft.datasets.open_source import media_root, open_source, source_name
from lightrft.datasets.row_parser import ParsedRow
from lightrft.datasets.row_tables import Indexes, MalformedRow, Rows, TextIndex, with_way_out
from lightrft.datasets.row_warnings import UnknownText, first_place, note_unread, unread_columns
from lightrft.datasets.rows.recorded_row import recorded
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.seeding import RandomStream, numpy_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


A = TypeVar("A")
T = TypeVar("T")

CHUNK = 1024
"""Number of rows that are encoded together."""


class EncodedDataset(Generic[T]):
    """The entries that the rows of several sources give, encoded once.

    A subclass calls ``_fill`` once it can store rows.

    ``counts`` contains:

    * ``rows``: rows read.
    * ``malformed``: rows skipped.
    * ``overlong``: rows dropped because they exceed the length limit.
    * ``truncated``: entries cut at the length limit.
    * ``special_tokens``: rows that spell a special token as text.
    * ``media_words``: rows that spell a marker of media as text.
    * ``examples`` or ``prompts``: the length of the dataset.
    * ``unreadable``: entries that became unreadable later.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        processor: the media processor. None for a model that reads only text.
        read: parses a row, such as ``read_record`` with its ``columns`` filled in.

    Attributes:
        first_problem: reason why the first row was left out. Empty if none was.
    """

    feeds_rewards: ClassVar[bool] = False
    """Reward functions get the columns that no prompt has."""
    entry: ClassVar[str] = "example"
    """The word for an entry."""
    purpose: ClassVar[str] = "examples"
    """What the token cache stores."""
    columns: ClassVar[Mapping[str, str]]
    """Type code of each stored column."""
    _order: np.ndarray
    _ids: Sequence[str]
    _source_names: Sequence[str]

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any,
        read: Callable[..., Any],
    ) -> None:
        self.config = config
        self.encoder = ChatEncoder(config, tokenizer, processor)
        if not config.sources:
            raise ConfigError(
                "data.sources is empty; name a file, a folder, a data set or module:function"
            )
        self._read = read
        self._rows: list[Rows] = []
        self._names = [source_name(source) for source in config.sources]
        self._roots = [media_root(config.media.root, source.path) for source in config.sources]
        self.counts: Counter[str] = Counter(truncated=0, overlong=0, special_tokens=0)
        self.first_problem = ""
        # The number of each data source, in the order of their first rows.
        self._numbers: dict[str, int] = {}
        # Growing arrays, or arrays mapped from a file.
        self._kept: dict[str, Any] = {name: array(code) for name, code in self.columns.items()}
        self._fetcher: Fetcher[T] = Fetcher(self.__getitem__, self.encoder.media)
        self._unknown = UnknownText(tokenizer)

    def _fill(self, options: Mapping[str, object], seed: int) -> None:
        """Encode all rows, or restore them from the token cache.

        Args:
            options: settings that determine the tokens, besides those of the data.
            seed: seed of the order of mixed sources.

        Raises:
            DataError: a source cannot be read, has a bad row that must not be skipped, or has no
                rows left.
        """
        tokenizer, processor = self.encoder.tokenizer, self.encoder.processor
        cache = token_cache_of(self.config, tokenizer, self.purpose, options, processor)
        names: Sequence[str]
        if cache is None:
            lengths, names, _ = self._encode()
        else:
            with cache.locked():
                lengths, names = self._cached(cache)
        # Outside the lock: it depends on settings that the cache ignores, such as weights.
        self._order = self._mixed(lengths, seed)
        # Names of a cache are unique already, and stay in their file.
        if self.config.blend != "concat" or not isinstance(names, Names):
            names = unique_names([names[k] for k in self._order])
        self._ids = names
        self.counts[f"{self.entry}s"] = len(self._order)
        self._source_names = self.data_sources

    def _add(self, source: int, chunk: Sequence[tuple[int, Any]]) -> list[str]:
        """Encode numbered records of a source, and store those that fit. Return their names."""
        raise NotImplementedError

    def __getitem__(self, i: int) -> T:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._order)

    def _stored(self, i: int) -> int:
        """Return the number of entry ``i`` among the stored rows. Raises ``IndexError``."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.entry} {i} of {len(self)}")
        return int(self._order[i])

    def _part(self, ends: str, k: int) -> slice:
        """Return the part of entry ``k`` in columns whose ends are in the column ``ends``."""
        column = self._kept[ends]
        return slice(int(column[k - 1]) if k else 0, int(column[k]))

    def _sizes(self, ends: str) -> np.ndarray:
        """Return the size of each part whose end is in the column ``ends``."""
        return np.diff(np.asarray(self._kept[ends], dtype=np.int64), prepend=0)

    def _record(self, source: int, row: int) -> Any:
        """Return row ``row`` of source ``source``. Raises ``MalformedRow``."""
        rows, reads = self._rows[source], self.encoder.reads
        where, given = rows.where(row), recorded(rows[row])
        return self._read(given, where=where, reads=reads, root=self._roots[source])

    def _place(self, k: int) -> tuple[int, int]:
        """Return source and row of stored entry ``k``."""
        return int(self._kept["source"][k]), int(self._kept["row"][k])

    def _where(self, source: int, row: int) -> str:
        """Return the location of row ``row`` of source ``source``, for messages."""
        return self._rows[source].where(row)

    def _data_source(self, record: ParsedRow, source: int) -> int:
        """Return the number of the data source of a record of source ``source``."""
        name = record.data_source or self._names[source]
        return self._numbers.setdefault(name, len(self._numbers))

    def _name(self, identifier: str, source: int, row: int) -> str:
        """Return the name of a row with ``identifier``, which may be empty."""
        return identifier or f"{self._names[source]}/{row}"

    def _chunks(self, source: int) -> Iterator[list[tuple[int, Any]]]:
        """Yield chunks of numbered records of a source.

        A bad row is an error or is counted, depending on ``data.bad_rows``.
        """
        chunk: list[tuple[int, Any]] = []
        for row in range(len(self._rows[source])):
            # Before the row is read: a bad row is one of all rows, too.
            self.counts["rows"] += 1
            try:
                chunk.append((row, self._record(source, row)))
            except MalformedRow as error:
                self._skip(error)
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
        yield chunk

    def _skip(self, error: MalformedRow) -> None:
        """Raise ``error`` if ``data.bad_rows`` is ``error``, else count a malformed row."""
        if self.config.bad_rows == "error":
            raise with_way_out(error)
        self.counts["malformed"] += 1
        self.first_problem = self.first_problem or str(error)

    def lose(self, error: MalformedRow) -> None:
        """Raise ``error`` if ``data.bad_rows`` is ``error``, else count an unreadable entry.

        The media of such a row were readable on construction.
        """
        if self.config.bad_rows == "error":
            raise with_way_out(error)
        self.counts["unreadable"] += 1

    def _made(
        self, rows: Sequence[A], made: Sequence[list[str] | MalformedRow]
    ) -> list[tuple[A, list[str]]]:
        """Return the pairs of ``rows`` and ``made`` without errors. Errors go to ``_skip``."""
        pairs: list[tuple[A, list[str]]] = []
        for row, result in zip(rows, made):
            if isinstance(result, MalformedRow):
                self._skip(result)
            else:
                pairs.append((row, result))
        return pairs

    def _overlong(self, where: str, tokens: int, limit: int, setting: str) -> None:
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

    def _prompts(
        self, chunk: Sequence[tuple[int, ParsedRow]]
    ) -> list[tuple[int, ParsedRow, str, str, list[int]]]:
        """Return numbers, records and prompts of the rows whose prompt can be encoded.

        A prompt is its text, the text with the placeholders of media, and its tokens.
        """
        shown: list[tuple[int, ParsedRow, str]] = []
        for number, record in chunk:
            try:
                shown.append((number, record, self.encoder.prompt(record)))
            except MalformedRow as error:
                self._skip(error)
        expanded = self.encoder.expanded([(record, [text]) for _, record, text in shown])
        good = self._made(shown, expanded)
        # one call for all: a fast tokenizer encodes them in parallel
        encoded = self.encoder.encode_prompts([full for _, (full,) in good])
        return [(*row, full, ids) for (row, (full,)), ids in zip(good, encoded)]

    def _encode(self) -> tuple[list[int], list[str], list[Indexes]]:
        """Encode every row.

        Return the number of stored rows per source, their names, and the indexes of the files.
        """
        indexes: list[Indexes] = [{} for _ in self.config.sources]
        self._open(indexes)
        lengths: list[int] = []
        names: list[str] = []
        for s in range(len(self._rows)):
            start = len(names)
            for chunk in self._chunks(s):
                names += self._add(s, chunk)
                # After the encoding, which reads tools, weights and fields of templates.
                for _, record in chunk:
                    note_unread(self.counts, record.row, s)
            lengths.append(len(names) - start)
        return lengths, names, indexes

    def _cached(self, cache: ColumnCache) -> tuple[list[int], Sequence[str]]:
        """Restore the rows from ``cache``, or encode them and write it.

        Return the number of stored rows per source, and their names.
        """
        entry = cache.read()
        if entry is not None:
            return self._restore(entry)
        before = stamps(self.config)
        lengths, names, indexes = self._encode()
        # a file that changed during reading must not be cached under the digest of one version
        if stamps(self.config) == before:
            cache.write(self._entry(lengths, names, indexes))
        return lengths, names

    def _entry(self, lengths: list[int], names: list[str], indexes: Sequence[Indexes]) -> Entry:
        """Return what the cache stores, which ``_restore`` reads."""
        columns = {f"kept/{name}": np.asarray(column) for name, column in self._kept.items()}
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
            "data_sources": list(self._numbers),
            "lengths": lengths,
            "unique": len(set(names)) == len(names),
            "files": files,
        }
        return Entry(columns, names, facts)

    def _restore(self, entry: Entry) -> tuple[list[int], Sequence[str]]:
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
        self._kept = {name: columns[f"kept/{name}"] for name in self._kept}
        # _open() has counted malformed rows, which the stored counts contain
        self.counts.clear()
        self.counts.update(facts["counts"])
        self.first_problem = facts["first_problem"]
        self._numbers = {name: k for k, name in enumerate(facts["data_sources"])}
        return facts["lengths"], entry.names if facts["unique"] else list(entry.names)

    def _open(self, indexes: Sequence[Indexes]) -> None:
        self._rows = [
            open_source(source, self.config.bad_rows, index)
            for source, index in zip(self.config.sources, indexes)
        ]
        self.counts["malformed"] += sum(rows.malformed for rows in self._rows)
        problems = [rows.first_problem for rows in self._rows]
        self.first_problem = next(filter(None, problems), "")
        if self.config.judgement is not None:
            self._rows = [JudgementRows(rows, self.config) for rows in self._rows]

    def _mixed(self, lengths: Sequence[int], seed: int) -> np.ndarray:
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

    def fetch(self, indices: Sequence[int]) -> list[T | MalformedRow]:
        """Return the entries at ``indices``, with media decoded concurrently.

        An unreadable entry is returned as its ``MalformedRow`` error.
        """
        return self._fetcher.fetch(indices)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start decoding the media of the entries at ``indices`` for the next ``fetch``."""
        self._fetcher.prefetch(indices)

    def first_with(self, doubt: str) -> str:
        """Return the location of the first row that was counted under ``doubt``.

        See ``datasets.row_warnings`` for the counts.
        """
        return self._where(*first_place(self.counts, doubt))

    @property
    def unread(self) -> dict[str, dict[str, int]]:
        """Return the columns that nothing has read with their numbers of rows, by source."""
        sources = [source.path for source in self.config.sources]
        return {sources[s]: columns for s, columns in unread_columns(self.counts).items()}

    @property
    def ids(self) -> Sequence[str]:
        """Return the unique id of each entry, in the order of the dataset."""
        return self._ids

    @property
    def data_sources(self) -> Sequence[str]:
        """Return the names of all data sources of the entries, in the order of their rows."""
        return tuple(self._numbers)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest entry."""
        return int(self._sizes("ends").max())

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


Blend = Literal["concat", "sample", "sample_all"]
Order: TypeAlias = "np.ndarray"
"""Positions of rows, ``[N]`` int64."""


def blend(
    lengths: Sequence[int], weights: Sequence[float], mode: Blend, *, shuffle: bool, seed: int
) -> Order:
    """Return the order of the mixed dataset, as positions in the concatenation of all sources.

    Args:
        lengths: number of rows of each source.
        weights: sampling weight of each source. Ignored by ``concat``.
        mode: ``concat`` takes every row once. ``sample`` samples the source of each row by weight
            until the first source is used up. ``sample_all`` continues until every source is used
            up, and repeats sources that end earlier.
        shuffle: if True, each pass over a sampled source is in random order. A source that is not
            used up then gives a random subset of its rows.
        seed: seed of the sampling and the shuffling.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if mode == "concat" or len(lengths) == 1:
        return np.arange(starts[-1], dtype=np.int64)
    picks = _picks(lengths, weights, mode, seed)
    order = np.empty(len(picks), dtype=np.int64)
    for source, length in enumerate(lengths):
        where = np.flatnonzero(picks == source)
        passes = -(-len(where) // length)
        rows = [np.empty(0, dtype=np.int64)]
        for k in range(passes):
            # Each pass has a generator, so that it does not depend on the passes before it.
            chance = numpy_generator(seed, RandomStream.MIX_ROWS, source, k)
            rows.append(chance.permutation(length) if shuffle else np.arange(length))
        order[where] = starts[source] + np.concatenate(rows)[: len(where)]
    return order


def _picks(lengths: Sequence[int], weights: Sequence[float], mode: Blend, seed: int) -> np.ndarray:
    """Return the source of each row, ``[N]``, ending with the row that ends the mix."""
    share = np.asarray(weights, dtype=np.float64)
    share = share / share.sum()
    chance = numpy_generator(seed, RandomStream.MIX_SOURCES)
    picks = np.empty(0, dtype=np.int64)
    while True:
        # samples in blocks, because the end of the mix is known only afterwards
        block = chance.choice(len(lengths), size=2 * max(lengths) + 64, p=share)
        picks = np.concatenate([picks, block])
        # number of picks after which each source is used up
        used_up = []
        for source, length in enumerate(lengths):
            places = np.flatnonzero(picks == source)
            if len(places) >= length:
                used_up.append(int(places[length - 1]) + 1)
        if mode == "sample" and used_up:
            return picks[: min(used_up)]
        if len(used_up) == len(lengths):
            return picks[: max(used_up)]
