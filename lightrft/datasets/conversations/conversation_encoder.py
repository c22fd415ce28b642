"""Encode single conversations by the template, tokenizer and processor of a model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.data import Columns, MediaConfig, SFTDataConfig, SpecialTokens
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.media.items import marks
from lightrft.datasets.row_parser import (
    continued,
    ends_with_assistant,
    read_conversation,
)
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.rows.row_reader import read_record
from lightrft.datasets.turns import TurnEncoder
from lightrft.types import Batch, Media, Prompt, Segments
from lightrft.utils.errors import ModelError
from lightrft.utils.lazy_imports import torch

EXCHANGE = ({"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "It is 2."})
"""A conversation that every template can render."""


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


def batch_of_answers(samples: Sequence[Sample], origins: Sequence[object]) -> Batch:
    """Collate ``samples`` of text responses. Those to one prompt are a group.

    Args:
        samples: The samples.
        origins: The conversation of each sample. Equal tokens of two conversations are two prompts,
            because their media may differ.
    """
    known: dict[tuple[object, ...], int] = {}
    distinct: list[Prompt] = []
    prompt_of = []
    for sample, origin in zip(samples, origins, strict=True):
        key = (origin, *sample.prompt.token_ids)
        if key not in known:
            known[key] = len(distinct)
            distinct.append(sample.prompt)
        prompt_of.append(known[key])
    return Batch(
        Segments.of_prompts(distinct),
        Segments.of([sample.response for sample in samples]),
        torch.tensor(prompt_of, dtype=torch.long),
    )


class ConversationEncoder:
    """Encodes conversations. Every method may be called from several threads.

    Args:
        tokenizer: Tokenizer of the model.
        processor: Media processor of the model. ``None`` for a model that reads text alone.
        media: Settings of media: what conversations may name, and limits.
        special_tokens: What a special token that a conversation spells is.

    Attributes:
        encoder: Encodes texts.
        turns: Encodes the turns of a conversation.
        lock: Held while the tokenizer is called.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any,
        media: MediaConfig,
        *,
        special_tokens: SpecialTokens = "text",
    ) -> None:
        data = SFTDataConfig(media=media, turns="last", special_tokens=special_tokens)
        self.encoder = ChatEncoder(data, tokenizer, processor)
        self.turns = TurnEncoder(data, self.encoder)
        # a tokenizer that switches ``split_special_tokens`` changes for all threads
        self.lock = threading.Lock()

    def sample(self, messages: Sequence[Mapping[str, Any]], where: str) -> Sample:
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
        self.turns.expand([part], self.encoder.expanded_row(*self.turns.texts([part])))
        with self.lock:
            known = self.turns.encode([part])
            ids, _ = self.turns.tokens(part, known)
            asked = self.turns.prompt_tokens(part, known)
        prompt, response = Prompt("", asked), ids[len(asked) :]
        if self.encoder.media is None or not numbers:
            return Sample(prompt, response)
        items = [record.media[n] for n in numbers]
        prompt.media, media = self.encoder.media.split(items, (asked, response), where)
        return Sample(prompt, response, media)

    def template_problem(self) -> str:
        """Return the reason why the chat template cannot render responses; empty if it can."""
        try:
            self.sample(EXCHANGE, "the template")
        except ModelError as error:
            return str(error)
        return ""

    def answered(
        self, messages: Sequence[Mapping[str, Any]], text: str, *, cut: bool, where: str
    ) -> Sample:
        """Return the sample of a response to a conversation.

        Args:
            messages: Messages before the response, which continues a last one of the assistant.
            text: The response.
            cut: True for a response that was cut at a limit. It has no end token.
            where: Name of the conversation, for messages of errors.

        Raises:
            DataError: As ``sample``.
        """
        said = [{"role": "assistant", "content": text}]
        is_begun = ends_with_assistant(messages)
        found = self.sample(continued(messages, said) if is_begun else [*messages, *said], where)
        if not cut:
            return found
        closing = self.encoder.special_ids - self.encoder.placeholders
        ids = found.response
        while len(ids) > 1 and ids[-1] in closing:
            ids = ids[:-1]
        return Sample(found.prompt, ids, found.media)

    def prompt(self, messages: object, where: str) -> Prompt:
        """Return the prompt that asks the model to continue a conversation.

        Args:
            messages: A text, or messages with ``role`` and ``content``.
            where: Name of the conversation, for messages of errors.

        Raises:
            DataError: A message or its media cannot be read.
        """
        record = read_record(
            {"prompt": messages}, Columns(), where, self.encoder.reads, is_prompt=True
        )
        shown = self.encoder.prompt(record)
        texts = self.encoder.expanded_row(record, [shown])
        with self.lock:
            ids = self.encoder.encode_prompts(texts)[0]
        prompt = Prompt("", ids, self.encoder.readable(shown))
        self.encoder.attach(prompt, record, shown)
        return prompt
