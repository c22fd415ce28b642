"""Measure a reward model on held-out rows, and normalize its scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from lightrft.algorithms.reward_model.quality import (
    JudgedPair,
    calibration_error,
    length_bias,
    pair_accuracy,
)
from lightrft.algorithms.token_ops import require_column
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.sampler import in_order
from lightrft.learner.forward_passes import evaluation_mode
from lightrft.learner.preference_examples import preference_to_batch
from lightrft.learner.reward_model.outputs import (
    Outputs,
    compute_outputs,
    joined,
    responses_of,
)
from lightrft.learner.reward_model.step import RewardModelSettings, terms_of, verify_layout
from lightrft.learner.sft_step import with_sources
from lightrft.models.reward.reward_model import RewardModel
from lightrft.observability.metrics import Mean, Metrics
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch

Judged = dict[str, list[JudgedPair]]
"""Pairs of responses with their scores, by head."""


def evaluate_reward_model(
    strategy: Strategy,
    trained: TrainableModel[RewardModel],
    dataset: PreferenceDataset,
    settings: RewardModelSettings,
    batch_size: int,
) -> Metrics:
    """Return the loss of ``dataset`` and how well the scores order it. All ranks must call it.

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
    losses, judged = Metrics(), Judged()
    seen = 0
    for batch, outputs in scored(strategy, trained, dataset, settings, batch_size):
        for i, term in enumerate(terms_of(batch, outputs, settings)):
            losses.add(f"{i}", Mean(term.weight * term.losses.sum(), term.units.sum()))
        for name, pairs in pairs_of(batch, outputs, settings, seen).items():
            judged.setdefault(name, []).extend(pairs)
        seen += len(batch.prompts)
    metrics = Metrics()
    means = losses.compute()
    if means:
        metrics.add("eval/loss", Mean(sum(means.values())))
    compared = {name: pairs for name, pairs in judged.items() if pairs}
    for i, (name, pairs) in enumerate(compared.items()):
        metrics.merge(order_metrics(pairs, "eval" if i == 0 else f"eval/{name}"))
        if i == 0:
            metrics.merge(source_metrics(pairs))
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


def scored(
    strategy: Strategy,
    trained: TrainableModel[RewardModel],
    dataset: PreferenceDataset,
    settings: RewardModelSettings,
    batch_size: int,
) -> Iterator[tuple[Batch, Outputs]]:
    """Yield the examples of ``dataset`` with the outputs of the model, equal on all ranks.

    Args:
        strategy: Gives the ranks and the device.
        trained: The reward model.
        dataset: The examples.
        settings: The settings of the run.
        batch_size: Number of examples of a part.
    """
    for examples in in_order(dataset, batch_size, strategy.ranks):
        if not examples:
            continue
        batch = with_sources(
            preference_to_batch(examples, settings.heads), examples, settings.sources
        )
        verify_layout(trained, batch, strategy, lambda some: joined(trained.model.score(some)))
        yield batch, compute_outputs(trained.model, batch, strategy, settings.max_tokens)


def pairs_of(
    batch: Batch, outputs: Outputs, settings: RewardModelSettings, seen: int = 0
) -> Judged:
    """Return the scores of all pairs of ``batch``, by head.

    Args:
        batch: A batch.
        outputs: The outputs of each head for ``batch``.
        settings: The settings of the run.
        seen: Number of prompts of earlier batches.
    """
    found = Judged()
    examples, lengths = require_column(batch.example).tolist(), batch.lengths.tolist()
    source_of = [""] * len(batch)
    if batch.data_source is not None:
        source_of = [settings.sources[number] for number in batch.data_source.tolist()]
    for name, responses in responses_of(batch, outputs, settings.heads).items():
        scores = responses.scores.tolist()
        better, worse = responses.pairs()
        found[name] = []
        for first, second in zip(better.tolist(), worse.tolist(), strict=True):
            longer = lengths[first] - lengths[second]
            pair = JudgedPair(
                seen + examples[first], scores[first], scores[second], longer, source_of[first]
            )
            found[name].append(pair)
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
        for _, outputs in scored(strategy, trained, dataset, settings, batch_size):
            for name, own in scores.items():
                own += outputs[name].scores.tolist()
    means = {name: fmean(own) for name, own in scores.items()}
    deviations: dict[str, float] = {}
    if kind == "scale":
        deviations = {name: stdev(own) for name, own in scores.items()}
    model.set_normalization(means, deviations)
