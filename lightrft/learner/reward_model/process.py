"""Take an optimizer step of a process reward model, and measure it on held-out steps."""

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
from lightrft.algorithms.reward_model.objective import RewardModelTerm, reward_loss
from lightrft.algorithms.token_ops import require_column
from lightrft.config.reward_model.sections import ProcessModelConfig
from lightrft.datasets.process.process_dataset import ProcessDataset, ProcessExample
from lightrft.learner.micro_batches import local_micro_batches
from lightrft.learner.policy_update import optimizer_step
from lightrft.learner.reward_model.scoring import (
    LayoutChecked,
    ScoringSettings,
    loss_metric,
    scored,
    term_means,
    verify_layout,
)
from lightrft.learner.sft_step import MOST_SOURCES, with_sources
from lightrft.models.reward.process import ProcessRewardModel, StepScores
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, Segments, rows_of

StepNumbers = tuple[Tensor, Tensor]
"""The log-odds ``[S]`` and the scores ``[S]`` of all steps of a batch."""


@dataclass(frozen=True, slots=True)
class ProcessModelSettings(ScoringSettings[ProcessRewardModel, ProcessExample, StepNumbers]):
    """The settings of a step.

    Attributes:
        process_model: The settings ``process_model``.
        max_tokens: The setting ``train.max_tokens_per_micro_batch``.
        sources: Names of the data sources, for metrics.
    """

    process_model: ProcessModelConfig
    max_tokens: int
    sources: Sequence[str] = ()

    def batch(self, examples: Sequence[ProcessExample]) -> Batch:
        """See ``ScoringSettings.batch``."""
        batch = process_to_batch(examples, self.process_model.last_step_only)
        return with_sources(batch, examples, self.sources)

    def numbers(self, model: ProcessRewardModel, batch: Batch) -> Tensor:
        """See ``ScoringSettings.numbers``."""
        return model.score_steps(batch).logits

    @torch.no_grad()
    def compute(self, model: ProcessRewardModel, batch: Batch, strategy: Strategy) -> StepNumbers:
        """See ``ScoringSettings.compute``."""
        data_parallel_group = strategy.data_parallel_group
        values = torch.zeros(batch.tokens, 2, dtype=torch.float64)
        for part in local_micro_batches(batch, self.max_tokens, model.layout, data_parallel_group):
            found = model.score_steps(part.of(batch).to(strategy.device))
            places = rows_of(batch.lengths, part.index)[found.places.cpu()]
            values[places] = torch.stack([found.logits, found.scores], 1).double().cpu()
        # Every row is computed by one rank and is 0 on the others, so the sum is a gather.
        logits, scores = data_parallel_group.sum(values)[require_column(batch.step_ends)].unbind(1)
        return logits, scores


def process_to_batch(examples: Sequence[ProcessExample], last_step_only: bool = False) -> Batch:
    """Collate examples to one ``Batch``, with a response for each.

    Responses to equal prompts without media are one group, so that the prompt is computed once.
    ``step_ends`` marks the tokens that end steps, and ``step_labels`` has their labels there.

    Args:
        examples: The examples.
        last_step_only: Keep only the last label of each response.
    """
    prompts: list[Segments] = []
    known: dict[tuple[int, ...], int] = {}
    prompt_of: list[int] = []
    ends: list[Tensor] = []
    labels: list[Tensor] = []
    for example in examples:
        key = tuple(example.prompt_ids)
        place = None if example.prompt_media else known.setdefault(key, len(prompts))
        if place is None or place == len(prompts):
            place = len(prompts)
            prompts.append(Segments.of([example.prompt_ids], example.prompt_media))
        prompt_of.append(place)
        own = list(example.labels)
        if last_step_only:
            last = max((k for k, label in enumerate(own) if not math.isnan(label)), default=-1)
            own = [label if k == last else math.nan for k, label in enumerate(own)]
        at = torch.tensor(example.separators)
        count = len(example.response_ids)
        ends.append(torch.zeros(count, dtype=torch.bool).index_fill_(0, at, True))
        nothing = torch.full((count,), math.nan, dtype=torch.float64)
        labels.append(nothing.index_put_((at,), torch.tensor(own, dtype=torch.float64)))
    weights = torch.tensor([example.weight for example in examples], dtype=torch.float64)
    return Batch(
        Segments.cat(prompts),
        Segments.of([example.response_ids for example in examples]),
        torch.tensor(prompt_of),
        step_ends=torch.cat(ends),
        step_labels=torch.cat(labels),
        example_weights=weights if bool((weights != 1).any()) else None,
    )


def process_model_step(
    strategy: Strategy,
    trained: TrainableModel[ProcessRewardModel],
    batch: Batch,
    settings: ProcessModelSettings,
) -> Metrics:
    """Take one optimizer step on the losses of the global batch.

    Args:
        strategy: Runs the backward pass and the step.
        trained: The process reward model with its optimizer.
        batch: The global batch, identical on all ranks.
        settings: The settings of the step.
    """
    model = trained.model
    verify_layout(trained, batch, strategy, settings.numbers)
    totals = step_totals(batch, settings.process_model)

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        found = model.score_steps(part)
        steps, judged = labelled_steps(part, found.logits, found.scores)
        terms = step_terms(steps, settings.process_model)
        lost = ~torch.isfinite(found.logits.detach())
        metrics = step_metrics(part, found, judged, terms, settings)
        metrics.add("process_model/nonfinite_scores", Sum(lost.sum()))
        # Every score takes part, so that all ranks reduce the gradients of the same parameters.
        return reward_loss(terms, totals) + torch.nan_to_num(found.logits).sum() * 0, metrics

    budget = settings.max_tokens
    loss, metrics = optimizer_step("process_model", strategy, trained, batch, budget, loss_of)
    metrics.add("loss", Mean(loss))
    metrics.add("process_model/responses", Sum(len(batch)))
    metrics.add("process_model/tokens", Sum(batch.tokens))
    return metrics


def step_totals(batch: Batch, settings: ProcessModelConfig) -> tuple[float, ...]:
    """Return the divisor of each loss over the global ``batch``, from its labels alone."""
    nothing = torch.zeros(int(require_column(batch.step_ends).sum()), dtype=torch.float64)
    steps, _ = labelled_steps(batch, nothing, nothing)
    return tuple(float(term.units.sum()) for term in step_terms(steps, settings))


def labelled_steps(batch: Batch, logits: Tensor, scores: Tensor) -> tuple[LabelledSteps, Tensor]:
    """Return the steps of ``batch`` that have a label and a finite score.

    Args:
        batch: Has ``step_ends`` and ``step_labels``.
        logits: ``[S]``. Log-odds of each step.
        scores: ``[S]``. Score of each step.

    Returns:
        The steps in float64, and a mask ``[S]`` of them.
    """
    ends = require_column(batch.step_ends)
    labels = require_column(batch.step_labels)[ends]
    kept = ~labels.isnan() & torch.isfinite(logits.detach())
    rows = batch.row_of[ends][kept]
    present, response_of = torch.unique_consecutive(rows, return_inverse=True)
    weights = batch.example_weights
    steps = LabelledSteps(
        logits[kept].double(),
        scores[kept].double(),
        labels[kept].double(),
        response_of,
        None if weights is None else weights[present],
    )
    return steps, kept


def step_metrics(
    batch: Batch,
    found: StepScores,
    judged: Tensor,
    terms: Sequence[RewardModelTerm],
    settings: ProcessModelSettings,
) -> Metrics:
    """Return the mean of each loss, and the accuracy of steps, by data source too.

    Args:
        batch: A micro-batch.
        found: The scores of its steps.
        judged: ``[S]`` mask of steps with a label.
        terms: The losses.
        settings: The settings of the step.
    """
    metrics = Metrics()
    for term in terms:
        mean = Mean(term.losses.detach().sum(), term.units.sum())
        metrics.add(f"process_model/loss/{term.name}", mean)
    scores = found.scores.detach()[judged].double()
    labels = require_column(batch.step_labels)[found.places][judged]
    right = ((scores >= settings.process_model.threshold) == (labels >= 0.5)).double()
    metrics.add("process_model/score", Mean.of(scores))
    metrics.add("process_model/right_labels", Mean.of(labels))
    metrics.add("process_model/step_accuracy", Mean.of(right))
    if batch.data_source is not None:
        source_of = batch.data_source[batch.row_of[found.places][judged]]
        for number, name in enumerate(settings.sources):
            mean = Mean.of(right, source_of == number)
            metrics.add(f"process_model/{name}/step_accuracy", mean)
    return metrics


LOSS_ROWS = 256
"""Number of responses whose losses are computed together."""


def evaluate_process_model(
    strategy: Strategy,
    trained: LayoutChecked[ProcessRewardModel],
    dataset: ProcessDataset,
    settings: ProcessModelSettings,
    batch_size: int,
) -> tuple[Metrics, list[ScoredSteps]]:
    """Return ``metrics_of_steps`` of ``dataset``, and its scored rows. All ranks must call it.

    Args:
        strategy: Gives the ranks and the device.
        trained: The process reward model.
        dataset: The held-out examples.
        settings: The settings of the run.
        batch_size: Number of examples that are computed together.
    """
    responses: list[ScoredSteps] = []
    for examples, _, numbers in scored(strategy, trained, dataset, settings, batch_size):
        responses += by_response(examples, *numbers)
    return metrics_of_steps(responses, settings.process_model), responses


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
    metrics = loss_metric(_losses(responses, settings))
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


def by_response(
    examples: Sequence[ProcessExample], logits: Tensor, scores: Tensor
) -> Iterator[ScoredSteps]:
    """Yield the steps of each example.

    Args:
        examples: Responses with S steps together.
        logits: Logits of the steps, ``[S, ...]``, one response after another.
        scores: Scores of the steps, ``[S]``.
    """
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


def _losses(responses: Sequence[ScoredSteps], settings: ProcessModelConfig) -> Metrics:
    """Return ``term_means`` of the losses of labelled steps."""
    losses = Metrics()
    labelled = [one for one in responses if one.judged()]
    for start in range(0, len(labelled), LOSS_ROWS):
        steps = _labelled(labelled[start : start + LOSS_ROWS])
        losses.merge(term_means(step_terms(steps, settings)))
    return losses


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
