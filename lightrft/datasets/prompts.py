"""Prompts for the policy: which there are, their tokens, and the order in which they are taken."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from lightrft.datasets.blending import blend, generator
from lightrft.datasets.encoding import Encoder
from lightrft.datasets.fetching import Fetcher
from lightrft.datasets.media import NOTHING, Reads
from lightrft.datasets.records import Record, read_record
from lightrft.datasets.rows import BadRow, Rows
from lightrft.datasets.settings import DataConfig
from lightrft.datasets.sources import media_root, open_source, source_name
from lightrft.types import Prompt
from lightrft.utils.errors import CheckpointError, ConfigError, DataError

A = TypeVar("A")
CHUNK = 1024
"""Rows that are encoded together."""


class Sources:
    """The sources of a ``DataConfig``, opened, with counts of what was read and left out."""

    def __init__(self, config: DataConfig, reads: Reads = NOTHING) -> None:
        if not config.sources:
            raise ConfigError("data.sources is empty; name a file, a folder, a data set or module:function")
        self.config = config
        self.rows: list[Rows] = [open_source(s, config.malformed) for s in config.sources]
        self.names = [source_name(s) for s in config.sources]
        self.reads = reads
        self._roots = [media_root(config.media.root, s.path) for s in config.sources]
        self.counts: Counter[str] = Counter(malformed=sum(r.malformed for r in self.rows))
        self.first_problem = ""

    def record(self, source: int, row: int) -> Record:
        """Row ``row`` of source ``source``. Raises ``BadRow``."""
        rows = self.rows[source]
        return read_record(rows[row], self.config.columns, rows.where(row), self.reads, self._roots[source])

    def chunks(self, source: int) -> Iterator[list[tuple[int, Record]]]:
        """Numbered records of a source, some at a time; bad rows are errors or counted, as set."""
        chunk: list[tuple[int, Record]] = []
        for row in range(len(self.rows[source])):
            self.counts["rows"] += 1
            try:
                chunk.append((row, self.record(source, row)))
            except BadRow as error:
                self.skip(error)
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
        yield chunk

    def skip(self, error: BadRow) -> None:
        """Count a bad row, or raise ``error`` if that is what is set."""
        if self.config.malformed == "error":
            raise error
        self.counts["malformed"] += 1
        self.first_problem = self.first_problem or str(error)

    def lose(self, error: BadRow) -> None:
        """Count a row whose media cannot be read any more, or raise ``error`` if that is what is set."""
        if self.config.malformed == "error":
            raise error
        self.counts["unreadable"] += 1

    def made(self, rows: Sequence[A], made: Sequence[list[str] | BadRow]) -> list[tuple[A, list[str]]]:
        """Those of ``rows`` that something could be made of, with what; the others as ``skip`` says."""
        pairs: list[tuple[A, list[str]]] = []
        for row, result in zip(rows, made):
            if isinstance(result, BadRow):
                self.skip(result)
            else:
                pairs.append((row, result))
        return pairs

    def overlong(self, where: str, tokens: int, limit: int, setting: str) -> None:
        """Count an overlong row that is dropped, or raise ``DataError`` if that is what is set."""
        problem = f"{where}: {tokens} tokens, more than {setting} = {limit}"
        if self.config.overlong == "error":
            raise DataError(f"{problem}. Raise it, or set data.overlong: drop or truncate")
        self.counts["overlong"] += 1
        self.first_problem = self.first_problem or problem

    def read(self, keep: Callable[[int, Sequence[tuple[int, Record]]], list[str]], seed: int) -> tuple[np.ndarray, list[str]]:
        """Pass the chunks of each source to ``keep(source, chunk)``, which names what it keeps; the order of all that was kept,
        and a name of its own for each, in that order. Raises ``DataError``."""
        kept = [[name for chunk in self.chunks(s) for name in keep(s, chunk)] for s in range(len(self.rows))]
        order = self.order([len(names) for names in kept], seed)
        names = [name for some in kept for name in some]
        return order, unique_names([names[k] for k in order])

    def order(self, lengths: Sequence[int], seed: int) -> np.ndarray:
        """The blend of what was kept of each source. Raises ``DataError``, with the counts, when a source has nothing left."""
        for spec, kept in zip(self.config.sources, lengths):
            if not kept:
                counts = ", ".join(f"{self.counts[k]} {k}" for k in ("rows", "malformed", "overlong"))
                why = f"; the first: {self.first_problem}" if self.first_problem else ""
                raise DataError(f"data.sources: nothing is left of {spec.path} ({counts}){why}")
        weights = [s.weight for s in self.config.sources]
        return blend(lengths, weights, self.config.blend, shuffle=self.config.shuffle, seed=seed)


class PromptDataset:
    """The prompts of ``config``, encoded once. Rows stay where they are and are read again when a prompt is asked for.

    ``counts``: ``rows`` read, ``malformed`` (skipped), ``overlong`` (dropped), ``truncated``, ``special_tokens`` (prompts that
    spell one as text), ``prompts`` (the length), ``unreadable`` (lost since). Picklable. With ``processor`` (see
    ``lightrft.models.processing``) rows may hold media: measured at once, decoded when a prompt is asked for, never truncated.

    Raises ``DataError`` for rows that cannot be used and when nothing is left, ``ConfigError`` and ``ModelError`` when the
    settings do not fit the tokenizer.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, *, seed: int, processor: Any = None) -> None:
        self.config = config
        self.encoder = Encoder(config, tokenizer, processor)
        self._sources = Sources(config, self.encoder.reads)
        self._fetcher = Fetcher(self.prompt, self.encoder.media)
        self.counts = self._sources.counts
        self.counts.update(truncated=0, overlong=0, special_tokens=0)
        self._tokens = array("i")
        self._ends = array("Q")
        self._source = array("H")
        self._row = array("Q")
        self._cuts: dict[int, int] = {}
        self._order, self._ids = self._sources.read(self._add, seed)
        self.counts["prompts"] = len(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> Prompt:
        return self.prompt(i)

    def prompt(self, i: int, *, media: bool = True) -> Prompt:
        """Prompt ``i``, without its media where they are not wanted. Raises ``BadRow`` for media that cannot be read any more."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"prompt {i} of {len(self)}")
        k = int(self._order[i])
        source = self._source[k]
        record = self._sources.record(source, self._row[k])
        text = self.encoder.prompt(record, self._cuts.get(k, 0))
        prompt = Prompt(
            id=self._ids[i],
            token_ids=self._tokens[self._ends[k - 1] if k else 0 : self._ends[k]].tolist(),
            text=self.encoder.readable(text),
            label=record.label,
            reference=record.reference if record.reference is not None else record.answer,
            data_source=record.data_source or self._sources.names[source],
            columns=record.columns,
        )
        if media:
            self.encoder.attach(prompt, record, text)
        return prompt

    @property
    def reads_media(self) -> bool:
        """Whether prompts may have media, which take time to decode and room to keep."""
        return self.encoder.media is not None

    def fetch(self, indices: Sequence[int]) -> list[Prompt | BadRow]:
        """The prompts at ``indices``, their media decoded side by side; or why one cannot be read any more."""
        return self._fetcher.fetch(indices)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to decode the media of the prompts at ``indices``, for the next ``fetch``."""
        self._fetcher.prefetch(indices)

    def lose(self, error: BadRow) -> None:
        """Count a prompt that ``fetch`` could not read, or raise ``error`` if that is what is set."""
        self._sources.lose(error)

    def places(self, ids: Sequence[str]) -> list[int]:
        """Where the prompts called ``ids`` stand. Raises ``CheckpointError`` for one that is not here."""
        wanted = set(ids)
        found = {name: i for i, name in enumerate(self._ids) if name in wanted}
        if missing := [name for name in ids if name not in found]:
            raise CheckpointError(f"the checkpoint holds answers to prompt {missing[0]!r}, which the data does not have")
        return [found[name] for name in ids]

    @property
    def ids(self) -> Sequence[str]:
        """The id of each prompt, all different, in the order of the data set."""
        return self._ids

    @property
    def first_problem(self) -> str:
        """Why the first row that was left out was; empty when none was."""
        return self._sources.first_problem

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(np.diff(np.asarray(self._ends, dtype=np.int64), prepend=0).max())

    def _add(self, source: int, chunk: Sequence[tuple[int, Record]]) -> list[str]:
        """Encode records and keep those that fit; the names of those kept."""
        shown: list[tuple[int, Record, str]] = []
        for row, record in chunk:
            try:
                shown.append((row, record, self.encoder.prompt(record)))
            except BadRow as error:
                self._sources.skip(error)
        good = self._sources.made(shown, self.encoder.expanded([(record, [text]) for _, record, text in shown]))
        names = []
        for ((row, record, text), _), ids in zip(good, self.encoder.encode_prompts([full for _, (full,) in good])):
            cut = 0
            if len(ids) > self.config.max_prompt_tokens:
                shorter = self._truncate(record, ids) if self.config.overlong == "truncate" and not record.media else None
                if shorter is None:
                    self._sources.overlong(record.where, len(ids), self.config.max_prompt_tokens, "data.max_prompt_tokens")
                    continue
                cut, ids = shorter
                self.counts["truncated"] += 1
            self.counts["special_tokens"] += self.encoder.is_shielded(text)
            if cut:
                self._cuts[len(self._ends)] = cut
            self._tokens.extend(ids)
            self._ends.append(len(self._tokens))
            self._source.append(source)
            self._row.append(row)
            names.append(record.id or f"{self._sources.names[source]}/{row}")
        return names

    def _truncate(self, record: Record, ids: list[int]) -> tuple[int, list[int]] | None:
        """The fewest characters to cut off the start of the last message, and the tokens then; None if no cut suffices."""
        limit = self.config.max_prompt_tokens
        text = self.encoder.last_message(record)
        low, high = 0, len(text) - 1  # the cut low is too short; every step keeps high as the shortest one known to fit
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

    def _at(self, record: Record, cut: int) -> list[int]:
        return self.encoder.encode_prompts([self.encoder.prompt(record, cut)])[0]


class PromptSampler:
    """An endless order over ``length`` prompts: epoch after epoch, each a permutation that depends on (seed, epoch) only."""

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        if length < 1:
            raise ValueError("there are no prompts to sample from")
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._known: tuple[int, np.ndarray] | None = None

    def order(self, epoch: int) -> np.ndarray:
        """``[length]`` the order of one epoch."""
        if self._known is None or self._known[0] != epoch:
            order = generator(self.seed, 2, epoch).permutation(self.length) if self.shuffle else np.arange(self.length)
            self._known = (epoch, order)
        return self._known[1]

    def next(self, count: int) -> list[int]:
        """The next ``count`` positions, across the end of an epoch where need be."""
        taken: list[int] = []
        while len(taken) < count:
            part = self.order(self.epoch)[self.position : self.position + count - len(taken)]
            taken += part.tolist()
            self.position += len(part)
            if self.position == self.length:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def peek(self, count: int) -> list[int]:
        """What ``next`` would give."""
        before = self.state_dict()
        ahead = self.next(count)
        self.load_state_dict(before)
        return ahead

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from ``state``. Raises ``CheckpointError`` when it cannot be of this data set."""
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position < self.length:
            raise CheckpointError(
                f"the checkpoint is at prompt {position} of epoch {epoch}, but the data has {self.length} prompts"
            )
        self.epoch, self.position = epoch, position


def unique_names(names: Sequence[str]) -> list[str]:
    """``names`` with ``~2``, ``~3`` ... behind those that came before."""
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
