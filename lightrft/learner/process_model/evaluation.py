"""Measure a process reward model on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from lightrft.algorithms.process_reward.losses import LabelledSteps
from lightrft.algorithms.process_reward.objective import step_terms
from lightrft.algorithms.process_reward.quality import (
    ScoredSteps,
    step_calibration,
    step_quality,
)
from lightrft.algorithms.token_ops import require_column
from lightrft.config.reward_model.process import ProcessModelConfig
from lightrft.datasets.process.process_dataset import ProcessDataset, ProcessExample
from lightrft.datasets.sampler import in_order
from lightrft.learner.micro_batches import local_micro_batches
from lightrft.learner.process_model.step import ProcessModelSettings, process_to_batch
from lightrft.learner.reward_model.step import LayoutChecked, verify_layout
from lightrft.learner.sft_step import MOST_SOURCES
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, rows_of

LOSS_ROWS = 256
"""Number of responses whose losses are computed together."""


@dataclass(frozen=True, slots=True)
class HeldOutSteps:
    """The result of an evaluation of held-out rows: metrics, and the scores of each response."""

    metrics: Metrics
    responses: list[ScoredSteps]


def evaluate_process_model(
    strategy: Strategy,
    trained: LayoutChecked[ProcessRewardModel],
    dataset: ProcessDataset,
    settings: ProcessModelSettings,
    batch_size: int,
) -> HeldOutSteps:
    """Return the loss of ``dataset`` and how well steps are judged. All ranks must call it.

    See ``metrics_of_steps``.

    Args:
        strategy: Gives the ranks and the device.
        trained: The process reward model.
        dataset: The held-out examples.
        settings: The settings of the run.
        batch_size: Number of examples that are computed together.
    """
    responses: list[ScoredSteps] = []
    for part in scored_steps(strategy, trained, dataset, settings, batch_size):
        responses += part
    return HeldOutSteps(metrics_of_steps(responses, settings.process_model), responses)


def scored_steps(
    strategy: Strategy,
    trained: LayoutChecked[ProcessRewardModel],
    dataset: ProcessDataset,
    settings: ProcessModelSettings,
    batch_size: int,
    begin: int = 0,
) -> Iterator[list[ScoredSteps]]:
    """Yield the scores of the examples of ``dataset``, equal on all ranks.

    Args:
        strategy: Gives the ranks and the device.
        trained: The process reward model.
        dataset: The examples.
        settings: The settings of the run.
        batch_size: Number of examples of a part.
        begin: Number of examples to leave out, from the first.
    """
    model = trained.model

    def logits_of(some: Batch) -> Tensor:
        return model.score_steps(some).logits

    for examples in in_order(dataset, batch_size, strategy.ranks, begin):
        if not examples:
            continue
        batch = process_to_batch(examples)
        verify_layout(trained, batch, strategy, logits_of)
        logits, scores = compute_steps(model, batch, strategy, settings.max_tokens)
        yield list(_by_response(examples, logits, scores))


def metrics_of_steps(responses: Sequence[ScoredSteps], settings: ProcessModelConfig) -> Metrics:
    """Return the loss of ``responses`` and how well their steps are judged.

    ``eval/step_accuracy`` is over labelled steps. ``eval/response_accuracy`` is the share of
    responses whose first wrong step is found, or which are found to have none. With responses of
    both kinds, ``eval/process_bench_f1`` is their F1. Each data source has its own, too.
    ``eval/step_calibration_error`` is the mean distance of scores and labels in bins of scores.

    Args:
        responses: The scored responses.
        settings: The settings ``process_model``.
    """
    metrics = Metrics()
    loss = _loss(responses, settings)
    if loss is not None:
        metrics.add("eval/loss", Mean(loss))
    nonfinite = sum(not math.isfinite(z) for one in responses for z in one.logits)
    metrics.add("eval/nonfinite_scores", Sum(nonfinite))
    bins = step_calibration(responses)
    if bins:
        distances = [abs(one.confidence - one.accuracy) * one.count for one in bins]
        error = Mean(fsum(distances), sum(one.count for one in bins))
        metrics.add("eval/step_calibration_error", error)
    metrics.merge(_quality(responses, settings.threshold, "eval"))
    for name, own in by_source(responses).items():
        metrics.merge(_quality(own, settings.threshold, f"eval/{name}"))
    return metrics


def by_source(responses: Sequence[ScoredSteps]) -> dict[str, list[ScoredSteps]]:
    """Return the responses of each data source; nothing for one, or for too many to report."""
    found: dict[str, list[ScoredSteps]] = {}
    for one in responses:
        found.setdefault(one.source, []).append(one)
    return found if 1 < len(found) <= MOST_SOURCES else {}


@torch.no_grad()
def compute_steps(
    model: ProcessRewardModel, batch: Batch, strategy: Strategy, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the log-odds ``[S]`` and the scores ``[S]`` of all steps, in float64 on the host.

    All ranks must call it.

    Args:
        model: The process reward model.
        batch: A batch with ``step_ends``, identical on all ranks. Each rank computes some
            micro-batches.
        strategy: Gives the ranks and the device.
        max_tokens: Largest number of tokens of a micro-batch.
    """
    data_parallel_group = strategy.data_parallel_group
    values = torch.zeros(batch.tokens, 2, dtype=torch.float64)
    for part in local_micro_batches(batch, max_tokens, model.layout, data_parallel_group):
        found = model.score_steps(part.of(batch).to(strategy.device))
        places = rows_of(batch.lengths, part.index)[found.places.cpu()]
        values[places] = torch.stack([found.logits, found.scores], 1).double().cpu()
    # Every row is computed by one rank and is 0 on the others, so the sum is a gather.
    logits, scores = data_parallel_group.sum(values)[require_column(batch.step_ends)].unbind(1)
    return logits, scores


def _by_response(
    examples: Sequence[ProcessExample], logits: Tensor, scores: Tensor
) -> Iterator[ScoredSteps]:
    """Yield the steps of each of ``examples``, whose scores ``[S]`` follow one another."""
    counts = [len(example.labels) for example in examples]
    for example, z, r in zip(examples, logits.split(counts), scores.split(counts), strict=True):
        yield ScoredSteps(
            example.index,
            example.id,
            example.data_source,
            z.tolist(),
            r.tolist(),
            example.labels,
            example.weight,
        )


def _loss(responses: Sequence[ScoredSteps], settings: ProcessModelConfig) -> float | None:
    """Return the weighted sum of the losses of labelled steps; ``None`` without any."""
    losses = Metrics()
    labelled = [one for one in responses if one.judged()]
    for start in range(0, len(labelled), LOSS_ROWS):
        steps = _labelled(labelled[start : start + LOSS_ROWS])
        for i, term in enumerate(step_terms(steps, settings)):
            losses.add(f"{i}", Mean(term.weight * term.losses.sum(), term.units.sum()))
    means = losses.compute()
    return sum(means.values()) if means else None


def _labelled(responses: Sequence[ScoredSteps]) -> LabelledSteps:
    """Return the judged steps of ``responses``, each of which has one."""
    logits: list[float] = []
    scores: list[float] = []
    labels: list[float] = []
    response_of: list[int] = []
    for row, one in enumerate(responses):
        for k in one.judged():
            logits.append(one.logits[k])
            scores.append(one.scores[k])
            labels.append(one.labels[k])
            response_of.append(row)
    columns = [torch.tensor(column, dtype=torch.float64) for column in (logits, scores, labels)]
    weights = torch.tensor([one.weight for one in responses], dtype=torch.float64)
    return LabelledSteps(*columns, torch.tensor(response_of), weights)


def _quality(responses: Sequence[ScoredSteps], threshold: float, prefix: str) -> Metrics:
    """Return the metrics of ``step_quality`` under ``prefix``."""
    found, metrics = step_quality(responses, threshold), Metrics()
    if found.steps:
        metrics.add(f"{prefix}/step_accuracy", Mean(sum(found.steps), len(found.steps)))
    if found.responses is not None:
        metrics.add(f"{prefix}/response_accuracy", Mean(found.responses.mean))
    if found.f1 is not None:
        metrics.add(f"{prefix}/process_bench_f1", Mean(found.f1.f1))
        metrics.add(f"{prefix}/process_bench_wrong", Mean(found.f1.wrong))
        metrics.add(f"{prefix}/process_bench_right", Mean(found.f1.right))
    return metrics
