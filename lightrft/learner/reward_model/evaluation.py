"""Measure a reward model on held-out rows, and normalize its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from torch import Tensor

from lightrft.algorithms.reward_model.inputs import ScoredResponses
from lightrft.algorithms.reward_model.objective import reward_terms
from lightrft.algorithms.reward_model.quality import (
    JudgedPair,
    ScoredPrompt,
    calibration_error,
    judged_pairs,
    length_bias,
    pair_accuracy,
)
from lightrft.algorithms.reward_model.rating_losses import right_signs
from lightrft.algorithms.reward_model.requirements import signed_score
from lightrft.algorithms.token_ops import require_column
from lightrft.datasets.preference.preference_dataset import PreferenceDataset, PreferenceExample
from lightrft.learner.reward_model.outputs import responses_of
from lightrft.learner.reward_model.scoring import loss_metric, scored, term_means
from lightrft.learner.reward_model.step import RewardModelSettings
from lightrft.models.reward.reward_model import HeadOutputs, RewardModel
from lightrft.models.training_mode import evaluation_mode
from lightrft.observability.metrics import Mean, Metrics
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch


def evaluate_reward_model(
    strategy: Strategy,
    trained: TrainableModel[RewardModel],
    dataset: PreferenceDataset,
    settings: RewardModelSettings,
    batch_size: int,
) -> tuple[Metrics, list[ScoredPrompt]]:
    """Return the loss of ``dataset`` and the order of its scores, and the scored rows.

    All ranks must call it.

    With the loss ``cost_sign``, ``eval/sign_accuracy`` is the fraction of responses whose score is
    above 0 if they are unsafe, and at most 0 if they are safe.

    The first head that compares responses has ``eval/pair_accuracy`` with its interval,
    ``eval/margin``, ``eval/calibration_error`` and ``eval/length_bias``. Every head and every data
    source has the accuracy under ``eval/<name>/``.

    Args:
        strategy: Gives the ranks and the device.
        trained: The reward model.
        dataset: The held-out examples.
        settings: The settings of the run.
        batch_size: Number of examples that are computed together.
    """
    losses, signs, prompts = Metrics(), Metrics(), list[ScoredPrompt]()
    for examples, batch, outputs in scored(strategy, trained, dataset, settings, batch_size):
        data_of_head = responses_of(batch, outputs, settings.heads)
        losses.merge(term_means(reward_terms(data_of_head, settings.reward_model)))
        signs.merge(sign_metrics(data_of_head, settings))
        prompts += scored_prompts(examples, batch, outputs, settings.heads)
    metrics = loss_metric(losses)
    metrics.merge(signs)
    metrics.merge(head_metrics(prompts, settings.heads))
    return metrics, prompts


def head_metrics(prompts: Sequence[ScoredPrompt], heads: Sequence[str]) -> Metrics:
    """Return how well the scores of each of ``heads`` order the responses that it compares.

    The metrics of the first one that compares responses have no name, and are given by data source
    too.

    Args:
        prompts: The scored prompts.
        heads: Names of heads with labels.
    """
    judged = {name: judged_pairs(prompts, name) for name in heads}
    compared = {name: pairs for name, pairs in judged.items() if pairs}
    metrics = Metrics()
    for i, (name, pairs) in enumerate(compared.items()):
        metrics.merge(order_metrics(pairs, "eval" if i == 0 else f"eval/{name}"))
        if i == 0:
            metrics.merge(source_metrics(pairs))
    return metrics


def sign_metrics(
    data_of_head: Mapping[str, ScoredResponses], settings: RewardModelSettings
) -> Metrics:
    """Return the accuracy of the signs of scores that the first ``cost_sign`` loss trains."""
    metrics = Metrics()
    signed = signed_score(settings.reward_model)
    if signed is not None:
        head, unsafe_from = signed
        right = right_signs(data_of_head[head], unsafe_from)
        if len(right):
            metrics.add("eval/sign_accuracy", Mean(int(right.sum()), len(right)))
    return metrics


def order_metrics(pairs: Sequence[JudgedPair], prefix: str) -> Metrics:
    """Return how well scores order ``pairs``, under ``prefix``."""
    accuracy = pair_accuracy(pairs)
    found = {
        "pair_accuracy": accuracy.mean,
        "pair_accuracy_low": accuracy.low,
        "pair_accuracy_high": accuracy.high,
        "margin": fmean(pair.better - pair.worse for pair in pairs),
        "calibration_error": calibration_error(pairs),
        "length_bias": length_bias(pairs),
    }
    metrics = Metrics()
    for name, value in found.items():
        # all responses of equal length show no bias
        if not math.isnan(value):
            metrics.add(f"{prefix}/{name}", Mean(value))
    return metrics


def source_metrics(pairs: Sequence[JudgedPair]) -> Metrics:
    """Return the accuracy of the pairs of each data source, if there are several."""
    of_source: dict[str, list[JudgedPair]] = {}
    for pair in pairs:
        of_source.setdefault(pair.source, []).append(pair)
    metrics = Metrics()
    for name, own in of_source.items():
        if name:
            metrics.add(f"eval/{name}/pair_accuracy", Mean(pair_accuracy(own).mean))
    return metrics


def scored_prompts(
    examples: Sequence[PreferenceExample],
    batch: Batch,
    outputs: Mapping[str, HeadOutputs],
    heads: Sequence[str],
) -> list[ScoredPrompt]:
    """Return the scores and labels of the responses to each prompt of ``batch``.

    Args:
        examples: The examples of the batch.
        batch: The batch.
        outputs: The outputs of each head for ``batch``.
        heads: Names of the columns of ``batch.labels``.
    """
    labels = require_column(batch.labels)
    members: list[list[int]] = [[] for _ in examples]
    for row, example in enumerate(require_column(batch.example).tolist()):
        members[example].append(row)

    def of(column: Tensor, rows: Sequence[int]) -> list[float]:
        return column.detach()[rows].tolist()

    found = []
    for example, rows in zip(examples, members, strict=True):
        prompt = ScoredPrompt(
            example.index,
            example.id,
            example.data_source,
            {name: of(head.scores, rows) for name, head in outputs.items()},
            {name: of(labels[:, column], rows) for column, name in enumerate(heads)},
            batch.lengths[rows].tolist(),
        )
        found.append(prompt)
    return found


def normalize_scores(
    strategy: Strategy,
    trained: TrainableModel[RewardModel],
    dataset: PreferenceDataset,
    settings: RewardModelSettings,
    batch_size: int,
) -> None:
    """Set the mean, and the deviation, of scores over ``dataset``. All ranks must call it.

    The setting ``reward_model.normalize`` says which. See arXiv 2009.01325, appendix C.

    Args:
        strategy: Gives the ranks and the device.
        trained: The reward model.
        dataset: The examples.
        settings: The settings of the run.
        batch_size: Number of examples that are computed together.
    """
    kind = settings.reward_model.normalize
    if kind == "none":
        return
    model = trained.model
    scores: dict[str, list[float]] = {name: [] for name in model.score_names}
    model.set_normalization(dict.fromkeys(scores, 0.0), dict.fromkeys(scores, 1.0))
    with evaluation_mode(model):
        for _, _, outputs in scored(strategy, trained, dataset, settings, batch_size):
            for name, own in scores.items():
                own += outputs[name].scores.tolist()
    means = {name: fmean(own) for name, own in scores.items()}
    deviations: dict[str, float] = {}
    if kind == "scale":
        deviations = {name: stdev(own) for name, own in scores.items()}
    model.set_normalization(means, deviations)
