"""Measure a reward model on held-out rows, and normalize its scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from torch import Tensor

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
from lightrft.datasets.sampler import in_order
from lightrft.learner.preference_examples import preference_to_batch
from lightrft.learner.reward_model.outputs import (
    Outputs,
    compute_outputs,
    joined,
    responses_of,
)
from lightrft.learner.reward_model.step import (
    LayoutChecked,
    RewardModelSettings,
    verify_layout,
)
from lightrft.learner.sft_step import with_sources
from lightrft.models.reward.reward_model import HeadOutputs, RewardModel
from lightrft.models.training_mode import evaluation_mode
from lightrft.observability.metrics import Mean, Metrics
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.types import Batch


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """The result of an evaluation of held-out rows: metrics, and the scores of each row."""

    metrics: Metrics
    prompts: list[ScoredPrompt]


def evaluate_reward_model(
    strategy: Strategy,
    trained: TrainableModel[RewardModel],
    dataset: PreferenceDataset,
    settings: RewardModelSettings,
    batch_size: int,
) -> HeldOutScores:
    """Return the loss of ``dataset`` and how well the scores order it. All ranks must call it.

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
        for i, term in enumerate(reward_terms(data_of_head, settings.reward_model)):
            losses.add(f"{i}", Mean(term.weight * term.losses.sum(), term.units.sum()))
        signs.merge(sign_metrics(batch, outputs, settings))
        prompts += scored_prompts(examples, batch, outputs, settings.heads)
    metrics = Metrics()
    means = losses.compute()
    if means:
        metrics.add("eval/loss", Mean(sum(means.values())))
    metrics.merge(signs)
    metrics.merge(head_metrics(prompts, settings.heads))
    return HeldOutScores(metrics, prompts)


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


def sign_metrics(batch: Batch, outputs: Outputs, settings: RewardModelSettings) -> Metrics:
    """Return the accuracy of the signs of scores that the first ``cost_sign`` loss trains.

    Args:
        batch: A batch.
        outputs: The outputs of each head for ``batch``.
        settings: The settings of the run.
    """
    metrics = Metrics()
    signed = signed_score(settings.reward_model)
    if signed is not None:
        head, unsafe_from = signed
        right = right_signs(responses_of(batch, outputs, settings.heads)[head], unsafe_from)
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


@dataclass(slots=True)
class EvaluatedModel:
    """A reward model that is not trained. See ``LayoutChecked``."""

    model: RewardModel
    layout_verified: bool = False


def scored(
    strategy: Strategy,
    trained: LayoutChecked[RewardModel],
    dataset: PreferenceDataset,
    settings: RewardModelSettings,
    batch_size: int,
    begin: int = 0,
) -> Iterator[tuple[list[PreferenceExample], Batch, Outputs]]:
    """Yield the examples of ``dataset`` with the outputs of the model, equal on all ranks.

    Args:
        strategy: Gives the ranks and the device.
        trained: The reward model.
        dataset: The examples.
        settings: The settings of the run.
        batch_size: Number of examples of a part.
        begin: Number of examples to leave out, from the first.
    """
    for examples in in_order(dataset, batch_size, strategy.ranks, begin):
        if not examples:
            continue
        batch = with_sources(
            preference_to_batch(examples, settings.heads), examples, settings.sources
        )
        verify_layout(trained, batch, strategy, lambda some: joined(trained.model.score(some)))
        outputs = compute_outputs(trained.model, batch, strategy, settings.max_tokens)
        yield examples, batch, outputs


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
