"""Encode texts, token ids and conversations of requests as prompts and responses."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.data import MediaConfig, SFTDataConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.media.items import marks
from lightrft.datasets.row_parser import ParsedRow, read_conversation
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.turns import TurnEncoder
from lightrft.models.processors import Processor
from lightrft.types import Media, Prompt
from lightrft.utils.errors import DataError
from lightrft.workers.scoring.reward_wire import checked_ids


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to score.

    Attributes:
        prompt: The prompt with its media.
        response: Token ids of the response.
        media: Media of the response.
    """

    prompt: Prompt
    response: list[int]
    media: Media = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of prompt and response."""
        return len(self.prompt.token_ids) + len(self.response)


class SampleEncoder:
    """Encodes the items of requests. Every method may be called from several threads.

    Args:
        tokenizer: Tokenizer of the model.
        processor: Media processor of the model. ``None`` for a model that reads text alone.
        media: Settings of media: what requests may name, and limits.
        vocabulary: Number of token ids that the model knows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: Processor | None,
        media: MediaConfig,
        vocabulary: int,
    ) -> None:
        data = SFTDataConfig(media=media, turns="last")
        self.encoder = ChatEncoder(data, tokenizer, processor)
        self.turns = TurnEncoder(data, self.encoder)
        self.vocabulary = vocabulary
        self._ends = frozenset((self.encoder.eos, *tokenizer.all_special_ids))
        # a tokenizer that switches ``split_special_tokens`` changes for all threads
        self._lock = threading.Lock()

    def item(self, value: object, where: str) -> Sample:
        """Return the sample of a text, of token ids, or of messages that end with the assistant.

        A text is encoded as it is: its spellings of special tokens are special tokens.

        Args:
            value: Text, token ids or messages.
            where: Name of the item, for messages of errors.

        Raises:
            DataError: It is none of them, or cannot be read.
        """
        if isinstance(value, str):
            return self._cut(self._ids(value), where)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return self.conversation(value, where)
        return self._cut(checked_ids(value, self.vocabulary, where), where)

    def query(self, text: object, prompt: object, where: str) -> Sample:
        """Return the sample of a rendered conversation, as OpenRLHF sends it.

        Args:
            text: Prompt and response. An end token is added where no special token ends it.
            prompt: The beginning of ``text`` that is the prompt; ``None`` if unknown.
            where: Name of the item, for messages of errors.

        Raises:
            DataError: ``text`` is no text, or does not begin with ``prompt``.
        """
        if not isinstance(text, str) or not text:
            raise DataError(f"{where} must be a text of prompt and response")
        ids = self._ids(text)
        if ids[-1] not in self._ends:
            ids = [*ids, self.encoder.eos]
        if not isinstance(prompt, str) or not prompt:
            return self._cut(ids, where)
        asked = self._ids(prompt)
        if ids[: len(asked)] != asked or len(asked) == len(ids):
            raise DataError(f"{where} does not begin with the tokens of its prompt; leave it out")
        return Sample(Prompt("", asked), ids[len(asked) :])

    def pair(self, asked: object, answer: object, where: str) -> Sample:
        """Return the sample of a question and an answer.

        Args:
            asked: Text, content parts, or an object with ``content``.
            answer: As ``asked``.
            where: Name of the pair, for messages of errors.

        Raises:
            DataError: One of them cannot be read.
        """
        content = [v.get("content") if isinstance(v, Mapping) else v for v in (asked, answer)]
        roles = ("user", "assistant")
        messages = [{"role": r, "content": c} for r, c in zip(roles, content, strict=True)]
        return self.conversation(messages, where)

    def conversation(self, messages: Sequence[Mapping[str, Any]], where: str) -> Sample:
        """Return the sample of a conversation: the last message is the response.

        Args:
            messages: Messages with ``role`` and ``content``, which is a text or a list of parts.
            where: Name of the conversation, for messages of errors.

        Raises:
            DataError: A message or its media cannot be read, or the assistant is not the last.
        """
        record = read_conversation(messages, where, self.encoder.reads)
        if record.messages[-1]["role"] != "assistant":
            raise MalformedRow(
                f"{where}: the last message is of {record.messages[-1]['role']!r}; end with the "
                "assistant's, which is scored"
            )
        (part,) = self.turns.parts(record)
        part.start = part.turns[0][0]
        numbers = [n for _, n in marks(part.turns[0][1] if self.encoder.chat else part.start)]
        (texts,) = self.encoder.expanded([self.turns.texts([part])])
        if isinstance(texts, MalformedRow):
            raise texts
        self.turns.expand([part], texts)
        with self._lock:
            known = self.turns.encode([part])
            ids, _ = self.turns.tokens(part, known)
            asked = self.turns.prompt_tokens(part, known)
        prompt, response = Prompt("", asked), ids[len(asked) :]
        if self.encoder.media is None or not numbers:
            return Sample(prompt, response)
        return self._with_media(record, Sample(prompt, response), numbers)

    def _with_media(self, record: ParsedRow, sample: Sample, numbers: Sequence[int]) -> Sample:
        """Return ``sample`` with the items ``numbers`` of ``record``."""
        assert self.encoder.media is not None
        items = [record.media[n] for n in numbers]
        parts = (sample.prompt.token_ids, sample.response)
        sample.prompt.media, media = self.encoder.media.split(items, parts, record.where)
        return Sample(sample.prompt, sample.response, media)

    def _ids(self, text: str) -> list[int]:
        with self._lock:
            encoded = self.encoder.tokenizer(text, add_special_tokens=False, verbose=False)
            start = self.encoder.start
        ids = encoded["input_ids"]
        return ids if ids[: len(start)] == start else [*start, *ids]

    def _cut(self, ids: list[int], where: str) -> Sample:
        """Return a sample whose response is the last token."""
        if len(ids) < 2:
            raise DataError(f"{where} has {len(ids)} tokens; a prompt and a response need two")
        return Sample(Prompt("", ids[:-1]), ids[-1:])
