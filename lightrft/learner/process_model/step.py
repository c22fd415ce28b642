"""Take an optimizer step of a process reward model on responses whose steps have labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.process_reward.losses import LabelledSteps
from lightrft.algorithms.process_reward.objective import step_terms
from lightrft.algorithms.reward_model.objective import RewardModelTerm, reward_loss
from lightrft.algorithms.token_ops import require_column
from lightrft.config.reward_model.process import ProcessModelConfig
from lightrft.datasets.process.process_dataset import ProcessExample
from lightrft.learner.policy_update import optimizer_step
from lightrft.learner.reward_model.step import verify_layout
from lightrft.models.reward.process import ProcessRewardModel, StepScores
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch, Segments


@dataclass(frozen=True, slots=True)
class ProcessModelSettings:
    """The settings of a step.

    Attributes:
        process_model: The settings ``process_model``.
        max_tokens: The setting ``train.max_tokens_per_micro_batch``.
        sources: Names of the data sources, for metrics.
    """

    process_model: ProcessModelConfig
    max_tokens: int
    sources: Sequence[str] = ()


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
            last = max(k for k, label in enumerate(own) if not math.isnan(label))
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
    verify_layout(trained, batch, strategy, lambda some: model.score_steps(some).logits)
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
    right = step_hits(scores, labels, settings.process_model.threshold)
    metrics.add("process_model/score", Mean.of(scores))
    metrics.add("process_model/right_labels", Mean.of(labels))
    metrics.add("process_model/step_accuracy", Mean.of(right))
    if batch.data_source is not None:
        source_of = batch.data_source[batch.row_of[found.places][judged]]
        for number, name in enumerate(settings.sources):
            mean = Mean.of(right, source_of == number)
            metrics.add(f"process_model/{name}/step_accuracy", mean)
    return metrics


def step_hits(scores: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """Return 1 for each step that is judged as its label, and 0 for others, float64 ``[S]``.

    Args:
        scores: ``[S]``.
        labels: ``[S]``. A step is right from 0.5.
        threshold: Smallest score of a right step.
    """
    return ((scores >= threshold) == (labels >= 0.5)).double()
