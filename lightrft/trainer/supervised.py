"""One step of supervised fine-tuning: the same batch, actor and strategy as reinforcement learning, with the loss -logp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightrft.strategy.base import Strategy
from lightrft.trainer.aggregation import AGGREGATIONS
from lightrft.trainer.roles import Trained, settle_layout
from lightrft.trainer.rows import Rows
from lightrft.trainer.update import optimizer_step, weighted_sum
from lightrft.types import Batch, Media, Segments
from lightrft.utils.metrics import Mean, Metrics, Sum


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


def sft_step(strategy: Strategy, policy: Trained, batch: Batch, micro_batch_tokens: int) -> Metrics:
    """One optimizer step on the mean of -logp over the trained tokens of the global batch."""
    rows = Rows.of(batch)
    batch = batch.replace(loss_weights=AGGREGATIONS["token"](rows, 1))
    metrics = Metrics({"sft/tokens": Sum(int(rows.mask.sum())), "sft/conversations": Sum(len(batch))})
    settle_layout(policy, batch, strategy)

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        return weighted_sum(-policy.model.score(part, temperature=1.0).logprobs, part), Metrics()

    loss, found = optimizer_step("policy", strategy, policy, batch, micro_batch_tokens, loss_of)
    metrics.add("loss", Mean(loss))
    metrics.merge(found)
    return metrics
