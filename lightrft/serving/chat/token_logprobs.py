"""Log-probs of generated tokens, and the likeliest tokens at each place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightrft.learner.micro_batches import micro_batches
from lightrft.models.actor import Actor
from lightrft.types import Rollout
from lightrft.workers.scoring.collecting import batch_of

SPACE = "\u2581"
"""The space in the names of tokens of sentencepiece."""
BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Name of a token of sentencepiece that is one byte."""
ROWS = 256
"""Places whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs of the tokens of a response, before temperature and filters.

    Attributes:
        chosen: Log-prob of each token.
        likely: The likeliest tokens at each place, with their log-probs, the likeliest first.
    """

    chosen: list[float]
    likely: list[list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A response, with the log-probs of its tokens if a request asks for them."""

    rollout: Rollout
    logprobs: TokenLogprobs | None = None


@torch.no_grad()
def likely_tokens(
    actor: Actor, budget: int, rollouts: Sequence[Rollout], count: int
) -> list[TokenLogprobs]:
    """Return the log-probs of the tokens of responses.

    Args:
        actor: The model.
        budget: Largest number of tokens of a forward pass.
        rollouts: The responses.
        count: Number of likely tokens at each place.
    """
    batch = batch_of(rollouts)
    found: dict[int, TokenLogprobs] = {}
    for index in micro_batches(batch, budget, actor.layout):
        part = batch.select(index).to(actor.device)
        states, _ = actor.hidden(part)
        sizes = part.responses.sizes
        own = zip(states.split(sizes), part.responses.tokens.split(sizes), strict=True)
        for k, (rows, ids) in zip(index.tolist(), own, strict=True):
            found[k] = _logprobs(actor, rows, ids, count)
    return [found[k] for k in range(len(rollouts))]


def _logprobs(actor: Actor, states: Tensor, ids: Tensor, count: int) -> TokenLogprobs:
    """Return the log-probs of one response from the states ``[N, H]`` that predict its tokens."""
    chosen: list[float] = []
    likely: list[list[tuple[int, float]]] = []
    for rows, tokens in zip(states.split(ROWS), ids.split(ROWS), strict=True):
        logprobs = actor.logits(rows).float().log_softmax(-1)
        chosen += logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        best = logprobs.topk(min(count, logprobs.shape[1]))
        for others, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            likely.append(list(zip(others, values, strict=True)))
    return TokenLogprobs(chosen, likely)


class TokenTexts:
    """Texts and bytes of single tokens.

    Args:
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._added = set(tokenizer.added_tokens_decoder)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        # JSON, in which a sequence of decoders names each of them
        kinds = "" if decoder is None else decoder.__getstate__().decode()
        self._has_byte_tokens = '"ByteFallback"' in kinds
        self._byte_of: dict[str, int] = {}
        if '"ByteLevel"' in kinds:
            self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()}

    def text(self, id: int) -> str:
        """Return the text of a token. A part of a character is U+FFFD."""
        name = self._name(id)
        # decoding drops a space that a token of sentencepiece begins with
        return name.replace(SPACE, " ") if name.startswith(SPACE) else self._decoded(id)

    def encoded(self, id: int, *, is_first: bool = False) -> bytes:
        """Return the bytes of a token. Those of all tokens of a response make its text.

        Args:
            id: The token.
            is_first: It is the first of a response, whose text lacks the space of sentencepiece.
        """
        name = self._name(id)
        if id not in self._added:
            if self._has_byte_tokens and BYTE.fullmatch(name):
                return bytes([int(name[1:-1], 16)])
            if self._byte_of and all(char in self._byte_of for char in name):
                return bytes(self._byte_of[char] for char in name)
        return (self._decoded(id) if is_first else self.text(id)).encode()

    def _name(self, id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(id))

    def _decoded(self, id: int) -> str:
        return str(self.tokenizer.decode([id]))


def shown_logprobs(answer: ChatAnswer, texts: TokenTexts) -> list[dict[str, object]]:
    """Return log-probs as the API of OpenAI has them, without the end token.

    Args:
        answer: The response with its log-probs.
        texts: Texts of the tokens of the model.
    """
    assert answer.logprobs is not None
    ids = answer.rollout.token_ids
    ends = texts.tokenizer.all_special_ids
    has_end = answer.rollout.finish_reason == "stop" and ids[-1] in ends

    def entry(id: int, logprob: float) -> dict[str, object]:
        own = list(texts.encoded(id, is_first=k == 0))
        return {"token": texts.text(id), "logprob": logprob, "bytes": own}

    rows = []
    for k, id in enumerate(ids[: len(ids) - has_end]):
        others = [entry(other, value) for other, value in answer.logprobs.likely[k]]
        rows.append({**entry(id, answer.logprobs.chosen[k]), "top_logprobs": others})
    return rows
