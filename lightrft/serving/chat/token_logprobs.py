"""Log-probs of generated tokens, and the likeliest tokens at each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrft.learner.micro_batches import micro_batches
from lightrft.models.actor import Actor
from lightrft.types import Rollout
from lightrft.workers.scoring.collecting import batch_of

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


def shown_logprobs(answer: ChatAnswer, tokenizer: Any) -> list[dict[str, object]]:
    """Return log-probs as the API of OpenAI has them, without the end token.

    Args:
        answer: The response with its log-probs.
        tokenizer: Tokenizer of the model.
    """
    assert answer.logprobs is not None
    ids = answer.rollout.token_ids
    has_end = answer.rollout.finish_reason == "stop" and ids[-1] in tokenizer.all_special_ids
    rows = []
    for k, id in enumerate(ids[: len(ids) - has_end]):
        likely = answer.logprobs.likely[k]
        others = [_entry(other, value, tokenizer) for other, value in likely]
        own = _entry(id, answer.logprobs.chosen[k], tokenizer)
        rows.append({**own, "top_logprobs": others})
    return rows


def _entry(id: int, logprob: float, tokenizer: Any) -> dict[str, object]:
    text = str(tokenizer.decode([id]))
    # decoding drops the space that a token of sentencepiece begins with
    if str(tokenizer.convert_ids_to_tokens(id)).startswith("\u2581") and text[:1] != " ":
        text = f" {text}"
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
