"""Take a step of supervised fine-tuning.

It uses the same batch, actor and strategy as reinforcement learning, with the loss -logp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.nonfinite_tokens import without_tokens
from lightrft.algorithms.token_ops import TokenRows, weighted_sum
from lightrft.datasets.sft_dataset import Example
from lightrft.learner.forward_passes import verify_layout
from lightrft.learner.policy_update import optimizer_step
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, Segments


def examples_to_batch(examples: Sequence[Example]) -> Batch:
    """Collate conversations to one ``Batch``; ``sampled`` marks the trained tokens."""
    trained: list[bool] = []
    for example in examples:
        trained += example.trained
    return Batch(
        Segments.cat([Segments.of([e.prompt_ids], e.prompt_media) for e in examples]),
        Segments.cat([Segments.of([e.response_ids], e.response_media) for e in examples]),
        torch.arange(len(examples)),
        sampled=torch.tensor(trained, dtype=torch.bool),
    )


def mean_nll(logprobs: Tensor, part: Batch) -> tuple[Tensor, Mean, Sum]:
    """Compute the supervised loss of a micro-batch.

    A token with an infinite or NaN log-prob is left out. It may be masked in the model's
    vocabulary, and would make the loss of the whole batch infinite.

    Returns:
        The contribution of ``part`` to the loss, the mean of -logp over its trained tokens, and the
        number of omitted tokens.
    """
    lost = part.mask & ~torch.isfinite(logprobs.detach())
    kept = without_tokens(part, lost)
    # Filled, not multiplied by 0: the gradient of a NaN times 0 is NaN.
    losses = -logprobs.masked_fill(~kept.mask, 0.0)
    return weighted_sum(losses, kept), Mean.of(losses.detach(), kept.mask), Sum(lost.sum())


def sft_step(
    strategy: Strategy, policy: TrainableModel, batch: Batch, micro_batch_tokens: int
) -> Metrics:
    """Take one optimizer step on the mean of -logp over the trained tokens of the global batch.

    Args:
        strategy: Runs the backward pass and the step.
        policy: The model with its optimizer.
        batch: The global batch, identical on all ranks.
        micro_batch_tokens: Largest number of tokens of a micro-batch.
    """
    rows = TokenRows.of(batch)
    batch = batch.replace(loss_weights=AGGREGATIONS["token"](rows, 1))
    metrics = Metrics(
        {"sft/tokens": Sum(int(rows.mask.sum())), "sft/conversations": Sum(len(batch))}
    )
    verify_layout(policy, batch, strategy)

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        loss, _, lost = mean_nll(policy.model.score(part, temperature=1.0).logprobs, part)
        return loss, Metrics({"sft/nonfinite_tokens": lost})

    loss, found = optimizer_step("policy", strategy, policy, batch, micro_batch_tokens, loss_of)
    metrics.add("loss", Mean(loss))
    metrics.merge(found)
    return metrics
