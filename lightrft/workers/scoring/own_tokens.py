"""Read responses in the tokens of a reward model that has another tokenizer or template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.data import MediaConfig, SpecialTokens
from lightrft.config.model import ModelConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.datasets.conversations.conversation_encoder import (
    ConversationEncoder,
    Sample,
    batch_of_answers,
)
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.types import Batch, Prompt, Rollout, Segments
from lightrft.utils.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """Renders conversations by the template, tokenizer and processor of a reward model.

    A conversation has the messages of the data row and the text of the response. System messages
    and templates that ``data`` adds for the policy are no part of it.

    Attributes:
        encoder: Encodes conversations.
        context: Most tokens that the model reads. ``None`` for no limit.
    """

    encoder: ConversationEncoder
    context: int | None

    def batch(self, rollouts: Sequence[Rollout]) -> tuple[Batch | None, list[int], dict[int, str]]:
        """Encode the responses that can be read. Those to one prompt are a group.

        Args:
            rollouts: The responses.

        Returns:
            The batch, or ``None`` if no response can be read; the index of each of its responses
            in ``rollouts``; and the reason of each other index.
        """
        samples: dict[int, Sample] = {}
        problems: dict[int, str] = {}
        for k, rollout in enumerate(rollouts):
            try:
                samples[k] = self._sample(rollout)
            except DataError as error:
                problems[k] = str(error)
        if not samples:
            return None, [], problems
        # By identity too: two rows may have equal ids and different media.
        origins = [id(rollouts[k].prompt) for k in samples]
        batch = batch_of_answers(list(samples.values()), origins)
        return batch, list(samples), problems

    def prompts(self, rollouts: Sequence[Rollout]) -> tuple[Segments, Tensor, dict[int, str]]:
        """Encode the prompts of responses.

        Args:
            rollouts: The responses.

        Returns:
            The distinct prompts; the index of the prompt of each response, ``[R]``; and the reason
            of each response whose prompt cannot be read, which has another prompt's index.
        """
        known: dict[int, int | str] = {}
        distinct: list[Prompt] = []
        prompt_of: list[int] = []
        problems: dict[int, str] = {}
        for k, rollout in enumerate(rollouts):
            prompt = rollout.prompt
            if id(prompt) not in known:
                try:
                    distinct.append(self.encoder.prompt(asked(prompt), _where(prompt)))
                    known[id(prompt)] = len(distinct) - 1
                except DataError as error:
                    known[id(prompt)] = str(error)
            found = known[id(prompt)]
            if isinstance(found, str):
                problems[k] = found
            prompt_of.append(found if isinstance(found, int) else 0)
        # A batch has a prompt, even if none can be read.
        rows = distinct or [Prompt("", [0])]
        return Segments.of_prompts(rows), torch.tensor(prompt_of, dtype=torch.long), problems

    def _sample(self, rollout: Rollout) -> Sample:
        """Return the conversation of a response. Raises ``DataError`` if it cannot be read."""
        where = _where(rollout.prompt)
        found = self.encoder.answered(
            asked(rollout.prompt),
            rollout.text,
            cut=rollout.finish_reason == "length",
            where=where,
        )
        if self.context is not None and found.tokens > self.context:
            raise DataError(
                f"{where}: prompt and response have {found.tokens} tokens of the reward model, "
                f"which reads {self.context}"
            )
        return found


def own_tokens(
    term: ScoringModelConfig,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    context: int | None,
    special_tokens: SpecialTokens | None = None,
) -> OwnTokens | None:
    """Return the encoder of a reward model, or ``None`` if the model reads the policy's tokens.

    Args:
        term: The setting ``reward.models.<n>``.
        config: Settings of the reward model.
        tokenizer: Tokenizer of the policy.
        key: Name of the setting, for messages.
        context: Most tokens that the reward model reads. ``None`` for no limit.
        special_tokens: What a special token that a response spells is: ``data.special_tokens``.
            ``None`` takes what the policy sampled as a token for one, if the vocabularies are
            equal. In another vocabulary it is text, so that no response ends its own turn.

    Raises:
        ConfigError: The model must read the policy's tokens, and has another vocabulary. Or its
            chat template changes a prompt once a response follows.
    """
    theirs = load_tokenizer(config)
    differ = len(tokenizer.get_vocab().items() ^ theirs.get_vocab().items())
    if term.reencode is False and differ:
        raise ConfigError(
            f"{key}.path = {term.path!r}: {differ} entries of its vocabulary differ from the "
            f"policy's; leave out {key}.reencode = false"
        )
    # Without a template of its own, a model of the same vocabulary reads the policy's.
    other_template = bool(theirs.chat_template) and theirs.chat_template != tokenizer.chat_template
    wanted = bool(differ) or other_template if term.reencode is None else term.reencode
    if not wanted:
        return None
    spelled = special_tokens or ("text" if differ else "responses")
    processor = load_processor(config, theirs)
    encoder = ConversationEncoder(theirs, processor, MediaConfig(), special_tokens=spelled)
    problem = encoder.template_problem()
    if problem:
        raise ConfigError(f"{key}.path = {term.path!r}: {problem}")
    return OwnTokens(encoder, context)


def asked(prompt: Prompt) -> list[dict[str, object]]:
    """Return the messages of a prompt."""
    return [dict(m) for m in prompt.request] or [{"role": "user", "content": prompt.text}]


def _where(prompt: Prompt) -> str:
    return f"prompt {prompt.id}"
