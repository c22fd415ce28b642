"""Measure a process reward model on held-out rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.algorithms.process_reward.objective import step_terms
from lightrft.algorithms.reward_model.benchmarks import process_bench
from lightrft.algorithms.reward_model.step_scores import first_wrong_step
from lightrft.algorithms.token_ops import require_column
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.sampler import in_order
from lightrft.learner.micro_batches import local_micro_batches
from lightrft.learner.process_model.step import (
    ProcessModelSettings,
    labelled_steps,
    process_to_batch,
    step_hits,
)
from lightrft.learner.reward_model.step import LayoutChecked, verify_layout
from lightrft.learner.sft_step import with_sources
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, rows_of

Judged = dict[str, list[tuple[int, int]]]
"""First wrong step of each response as labelled and as predicted, by data source."""


def evaluate_process_model(
    strategy: Strategy,
    trained: LayoutChecked[ProcessRewardModel],
    dataset: ProcessDataset,
    settings: ProcessModelSettings,
    batch_size: int,
) -> Metrics:
    """Return the loss of ``dataset`` and how well steps are judged. All ranks must call it.

    ``eval/step_accuracy`` is over labelled steps. ``eval/response_accuracy`` is the share of
    responses whose first wrong step is found, or which are found to have none. With responses of
    both kinds, ``eval/process_bench_f1`` is their F1. Each data source has its own, too.

    Args:
        strategy: Gives the ranks and the device.
        trained: The process reward model.
        dataset: The held-out examples.
        settings: The settings of the run.
        batch_size: Number of examples that are computed together.
    """
    metrics, losses, judged = Metrics(), Metrics(), Judged()
    model = trained.model

    def logits_of(some: Batch) -> Tensor:
        return model.score_steps(some).logits

    for examples in in_order(dataset, batch_size, strategy.ranks):
        if not examples:
            continue
        batch = with_sources(process_to_batch(examples), examples, settings.sources)
        verify_layout(trained, batch, strategy, logits_of)
        scores = compute_steps(model, batch, strategy, settings.max_tokens)
        for i, term in enumerate(
            step_terms(labelled_steps(batch, *scores)[0], settings.process_model)
        ):
            losses.add(f"{i}", Mean(term.weight * term.losses.sum(), term.units.sum()))
        metrics.merge(_accuracy(batch, scores, settings, judged))
    means = losses.compute()
    if means:
        metrics.add("eval/loss", Mean(sum(means.values())))
    everything = [pair for pairs in judged.values() for pair in pairs]
    metrics.merge(_of_responses(everything, "eval"))
    for name, pairs in judged.items():
        if name:
            metrics.merge(_of_responses(pairs, f"eval/{name}"))
    return metrics


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
    teams = strategy.data_parallel_group
    values = torch.zeros(batch.tokens, 2, dtype=torch.float64)
    for part in local_micro_batches(batch, max_tokens, model.layout, teams):
        found = model.score_steps(part.of(batch).to(strategy.device))
        places = rows_of(batch.lengths, part.index)[found.places.cpu()]
        values[places] = torch.stack([found.logits, found.scores], 1).double().cpu()
    # Every row is computed by one rank and is 0 on the others, so the sum is a gather.
    logits, scores = teams.sum(values)[require_column(batch.step_ends)].unbind(1)
    return logits, scores


def _accuracy(
    batch: Batch, found: tuple[Tensor, Tensor], settings: ProcessModelSettings, judged: Judged
) -> Metrics:
    """Return the accuracy of steps, and add the first wrong steps to ``judged``."""
    logits, scores = found
    threshold = settings.process_model.threshold
    ends = require_column(batch.step_ends)
    labels, rows = require_column(batch.step_labels)[ends], batch.row_of[ends]
    finite = torch.isfinite(logits)
    kept = ~labels.isnan() & finite
    hits = step_hits(scores[kept], labels[kept], threshold)
    metrics = Metrics({"eval/step_accuracy": Mean.of(hits)})
    metrics.add("eval/nonfinite_scores", Sum((~finite).sum()))
    names = [""] * len(batch)
    if batch.data_source is not None:
        names = [settings.sources[number] for number in batch.data_source.tolist()]
        source_of = batch.data_source[rows][kept]
        for number, name in enumerate(settings.sources):
            mean = Mean.of(hits, source_of == number)
            metrics.add(f"eval/{name}/step_accuracy", mean)
    steps = torch.bincount(rows, minlength=len(batch))
    # a score that is not a number finds no step right
    predicted = first_wrong_step(scores.masked_fill(~finite, -1.0), steps, threshold).tolist()
    for row, own in enumerate(labels.split(steps.tolist())):
        wrong = (own < 0.5).nonzero()[:, 0]
        first = int(wrong[0]) if len(wrong) else -1
        # without the labels before it, the first wrong step is unknown
        if not bool(own[:first].isnan().any() if first >= 0 else own.isnan().any()):
            judged.setdefault(names[row], []).append((first, predicted[row]))
    return metrics


def _of_responses(pairs: list[tuple[int, int]], prefix: str) -> Metrics:
    metrics = Metrics()
    if not pairs:
        return metrics
    labels, predictions = [a for a, _ in pairs], [b for _, b in pairs]
    hits = [a == b for a, b in pairs]
    metrics.add(f"{prefix}/response_accuracy", Mean(float(sum(hits)), float(len(hits))))
    if 0 < sum(label >= 0 for label in labels) < len(labels):
        scores = process_bench(labels, predictions)
        metrics.add(f"{prefix}/process_bench_f1", Mean(scores.f1))
        metrics.add(f"{prefix}/process_bench_wrong", Mean(scores.wrong))
        metrics.add(f"{prefix}/process_bench_right", Mean(scores.right))
    return metrics
