"""Take a step of distillation, and measure it: a divergence from a teacher at response tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.nonfinite_tokens import without_tokens
from lightrft.algorithms.token_ops import TokenRows, require_column, weighted_sum
from lightrft.config.train import DistillationConfig
from lightrft.distributed.collectives import all_reduce_metrics
from lightrft.learner.distillation.targets import teacher_target
from lightrft.learner.forward_passes import verify_layout, verify_layouts
from lightrft.learner.micro_batches import local_micro_batches
from lightrft.learner.policy_update import LossOf, optimizer_step
from lightrft.learner.sft_step import token_weights_of, with_mean_weights
from lightrft.models.actor import TokenScores
from lightrft.models.divergence.token_divergence import (
    AlignedTarget,
    AnyTarget,
    Spans,
    Target,
    TeacherTarget,
)
from lightrft.models.training_mode import values_of_evaluation
from lightrft.observability.metrics import Mean, Metrics, Sum
from lightrft.roles import FrozenModel, Reference, Roles
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lesson:
    """Responses to learn on.

    Attributes:
        batch: The responses after the student's prompts, identical on all ranks. ``aligned`` is
            given if a teacher has another tokenizer.
        shown: The same responses after the prompts that the teacher sees, in its own tokens.
            ``None`` if both see the same.
        sources: Data source of each response. Read if ``roles.teachers`` are given.
        given: The responses come from the data, and may be learned by their likelihood too.
    """

    batch: Batch
    shown: Batch | None = None
    sources: Sequence[str] = ()
    given: bool = True


def distill_step(
    roles: Roles, lesson: Lesson, settings: DistillationConfig, micro_batch_tokens: int
) -> Metrics:
    """Take one optimizer step on the mean divergence over the trained tokens of the global batch.

    Args:
        roles: The student, its teachers and the strategy.
        lesson: The global batch.
        settings: The settings ``distill``.
        micro_batch_tokens: Largest number of tokens of a micro-batch.
    """
    batch = lesson.batch
    rows = TokenRows.of(batch)
    metrics = Metrics(
        {"distill/tokens": Sum(int(rows.mask.sum())), "distill/responses": Sum(len(batch))}
    )
    metrics.merge(alignment_metrics(batch))
    verify_models(roles, lesson)
    # A teacher with the towers of the student reads the same features.
    with roles.keeping_features(batch) as numbered:
        numbered_lesson = replace(lesson, batch=numbered)
        (first, loss_of), *more = lesson_parts(roles, numbered_lesson, settings)
        loss, found = optimizer_step(
            "policy", roles.strategy, roles.policy, first, micro_batch_tokens, loss_of, more
        )
    metrics.add("loss", Mean(loss))
    metrics.merge(found)
    return metrics


def lesson_parts(
    roles: Roles, lesson: Lesson, settings: DistillationConfig
) -> list[tuple[Batch, LossOf]]:
    """Return the rows of each teacher with their loss. Every rank must call it.

    Args:
        roles: The student and its teachers.
        lesson: The global batch.
        settings: The settings ``distill``.
    """
    batch = with_divergence_weights(lesson.batch, settings.aggregation)
    if lesson.shown is not None:
        # A micro-batch finds its rows in ``shown`` by these numbers.
        batch = batch.replace(example=torch.arange(len(batch)))
    nll_coef = settings.nll_coef if lesson.given else 0.0
    parts: list[tuple[Batch, LossOf]] = []
    for teacher, taught in by_teacher(roles, lesson.sources):
        target = teacher_target(teacher, roles, settings)
        own = batch if taught is None else batch.select(taught)
        parts.append((own, _loss_of(roles, target, lesson.shown, nll_coef)))
    return parts


def verify_models(roles: Roles, lesson: Lesson) -> None:
    """Compare the layouts of all models with their own forward, on the first batch of a run."""
    if lesson.batch.aligned is None or lesson.shown is None:
        verify_layouts(roles, lesson.batch)
        return
    verify_layout(roles.policy, lesson.batch, roles.strategy)
    # A teacher with another tokenizer knows its own tokens alone.
    for teacher, taught in by_teacher(roles, lesson.sources):
        if isinstance(teacher, FrozenModel):
            own = lesson.shown if taught is None else lesson.shown.select(taught)
            verify_layout(teacher, own, roles.strategy)


def alignment_metrics(batch: Batch) -> Metrics:
    """Return the numbers of trained tokens in spans of text, of the others, and of spans.

    Without ``batch.aligned`` there are no metrics.
    """
    if batch.aligned is None:
        return Metrics()
    spans = Spans.of(batch)
    trained = int(batch.mask.sum())
    aligned = len(spans.ends) + len(spans.earlier)
    metrics = Metrics({"distill/spans": Sum(len(spans.ends))})
    metrics.add("distill/aligned_tokens", Sum(aligned))
    metrics.add("distill/unaligned_tokens", Sum(trained - aligned))
    metrics.add("distill/unaligned_share", Mean(trained - aligned, max(1, trained)))
    return metrics


def with_divergence_weights(batch: Batch, aggregation: str) -> Batch:
    """Add the loss weights of a mean over ``batch``, a whole batch.

    With ``batch.aligned``, the divergence is a mean over spans of text. Its weights are the column
    ``divergence_weights``.

    Args:
        batch: The global batch.
        aggregation: The setting ``distill.aggregation``.
    """
    weighted = with_weights(batch, aggregation)
    if batch.aligned is None:
        return weighted
    ends = with_weights(batch.replace(sampled=batch.mask & batch.aligned), aggregation)
    return weighted.replace(divergence_weights=ends.loss_weights)


def with_weights(batch: Batch, aggregation: str) -> Batch:
    """Add the loss weights of a mean over ``batch``, a whole batch.

    Raises:
        ConfigError: If rows or turns have weights, and the mean is not over tokens.
    """
    if aggregation == "token":
        return with_mean_weights(batch)
    if batch.token_weights is not None or batch.example_weights is not None:
        raise ConfigError(
            f"distill.aggregation = {aggregation}: rows or turns of data.sources have weights, "
            "which weight a mean over tokens; set distill.aggregation=token, or remove the weights"
        )
    return batch.replace(loss_weights=AGGREGATIONS[aggregation](TokenRows.of(batch), 1))


def by_teacher(
    roles: Roles, sources: Sequence[str]
) -> list[tuple[Reference | None, Tensor | None]]:
    """Return each teacher with the rows ``[K]`` that it teaches. ``None`` stands for all rows.

    Without a separate teacher, the reference teaches.

    Args:
        roles: Gives the teachers.
        sources: Data source of each row.
    """
    usual = roles.reference if roles.teacher is None else roles.teacher
    if not roles.teachers:
        return [(usual, None)]
    rows: dict[str, list[int]] = {}
    for row, source in enumerate(sources):
        rows.setdefault(source if source in roles.teachers else "", []).append(row)
    return [(roles.teachers.get(name, usual), torch.tensor(own)) for name, own in rows.items()]


def _loss_of(
    roles: Roles, target: Callable[[Batch], TeacherTarget], shown: Batch | None, nll_coef: float
) -> LossOf:
    """Return the loss of a micro-batch.

    Args:
        roles: Gives the student.
        target: Returns the teacher's distributions at the responses of a batch.
        shown: The responses as the teacher sees them. ``None`` if it sees the same.
        nll_coef: Factor of -logp.
    """

    def loss_of(part: Batch) -> tuple[Tensor, Metrics]:
        seen = part
        if shown is not None:
            seen = shown.select(require_column(part.example).cpu()).to(roles.device)
        compared = _in_spans(target(seen), seen)
        score = partial(roles.actor.score, part, temperature=1.0, target=compared)
        scores = values_of_evaluation(roles.actor, score)
        return distillation_loss(scores, part, nll_coef)

    return loss_of


def _in_spans(target: TeacherTarget, seen: Batch) -> AnyTarget:
    """Return ``target`` at the ends of the spans of ``seen``, or as it is without ``aligned``."""
    if seen.aligned is None:
        return target
    assert isinstance(target, Target)
    return AlignedTarget.of(target, seen)


def distillation_loss(
    scores: TokenScores, part: Batch, nll_coef: float = 0.0
) -> tuple[Tensor, Metrics]:
    """Return the contribution of a micro-batch to the loss, and its metrics.

    A token with an infinite or NaN number is left out. It may be masked in one vocabulary, and
    would make the loss of the whole batch infinite.

    Args:
        scores: Log-probs and divergence of each response token.
        part: The micro-batch, with ``loss_weights``.
        nll_coef: Factor of -logp.

    Raises:
        ValueError: If ``scores`` have no divergence.
    """
    if scores.divergence is None:
        raise ValueError("distillation needs the divergence of each token")
    finite = torch.isfinite(scores.divergence.detach()) & torch.isfinite(scores.logprobs.detach())
    lost = part.mask & ~finite
    kept = without_tokens(part, lost)
    # Filled, not multiplied by 0: the gradient of a NaN times 0 is NaN.
    divergence = scores.divergence.masked_fill(~kept.mask, 0.0)
    nll = -scores.logprobs.masked_fill(~kept.mask, 0.0)
    compared = kept.mask if part.aligned is None else kept.mask & part.aligned
    metrics = Metrics({"distill/nonfinite_tokens": Sum(lost.sum())})
    metrics.add("distill/divergence", Mean.of(divergence.detach(), compared))
    metrics.add("distill/nll", Mean.of(nll.detach(), kept.mask))
    if part.divergence_weights is None:
        losses = divergence + nll_coef * nll if nll_coef else divergence
        return weighted_sum(losses, kept), metrics
    loss = weighted_sum(divergence, kept, part.divergence_weights)
    return loss + nll_coef * weighted_sum(nll, kept) if nll_coef else loss, metrics


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
