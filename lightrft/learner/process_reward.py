"""Train the implicit process reward model of PRIME (arXiv 2502.01456) and compute token rewards.

The model is a language model. Its log-ratio to the reference, summed over a response, is the logit
of a correct outcome. Taken per token, the log-ratio is a reward. The model takes one optimizer step
on each batch before the advantages are computed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.train import PRMConfig
from lightrft.learner.forward_passes import MicroBatches, compute_logprobs
from lightrft.learner.micro_batches import local_micro_batches
from lightrft.learner.policy_update import optimizer_step
from lightrft.models.sampled_distribution import Distribution
from lightrft.models.training_mode import values_of_evaluation
from lightrft.observability.metrics import Mean, Metrics
from lightrft.roles import Roles, TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, rows_of


def with_process_rewards(
    batch: Batch,
    roles: Roles,
    settings: PRMConfig,
    max_tokens: int,
    temperature: Distribution,
    metrics: Metrics,
) -> Batch:
    """Train the process reward model on ``batch`` and add its token rewards.

    With ``prm.forward`` single, the rewards come from the forward pass of the training step.
    With double, another forward pass of the trained model computes them.

    Args:
        batch: The batch of the step.
        roles: Gives the process reward model.
        settings: The settings ``prm``.
        max_tokens: Largest number of tokens of a micro-batch.
        temperature: Temperature of the log-probs.
        metrics: The training metrics are added to it.
    """
    process = roles.prm
    if process is None:
        return batch
    logprobs, found = process_step(
        roles.strategy, process, batch, settings, max_tokens, temperature
    )
    metrics.merge(found)
    if settings.forward == "double":
        logprobs = compute_logprobs(process.model, batch, roles, max_tokens, temperature)
    return batch.replace(
        process_rewards=settings.beta * (logprobs - _reference(batch).to(logprobs))
    )


def process_step(
    strategy: Strategy,
    process: TrainableModel,
    batch: Batch,
    settings: PRMConfig,
    max_tokens: int,
    temperature: Distribution,
) -> tuple[Tensor, Metrics]:
    """Take one optimizer step of the process reward model.

    Args:
        strategy: Runs the backward pass and the step.
        process: The process reward model with its optimizer.
        batch: Has rewards and log-probs of the reference.
        settings: The settings ``prm``.
        max_tokens: Largest number of tokens of a micro-batch.
        temperature: Temperature of the log-probs.

    Returns:
        The log-probs of the model before the step, ``[N]``, and metrics.

    Raises:
        ValueError: If ``batch.rewards`` is missing.
    """
    if batch.rewards is None:
        raise ValueError("a process reward model learns from batch.rewards")
    # Over the whole batch, so that the loss does not depend on its split into micro-batches.
    share = 1.0 / max(1, int((TokenRows.of(batch).count() > 0).sum()))
    # Log-probs before the optimizer step, which ``prm.forward`` single turns into rewards.
    before: list[Tensor] = []

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        score = partial(process.model.score, part, temperature=temperature)
        logprobs = values_of_evaluation(process.model, score).logprobs
        before.append(logprobs.detach())
        losses, right = outcome_losses(logprobs, part, settings.beta, settings.threshold)
        judged = (TokenRows.of(part).count() > 0).sum()
        return losses.sum() * share, Metrics({"prm/accuracy": Mean(right.sum(), judged)})

    loss, metrics = optimizer_step("prm", strategy, process, batch, max_tokens, loss_of)
    metrics.add("prm/loss", Mean(loss))
    parts, data_parallel_group = MicroBatches(), strategy.data_parallel_group
    # The split is deterministic: these are the micro-batches of the step, in the same order.
    own = local_micro_batches(batch, max_tokens, process.model.layout, data_parallel_group)
    for part, values in zip(own, before, strict=True):
        parts.put(rows_of(batch.lengths, part.index), values)
    return data_parallel_group.sum(parts.column(batch.tokens)), metrics


def outcome_losses(
    logprobs: Tensor, batch: Batch, beta: float, threshold: float
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of each response's outcome.

    Args:
        logprobs: ``[N]``. Log-probs of the process reward model.
        batch: Has rewards and log-probs of the reference.
        beta: Factor of the log-ratio.
        threshold: Smallest reward of a correct outcome.

    Returns:
        The loss ``[B]`` and whether the outcome was predicted ``[B]``: 0 and ``False`` without
        sampled tokens.

    Raises:
        ValueError: If ``batch.rewards`` or ``batch.ref_logprobs`` is missing.
    """
    if batch.rewards is None:
        raise ValueError("the outcome of a response needs batch.rewards")
    rows = TokenRows.of(batch)
    some = rows.count() > 0
    gap = logprobs - _reference(batch).to(logprobs)
    # One infinite token must not determine, or invalidate, the whole response.
    finite = torch.isfinite(gap.detach())
    now = torch.where(finite, logprobs, torch.zeros_like(logprobs))
    ref = torch.where(finite, _reference(batch).to(logprobs), torch.zeros_like(logprobs))
    logit = beta * rows.sum(now - ref)
    outcome = batch.rewards >= threshold
    # softplus(-x) is -log sigmoid(x), without the overflow of exp.
    losses = F.softplus(torch.where(outcome, -logit, logit))
    return torch.where(some, losses, torch.zeros_like(losses)), ((logit > 0) == outcome) & some


def _reference(batch: Batch) -> Tensor:
    if batch.ref_logprobs is None:
        raise ValueError("a process reward needs batch.ref_logprobs")
    return batch.ref_logprobs
