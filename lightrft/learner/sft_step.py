"""One step of supervised fine-tuning: the same batch, actor and strategy as reinforcement learning, with the loss -logp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.nonfinite_tokens import without_tokens
from lightrft.algorithms.token_ops import Rows, weighted_sum
from lightrft.learner.forward_passes import settle_layout
from lightrft.learner.policy_update import optimizer_step
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.roles import Trained
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, Media, Segments


class Example(Protocol):
    """A conversation: what comes before the first trained token, the rest, each with its media, and which of the rest is trained."""

    prompt_ids: list[int]
    response_ids: list[int]
    trained: list[bool]
    prompt_media: Media
    response_media: Media


def examples_to_batch(examples: Sequence[Example]) -> Batch:
    """One ``Batch`` of conversations; ``sampled`` marks the trained tokens."""
    return Batch(
        Segments.cat([Segments.of([e.prompt_ids], e.prompt_media) for e in examples]),
        Segments.cat([Segments.of([e.response_ids], e.response_media) for e in examples]),
        torch.arange(len(examples)),
        sampled=torch.tensor([t for e in examples for t in e.trained], dtype=torch.bool),
    )


def mean_nll(logprobs: Tensor, part: Batch) -> tuple[Tensor, Mean, Sum]:
    """Return the share of ``part`` in the loss, the mean of -logp over its trained tokens, and the number of tokens that were left out.

    A token whose log-prob is infinite or NaN is left out: one that the model cannot give, because its vocabulary is masked, would
    make the loss of the whole batch infinite.
    """
    lost = part.mask & ~torch.isfinite(logprobs.detach())
    kept = without_tokens(part, lost)
    losses = -logprobs.masked_fill(~kept.mask, 0.0)
    return weighted_sum(losses, kept), Mean.of(losses.detach(), kept.mask), Sum(lost.sum())


def sft_step(strategy: Strategy, policy: Trained, batch: Batch, micro_batch_tokens: int) -> Metrics:
    """One optimizer step on the mean of -logp over the trained tokens of the global batch."""
    rows = Rows.of(batch)
    batch = batch.replace(loss_weights=AGGREGATIONS["token"](rows, 1))
    metrics = Metrics({"sft/tokens": Sum(int(rows.mask.sum())), "sft/conversations": Sum(len(batch))})
    settle_layout(policy, batch, strategy)

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        loss, _, lost = mean_nll(policy.model.score(part, temperature=1.0).logprobs, part)
        return loss, Metrics({"sft/nonfinite_tokens": lost})

    loss, found = optimizer_step("policy", strategy, policy, batch, micro_batch_tokens, loss_of)
    metrics.add("loss", Mean(loss))
    metrics.merge(found)
    return metrics
