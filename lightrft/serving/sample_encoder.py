"""Encode texts, token ids and conversations of requests as prompts and responses."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from lightrft.config.data import MediaConfig
from lightrft.datasets.conversations.conversation_encoder import ConversationEncoder, Sample
from lightrft.models.processors import Processor
from lightrft.types import Prompt
from lightrft.utils.errors import DataError
from lightrft.workers.scoring.reward_wire import checked_ids


class SampleEncoder(ConversationEncoder):
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
        super().__init__(tokenizer, processor, media)
        self.vocabulary = vocabulary
        self._ends = frozenset((self.encoder.eos, *tokenizer.all_special_ids))

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
            return self.sample(value, where)
        return self._cut(checked_ids(value, self.vocabulary, where), where)

    def query(self, text: object, prompt: object, number: int) -> Sample:
        """Return the sample of a rendered conversation, as OpenRLHF sends it.

        Args:
            text: Prompt and response. An end token is added where no special token ends it.
            prompt: The beginning of ``text`` that is the prompt; ``None`` or empty if unknown.
            number: Number of the item, for messages of errors.

        Raises:
            DataError: One of them is no text, or ``text`` does not begin with ``prompt``.
        """
        where = f"query.{number}"
        if prompt is not None and not isinstance(prompt, str):
            raise DataError(f"prompts.{number} is {prompt!r}, not a text")
        if not isinstance(text, str) or not text:
            raise DataError(f"{where} must be a text of prompt and response")
        ids = self._ids(text)
        if ids[-1] not in self._ends:
            ids = [*ids, self.encoder.eos]
        if not prompt:
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
        for value in (asked, answer):
            if isinstance(value, Mapping) and value.get("content") is None:
                have = ", ".join(map(str, value)) or "nothing"
                raise DataError(f"{where}: an object without content; it has: {have}")
        content = [v.get("content") if isinstance(v, Mapping) else v for v in (asked, answer)]
        roles = ("user", "assistant")
        messages = [{"role": r, "content": c} for r, c in zip(roles, content, strict=True)]
        return self.sample(messages, where)

    def _ids(self, text: str) -> list[int]:
        with self.lock:
            encoded = self.encoder.tokenizer(text, add_special_tokens=False, verbose=False)
            start = self.encoder.start
        ids = encoded["input_ids"]
        return ids if ids[: len(start)] == start else [*start, *ids]

    def _cut(self, ids: list[int], where: str) -> Sample:
        """Return a sample whose response is the last token."""
        if len(ids) < 2:
            raise DataError(f"{where} has {len(ids)} tokens; a prompt and a response need two")
        return Sample(Prompt("", ids[:-1]), ids[-1:])
