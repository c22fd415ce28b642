"""Examples for supervised fine-tuning: tokens, and which of them are the assistant's to learn.

A turn's tokens are found by templating the conversation up to it twice, with the assistant's turn opened and with it said: what
the second adds, up to the template's end-of-turn token, is what the policy would have sampled. Templates that mark the
assistant's text themselves (``{% generation %}``) are taken at their word.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightrft.config.data import DataConfig
from lightrft.datasets.cache_key import token_cache_of
from lightrft.datasets.chat_encoder import Encoder, check_template, prefix_error
from lightrft.datasets.media.items import marks
from lightrft.datasets.prefetch import Fetcher
from lightrft.datasets.prompt_dataset import Columns, Sources
from lightrft.datasets.row_parser import Message, Record
from lightrft.datasets.row_tables import BadRow
from lightrft.datasets.row_warnings import UnknownText, first_place, note_text
from lightrft.types import Media

COLUMNS = {"tokens": "i", "trained": "B", "ends": "Q", "split": "Q"}
"""What is kept of examples: their tokens laid end to end, which of them are trained, where each ends and its prompt does."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(slots=True)
class Example:
    """``prompt_ids`` up to the first token to learn, ``response_ids`` from there on, ``trained[t]`` whether response token t is
    the assistant's own (its words and the token that ends its turn; never a placeholder). Each part has its own media."""

    prompt_ids: list[int]
    response_ids: list[int]
    trained: list[bool]
    id: str
    prompt_media: Media = field(default_factory=dict)
    response_media: Media = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    """What becomes one example: the record and, for each turn to learn, the text before it and the text with it."""

    row: int
    record: Record
    turns: list[tuple[str, str]]
    messages: list[Message]
    name: str = ""
    items: tuple[int, ...] = ()


class SFTDataset:
    """The examples of ``config``, encoded once.

    ``counts``: ``rows`` read, ``malformed`` (skipped), ``overlong`` (more than ``max_tokens``, dropped), ``truncated`` (cut at
    the end: nothing then teaches the model to stop there), ``special_tokens`` (examples that spell one as text), ``examples``.
    Of a row with a response only the response is learned; of a conversation the assistant's turns that ``turns`` names. Media
    are as in ``PromptDataset``; nothing with media behind the cut is truncated.

    Raises ``DataError`` for rows that cannot be used and when nothing is left, ``ModelError`` when several turns are to share a
    row under a chat template without the prefix property, or the tokenizer lacks an eos token.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, *, max_tokens: int, seed: int, processor: Any = None) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.encoder = Encoder(config, tokenizer, processor)
        self._sources = Sources(config, self.encoder.reads)
        self.counts = self._sources.counts
        self.counts.update(truncated=0, overlong=0, special_tokens=0)
        self._checked = False
        self._marks = self.encoder.chat and bool(GENERATION.search(str(tokenizer.chat_template)))
        self._kept: Columns = {name: array(kind) for name, kind in COLUMNS.items()}
        self._media: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._fetcher = Fetcher(self.__getitem__, self.encoder.media)
        self._unknown = UnknownText(tokenizer)
        options = {"max_tokens": max_tokens}
        cache = token_cache_of(config, tokenizer, "examples", options, processor)
        self._order, self._ids = self._sources.read(self._add, self._kept, cache, seed)
        self.counts["examples"] = len(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> Example:
        if not -len(self) <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        k = int(self._order[i])
        tokens, ends = self._kept["tokens"], self._kept["ends"]
        start, split, end = ends[k - 1] if k else 0, self._kept["split"][k], ends[k]
        example = Example(
            prompt_ids=tokens[start:split].tolist(),
            response_ids=tokens[split:end].tolist(),
            trained=[bool(t) for t in self._kept["trained"][split:end]],
            id=self._ids[i],
        )
        if self.encoder.media is not None and k in self._media:
            source, row, numbers = self._media[k]
            record = self._sources.record(source, row)
            parts = (example.prompt_ids, example.response_ids)
            media = self.encoder.media.split([record.media[n] for n in numbers], parts, record.where)
            example.prompt_media, example.response_media = media
        return example

    def fetch(self, indices: Sequence[int]) -> list[Example | BadRow]:
        """The examples at ``indices``, their media decoded side by side; or why one cannot be read any more."""
        return self._fetcher.fetch(indices)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to decode the media of the examples at ``indices``, for the next ``fetch``."""
        self._fetcher.prefetch(indices)

    def lose(self, error: BadRow) -> None:
        """Count an example that ``fetch`` could not read, or raise ``error`` if that is what is set."""
        self._sources.lose(error)

    @property
    def first_problem(self) -> str:
        """Why the first row that was left out was; empty when none was."""
        return self._sources.first_problem

    def first_with(self, doubt: str) -> str:
        """Return where the first row is that was counted under ``doubt`` (see ``datasets.doubts``)."""
        return self._sources.where(*first_place(self.counts, doubt))

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return int(np.diff(np.asarray(self._kept["ends"], dtype=np.int64), prepend=0).max())

    def _add(self, source: int, chunk: Sequence[tuple[int, Record]]) -> list[str]:
        """Encode records and keep what fits; the names of the examples kept."""
        rows: list[list[_Part]] = []
        for row, record in chunk:
            try:
                made = self._parts(row, record)
            except BadRow as error:
                self._sources.skip(error)
                continue
            stem = record.id or f"{self._sources.names[source]}/{row}"
            for k, part in enumerate(made):
                part.name = stem if len(made) == 1 else f"{stem}#{k + 1}"
            rows.append(made)
        parts = self._expanded(rows)
        texts = list(dict.fromkeys(t for part in parts for turn in part.turns for t in turn))
        ids = dict(zip(texts, self.encoder.encode(texts)))
        return [part.name for part in parts if self._keep(source, part, *self._tokens_of(part, ids))]

    def _expanded(self, rows: Sequence[list[_Part]]) -> list[_Part]:
        """The parts of each row with the text of its media in their turns; without those whose media cannot be read."""
        shown = [(made[0].record, [t for part in made for turn in part.turns for t in turn]) for made in rows]
        parts: list[_Part] = []
        for made, texts in self._sources.made(rows, self.encoder.expanded(shown)):
            whole = iter(texts)
            for part in made:
                last = part.turns[-1][1] if self.encoder.chat else "".join(part.turns[-1])
                part.items = tuple(number for _, number in marks(last)) if part.record.media else ()
                part.turns = [(next(whole), next(whole)) for _ in part.turns]
            parts += made
        return parts

    def _keep(self, source: int, part: _Part, ids: list[int], trained: list[bool]) -> bool:
        """Store an example if it fits or is cut to fit."""
        kept = self._kept
        if part.items:
            trained = [t and i not in self.encoder.placeholders for t, i in zip(trained, ids)]
            if not any(trained):
                self._sources.skip(_no_answer(part.record))
                return False
        if len(ids) > self.max_tokens:
            cut = self.config.overlong == "truncate" and self.encoder.placeholders.isdisjoint(ids[self.max_tokens :])
            if not cut or not any(trained[: self.max_tokens]):
                self._sources.overlong(part.record.where, len(ids), self.max_tokens, "max_tokens")
                return False
            self.counts["truncated"] += 1
            ids, trained = ids[: self.max_tokens], trained[: self.max_tokens]
        self.counts["special_tokens"] += any(self.encoder.is_shielded(t) for t in part.turns[-1])
        if part.items:
            self._media[len(kept["ends"])] = (source, part.row, part.items)
        kept["split"].append(len(kept["tokens"]) + trained.index(True))
        kept["tokens"].extend(ids)
        kept["trained"].extend(trained)
        kept["ends"].append(len(kept["tokens"]))
        text = "".join(t for turn in part.turns for t in turn)
        note_text(self.counts, self._unknown.count(text, ids), len(ids), source, part.row)
        return True

    def _parts(self, row: int, record: Record) -> list[_Part]:
        """The examples of a record. Raises ``BadRow`` when there is no answer to learn."""
        if not self.encoder.chat:
            answer = record.answer
            if answer is None or not answer.strip():
                raise _no_answer(record)
            answer = answer.removesuffix(self.encoder.tokenizer.eos_token or "")
            prompt = self.encoder.prompt(record)
            return [_Part(row, record, [(prompt, self.encoder.shield(answer, answer=True))], [])]
        messages = record.messages
        first = 0 if record.response is None else record.asked
        spoken = [k for k, m in enumerate(messages) if k >= first and m["role"] == "assistant"]
        if not spoken or not any(messages[k]["content"].strip() or len(messages[k]) > 2 for k in spoken):
            raise _no_answer(record)
        if spoken[0] == 0:
            raise BadRow(f"{record.where}: the conversation begins with the assistant")
        shown = self.encoder.conversation(record)
        ahead = len(shown) - len(messages)
        turns = [self._turn(shown, k + ahead, record.where) for k in spoken]
        if self.config.turns == "each":
            return [_Part(row, record, [turn], []) for turn in turns]
        if self.config.turns == "last":
            return [_Part(row, record, turns[-1:], [])]
        if self._marks and record.response is None and not record.media and not self.encoder.is_shielded(turns[-1][1]):
            return [_Part(row, record, turns, shown[: spoken[-1] + ahead + 1])]
        if len(turns) > 1 and not self._checked:
            check_template(self.encoder.tokenizer, self.config.chat_options)
            self._checked = True
        return [_Part(row, record, turns, [])]

    def _turn(self, messages: list[Message], k: int, where: str) -> tuple[str, str]:
        """The text that asks for message ``k``, and the text that ends with it."""
        asking = self.encoder.render(messages[:k], where, generate=True)
        return asking, self.encoder.render(messages[: k + 1], where)

    def _tokens_of(self, part: _Part, known: dict[str, list[int]]) -> tuple[list[int], list[bool]]:
        """``[T]`` tokens of an example and which of them are trained, ending with the last one that is."""
        if not self.encoder.chat:
            prompt, answer = part.turns[0]
            asked, said = self.encoder.with_start(known[prompt]), [*known[answer], self.encoder.eos]
            return [*asked, *said], [False] * len(asked) + [True] * len(said)
        if part.messages:
            ids, trained = self.encoder.marked(part.messages)
            if any(trained):
                last = len(trained) - trained[::-1].index(True)
                return ids[:last], trained[:last]
        return self._by_turns(part, known)

    def _by_turns(self, part: _Part, known: dict[str, list[int]]) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        trained: list[bool] = []
        before, last, closed = "", 0, False
        for asking, said in part.turns:
            ids = self._extend(ids, before, asking, known)
            trained += [False] * (len(ids) - len(trained))
            start = len(ids)
            ids = self._extend(ids, asking, said, known)
            ends = [k for k in range(start, len(ids)) if ids[k] in self.encoder.special_ids - self.encoder.placeholders]
            closed = bool(ends)
            last = ends[-1] + 1 if closed else len(ids)
            trained += [True] * (last - start) + [False] * (len(ids) - last)
            before = said
        ids, trained = ids[:last], trained[:last]
        if not closed:  # a template whose turns end in text alone: without eos the model would never learn to stop
            ids, trained = [*ids, self.encoder.eos], [*trained, True]
        return ids, trained

    def _extend(self, ids: list[int], shorter: str, longer: str, known: dict[str, list[int]]) -> list[int]:
        """``ids`` of ``shorter`` continued to ``longer``.

        Where a merge across the border would change tokens already there, the rest is encoded by itself: the tokens that were
        asked with stay as they are, just as in sampling. Raises ``ModelError`` when the text itself is different.
        """
        if known[longer][: len(ids)] == ids:
            return known[longer]
        if not longer.startswith(shorter):
            raise prefix_error(self.encoder.tokenizer, self.encoder.unshield(shorter), self.encoder.unshield(longer))
        return [*ids, *self.encoder.encode([longer[len(shorter) :]])[0]]


def _no_answer(record: Record) -> BadRow:
    have = ", ".join(record.row)
    return BadRow(f"{record.where}: no answer to learn from; the row has: {have}. Name its column in data.columns.response")
