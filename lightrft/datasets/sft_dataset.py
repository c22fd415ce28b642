"""Examples for supervised fine-tuning: tokens, and the mask of tokens to train on.

The tokens of a turn are the difference between two renderings of the conversation. The first ends
with the opened assistant turn, and the second includes the turn. The new tokens up to the
end-of-turn token are the tokens that the policy would have sampled. If the template marks assistant
text itself (``{% generation %}``), its marks are used.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightrft.config.data import DataConfig
from lightrft.datasets.cache_key import token_cache_of
from lightrft.datasets.chat_encoder import ChatEncoder, check_template, prefix_error
from lightrft.datasets.media.items import marks
from lightrft.datasets.prefetch import Fetcher
from lightrft.datasets.prompt_dataset import Columns, EncodedDataset, Sources
from lightrft.datasets.row_parser import Message, ParsedRow
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_warnings import UnknownText, note_text
from lightrft.types import Media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = {"tokens": "i", "trained": "B", "ends": "Q", "split": "Q"}
"""Stored columns of the examples.

They are the concatenated tokens, the training mask, the end of each example and the end of each
prompt.
"""
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(slots=True)
class Example:
    """One training example.

    Args:
        prompt_ids: tokens up to the first token to train on.
        response_ids: the remaining tokens.
        trained: mask ``[len(response_ids)]``. True for the assistant's words and its end-of-turn
            token, never for a media placeholder.
        id: name of the example.
        prompt_media: media of ``prompt_ids``.
        response_media: media of ``response_ids``.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    trained: list[bool]
    id: str
    prompt_media: Media = field(default_factory=dict)
    response_media: Media = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    """The source of one example.

    ``turns`` has the texts before and after each turn to train on.
    """

    row: int
    record: ParsedRow
    turns: list[tuple[str, str]]
    messages: list[Message]
    name: str = ""
    items: tuple[int, ...] = ()

    @property
    def texts(self) -> list[str]:
        """Return the texts of all turns, in order."""
        return list(itertools.chain.from_iterable(self.turns))


class SFTDataset(EncodedDataset[Example]):
    """The examples of ``config``, encoded once.

    A row with a response is trained on the response only. A conversation is trained on the
    assistant turns that ``turns`` selects. Media are loaded as in ``PromptDataset``. An example is
    not truncated if media would be cut off.

    ``counts`` contains:

    * ``rows``: rows read.
    * ``malformed``: rows skipped.
    * ``overlong``: examples dropped because they exceed ``max_tokens``.
    * ``truncated``: examples cut at the end. They do not teach the model to stop there.
    * ``special_tokens``: examples that spell a special token as text.
    * ``examples``: the length of the dataset.

    Args:
        config: the settings of the data.
        tokenizer: the tokenizer, with its chat template.
        max_tokens: largest number of tokens of an example.
        seed: seed of the order of mixed sources.
        processor: the media processor. None for a model that reads only text.

    Raises:
        DataError: a row cannot be used, or no example is left.
        ModelError: the chat template lacks the prefix property although turns share a sequence, or
            the tokenizer has no EOS token.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        seed: int,
        processor: Any = None,
    ) -> None:
        self.config = config
        self.max_tokens = max_tokens
        self.encoder = ChatEncoder(config, tokenizer, processor)
        self._sources = Sources(config, self.encoder.reads)
        self.counts = self._sources.counts
        self.counts.update(truncated=0, overlong=0, special_tokens=0)
        self._checked = False
        self._marks = self.encoder.chat and bool(GENERATION.search(str(tokenizer.chat_template)))
        self._kept: Columns = {name: array(kind) for name, kind in COLUMNS.items()}
        # Source, row and item numbers by stored example. Most have no media, so it is no column.
        self._media: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._fetcher = Fetcher(self.__getitem__, self.encoder.media)
        self._unknown = UnknownText(tokenizer)
        options = {"max_tokens": max_tokens}
        cache = token_cache_of(config, tokenizer, "examples", options, processor)
        self._order, self._ids = self._sources.read(self._add, self._kept, cache, seed)
        self.counts["examples"] = len(self._order)

    def __getitem__(self, i: int) -> Example:
        k, start = self._stored(i, "example")
        tokens, split, end = self._kept["tokens"], self._kept["split"][k], self._kept["ends"][k]
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
            media = self.encoder.media.split(
                [record.media[n] for n in numbers], parts, record.where
            )
            example.prompt_media, example.response_media = media
        return example

    def _add(self, source: int, chunk: Sequence[tuple[int, ParsedRow]]) -> list[str]:
        """Encode records and store the examples that fit. Return their names."""
        rows: list[list[_Part]] = []
        for row, record in chunk:
            try:
                made = self._parts(row, record)
            except MalformedRow as error:
                self._sources.skip(error)
                continue
            stem = record.id or f"{self._sources.names[source]}/{row}"
            for k, part in enumerate(made):
                part.name = stem if len(made) == 1 else f"{stem}#{k + 1}"
            rows.append(made)
        parts = self._expanded(rows)
        # each text once, in one call: turns of one conversation share their beginnings
        texts: dict[str, None] = {}
        for part in parts:
            texts |= dict.fromkeys(part.texts)
        ids = dict(zip(texts, self.encoder.encode(list(texts))))
        names = []
        for part in parts:
            tokens, trained = self._tokens_of(part, ids)
            if self._keep(source, part, tokens, trained):
                names.append(part.name)
        return names

    def _expanded(self, rows: Sequence[list[_Part]]) -> list[_Part]:
        """Return the parts of all rows, with the text of their media in the turns.

        Unreadable rows are left out.
        """
        shown: list[tuple[ParsedRow, list[str]]] = []
        for made in rows:
            own: list[str] = []
            for part in made:
                own += part.texts
            shown.append((made[0].record, own))
        parts: list[_Part] = []
        for made, texts in self._sources.made(rows, self.encoder.expanded(shown)):
            whole = iter(texts)
            for part in made:
                if part.record.media:
                    last = part.turns[-1][1] if self.encoder.chat else "".join(part.turns[-1])
                    part.items = tuple(number for _, number in marks(last))
                part.turns = [(next(whole), next(whole)) for _ in part.turns]
            parts += made
        return parts

    def _keep(self, source: int, part: _Part, ids: list[int], trained: list[bool]) -> bool:
        """Store an example if it fits or can be truncated. Return True if it was stored."""
        kept = self._kept
        placeholders = self.encoder.placeholders
        if part.items:
            # the model is not trained to write the placeholders of media
            trained = [t and i not in placeholders for t, i in zip(trained, ids)]
            if not any(trained):
                self._sources.skip(_no_answer(part.record))
                return False
        if len(ids) > self.max_tokens:
            # media cannot be cut: their placeholders must fit their features
            lost = ids[self.max_tokens :]
            may_cut = self.config.overlong_prompts == "truncate" and placeholders.isdisjoint(lost)
            # An example without a trained token would teach nothing.
            if not may_cut or not any(trained[: self.max_tokens]):
                self._sources.overlong(part.record.where, len(ids), self.max_tokens, "max_tokens")
                return False
            self.counts["truncated"] += 1
            ids = ids[: self.max_tokens]
            trained = trained[: self.max_tokens]
        self.counts["special_tokens"] += any(map(self.encoder.is_shielded, part.turns[-1]))
        if part.items:
            self._media[len(kept["ends"])] = (source, part.row, part.items)
        kept["split"].append(len(kept["tokens"]) + trained.index(True))
        kept["tokens"].extend(ids)
        kept["trained"].extend(trained)
        kept["ends"].append(len(kept["tokens"]))
        unknown = self._unknown.count("".join(part.texts), ids)
        note_text(self.counts, unknown, len(ids), source, part.row)
        return True

    def _parts(self, row: int, record: ParsedRow) -> list[_Part]:
        """Return the examples of a record.

        Raises ``MalformedRow`` if there is no response to train on.
        """
        if not self.encoder.chat:
            return [self._plain_part(row, record)]
        messages = record.messages
        first = 0 if record.response is None else record.asked
        own = range(first, len(messages))
        spoken = [k for k in own if messages[k]["role"] == "assistant"]
        # a message of more than role and content, such as tool calls, is an answer without text too
        answered = any(messages[k]["content"].strip() or len(messages[k]) > 2 for k in spoken)
        if not answered:
            raise _no_answer(record)
        if spoken[0] == 0:
            raise MalformedRow(f"{record.where}: the conversation begins with the assistant")
        shown = self.encoder.conversation(record)
        ahead = len(shown) - len(messages)  # 1 with the configured system message
        turns = []
        for k in spoken:
            # The text that asks for the message, and the text that ends with it.
            asking = self.encoder.render(shown[: k + ahead], record.where, generate=True)
            said = self.encoder.render(shown[: k + ahead + 1], record.where)
            turns.append((asking, said))
        if self.config.turns == "each":
            return [_Part(row, record, [turn], []) for turn in turns]
        if self.config.turns == "last":
            return [_Part(row, record, turns[-1:], [])]
        if self._marks_answers(record, turns):
            return [_Part(row, record, turns, shown[: spoken[-1] + ahead + 1])]
        # once is enough, since it depends on the template alone
        if len(turns) > 1 and not self._checked:
            check_template(self.encoder.tokenizer, self.config.chat_template_options)
            self._checked = True
        return [_Part(row, record, turns, [])]

    def _plain_part(self, row: int, record: ParsedRow) -> _Part:
        """Return the example of a record without a chat template."""
        answer = record.answer
        if answer is None or not answer.strip():
            raise _no_answer(record)
        # some datasets end a response with EOS, which _tokens_of appends
        answer = answer.removesuffix(self.encoder.tokenizer.eos_token or "")
        turn = (
            self.encoder.prompt(record),
            self.encoder.escape_special_tokens(answer, answer=True),
        )
        return _Part(row, record, [turn], [])

    def _marks_answers(self, record: ParsedRow, turns: Sequence[tuple[str, str]]) -> bool:
        """Return True if the template can mark the answers of ``record`` with ``generation``."""
        if not self._marks or record.response is not None or record.media:
            return False
        # the template knows nothing of spellings that are encoded as plain text
        return not self.encoder.is_shielded(turns[-1][1])

    def _tokens_of(self, part: _Part, known: dict[str, list[int]]) -> tuple[list[int], list[bool]]:
        """Return the tokens and training mask of an example, ``[T]``, up to the last True."""
        if not self.encoder.chat:
            prompt, answer = part.turns[0]
            asked, said = self.encoder.with_start(known[prompt]), [*known[answer], self.encoder.eos]
            return [*asked, *said], [False] * len(asked) + [True] * len(said)
        if part.messages:
            ids, trained = self.encoder.with_loss_mask(part.messages)
            if any(trained):
                last = len(trained) - trained[::-1].index(True)
                return ids[:last], trained[:last]
        return self._by_turns(part, known)

    def _by_turns(self, part: _Part, known: dict[str, list[int]]) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        trained: list[bool] = []
        before, last, closed = "", 0, False
        # an image in an answer does not end it
        closing = self.encoder.special_ids - self.encoder.placeholders
        for asking, said in part.turns:
            ids = self._extend(ids, before, asking, known)
            trained += [False] * (len(ids) - len(trained))
            start = len(ids)
            ids = self._extend(ids, asking, said, known)
            ends = [k for k in range(start, len(ids)) if ids[k] in closing]
            closed = bool(ends)
            # what follows, such as a line break of the template, is never sampled
            last = ends[-1] + 1 if closed else len(ids)
            trained += [True] * (last - start) + [False] * (len(ids) - last)
            before = said
        ids = ids[:last]
        trained = trained[:last]
        # the template's turns end without a special token: without eos the model would not learn
        # to stop
        if not closed:
            ids = [*ids, self.encoder.eos]
            trained = [*trained, True]
        return ids, trained

    def _extend(
        self,
        ids: list[int],
        shorter: str,
        longer: str,
        known: dict[str, list[int]],
    ) -> list[int]:
        """Return the tokens of ``longer``, which begin with ``ids``, the tokens of ``shorter``.

        If a merge across the border would change ``ids``, the rest is encoded separately. The
        prompt tokens then stay unchanged, as in sampling.

        Raises ``ModelError`` if ``longer`` does not begin with ``shorter``.
        """
        if known[longer][: len(ids)] == ids:
            return known[longer]
        if not longer.startswith(shorter):
            raise prefix_error(
                self.encoder.tokenizer,
                self.encoder.unescape_special_tokens(shorter),
                self.encoder.unescape_special_tokens(longer),
            )
        return [*ids, *self.encoder.encode([longer[len(shorter) :]])[0]]


def _no_answer(record: ParsedRow) -> MalformedRow:
    have = ", ".join(record.row)
    problem = f"{record.where}: no response to learn from; the row has"
    return MalformedRow(f"{problem}: {have}. Name its column in data.columns.response")
