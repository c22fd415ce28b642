"""The implicit process reward model of PRIME (arXiv 2502.01456): a language model that learns from outcomes what a token is worth.

Its log-ratio to the reference, summed over an answer, is the logit of a right outcome; taken token by token, it is a reward. One
optimizer step on the batch of the step comes before the advantages.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightrft.algorithms.token_ops import Rows
from lightrft.config.verbs import RLConfig
from lightrft.learner.forward_passes import Parts, logprobs_by_parts, sampling_temperature
from lightrft.learner.micro_batches import my_micro_batches
from lightrft.learner.policy_update import optimizer_step
from lightrft.observability.metrics import Mean, Metrics
from lightrft.roles import Roles, Trained
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, rows_of


def with_process_rewards(batch: Batch, roles: Roles, config: RLConfig, metrics: Metrics) -> Batch:
    """Train the process reward model on ``batch`` and take its rewards of tokens: with ``process.forward`` single as they were in
    that training's own forward, with double by another one of the trained model. ``metrics`` get those of the training."""
    process = roles.process
    if process is None:
        return batch
    if isinstance(process, Trained):
        model, (logprobs, found) = process.model, process_step(roles.strategy, process, batch, config)
    else:
        model, (logprobs, found) = process, process.learn(batch)
    metrics.merge(found)
    if config.process.forward == "double":
        logprobs = logprobs_by_parts(model, batch, roles, config)
    return batch.replace(process_rewards=config.process.beta * (logprobs - _reference(batch).to(logprobs)))


def process_step(strategy: Strategy, process: Trained, batch: Batch, config: RLConfig) -> tuple[Tensor, Metrics]:
    """One optimizer step of the process reward model: its log-probs ``[N]`` before it, and metrics."""
    settings, budget = config.process, config.train.micro_batch_tokens
    if batch.rewards is None:
        raise ValueError("a process reward model learns from batch.rewards")
    share = 1.0 / max(1, int((Rows.of(batch).count() > 0).sum()))
    before: list[Tensor] = []

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        logprobs = process.model.score(part, temperature=sampling_temperature(config)).logprobs
        before.append(logprobs.detach())
        losses, right = outcome_losses(logprobs, part, settings.beta, settings.threshold)
        judged = (Rows.of(part).count() > 0).sum()
        return losses.sum() * share, Metrics({"process/accuracy": Mean(right.sum(), judged)})

    loss, metrics = optimizer_step("process", strategy, process, batch, budget, loss_of)
    metrics.add("process/loss", Mean(loss))
    parts, teams = Parts(), strategy.teams
    for index, values in zip(my_micro_batches(batch, budget, process.model.layout, teams), before, strict=True):
        parts.put(rows_of(batch.lengths, index), values)
    return teams.sum(parts.column(batch.tokens)), metrics


def outcome_losses(logprobs: Tensor, batch: Batch, beta: float, threshold: float) -> tuple[Tensor, Tensor]:
    """The cross-entropy ``[B]`` of each response, and whether its outcome was foretold ``[B]``: 0 and ``False`` without sampled tokens."""
    if batch.rewards is None:
        raise ValueError("the outcome of an answer needs batch.rewards")
    rows = Rows.of(batch)
    some = rows.count() > 0
    gap = logprobs - _reference(batch).to(logprobs)
    finite = torch.isfinite(gap.detach())  # one infinite token must not decide, or spoil, the whole answer
    now = torch.where(finite, logprobs, torch.zeros_like(logprobs))
    ref = torch.where(finite, _reference(batch).to(logprobs), torch.zeros_like(logprobs))
    logit = beta * rows.sum(now - ref)
    outcome = batch.rewards >= threshold
    losses = F.softplus(torch.where(outcome, -logit, logit))
    return torch.where(some, losses, torch.zeros_like(losses)), ((logit > 0) == outcome) & some


def _reference(batch: Batch) -> Tensor:
    if batch.ref_logprobs is None:
        raise ValueError("a process reward needs batch.ref_logprobs")
    return batch.ref_logprobs
