"""Measure the divergence from the teacher on held-out responses."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightrft.config.train import DistillationConfig
from lightrft.distributed.reduce_metrics import all_reduce_metrics
from lightrft.learner.distillation.step import Lesson, lesson_parts, verify_models
from lightrft.learner.micro_batches import local_micro_batches
from lightrft.learner.sft_step import token_weights_of
from lightrft.observability.metrics import Mean, Metrics
from lightrft.roles import Roles

NAMES = {
    "distill/divergence": "eval/divergence",
    "distill/nll": "eval/nll",
    "distill/nonfinite_tokens": "eval/nonfinite_tokens",
}
"""Metrics of a step, and their names in an evaluation."""


@torch.no_grad()
def evaluate_distillation(
    roles: Roles, lessons: Iterable[Lesson], settings: DistillationConfig, max_tokens: int
) -> Metrics:
    """Return the divergence from the teachers on given responses. All ranks must call it.

    ``eval/divergence`` and ``eval/nll`` are means over tokens. ``eval/loss`` is the loss of
    training on these responses, as a mean over all of them with their weights.

    Args:
        roles: The student, its teachers and the strategy.
        lessons: The held-out responses, in parts.
        settings: The settings ``distill``.
        max_tokens: Largest number of tokens of a micro-batch.
    """
    found = Metrics()
    is_weighted = False
    for lesson in lessons:
        found.merge(_measured(roles, lesson, settings, max_tokens))
        weights = (lesson.batch.token_weights, lesson.batch.example_weights)
        is_weighted |= any(own is not None for own in weights)
    values = found.compute()
    metrics = Metrics()
    for name, shown in NAMES.items():
        if name in values:
            metrics.add(shown, Mean(values[name]))
    if settings.aggregation == "sequence" or is_weighted:
        loss = values.get("loss")
    elif "distill/divergence" in values:
        loss = values["distill/divergence"] + settings.nll_coef * values["distill/nll"]
    else:
        loss = None
    if loss is not None:
        metrics.add("eval/loss", Mean(loss))
    return metrics


def _measured(
    roles: Roles, lesson: Lesson, settings: DistillationConfig, max_tokens: int
) -> Metrics:
    """Return the metrics of the responses of ``lesson``, and their loss.

    The loss counts with the number of responses, or of tokens with their weights.

    Args:
        roles: The student, its teachers and the strategy.
        lesson: Some of the held-out responses.
        settings: The settings ``distill``.
        max_tokens: Largest number of tokens of a micro-batch.
    """
    verify_models(roles, lesson)
    layout, data_parallel_group = roles.actor.layout, roles.strategy.data_parallel_group
    metrics, total = Metrics(), torch.zeros((), device=roles.device)
    for batch, loss_of in lesson_parts(roles, lesson, settings):
        for part in local_micro_batches(batch, max_tokens, layout, data_parallel_group):
            loss, own = loss_of(part.of(batch).to(roles.device))
            total = total + loss
            metrics.merge(own)
    metrics = all_reduce_metrics(metrics, data_parallel_group)
    by_response = settings.aggregation == "sequence"
    count = len(lesson.batch) if by_response else float(token_weights_of(lesson.batch).sum())
    metrics.add("loss", Mean(float(data_parallel_group.sum(total)) * count, count))
    return metrics
