"""Distill a teacher into the policy, by advantages or by a loss.

The module ``step`` trains by the loss alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightrft.config.algorithm import DistillConfig
from lightrft.config.train import DistillationConfig
from lightrft.learner.forward_passes import compute_logprobs
from lightrft.models.actor import Actor
from lightrft.models.divergence.token_divergence import Target, TeacherTarget, TopTarget
from lightrft.models.onednn.layers import is_plain_linear
from lightrft.models.sampled_distribution import Distribution, temperature_of
from lightrft.roles import AdapterFreeReference, FrozenModel, Roles
from lightrft.strategy.base import Strategy
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError


@runtime_checkable
class DistillationTeacher(Protocol):
    """A remote teacher that returns full-vocabulary distributions. See ``Actor.target``."""

    def target(self, batch: Batch, kind: str, *, temperature: float, beta: float) -> Target:
        """Return the teacher's distributions at the response tokens.

        Args:
            batch: A micro-batch.
            kind: The setting ``algorithm.distill.kind``.
            temperature: Temperature of the distributions.
            beta: The setting ``algorithm.distill.beta``.
        """
        ...


def with_teacher(
    batch: Batch, roles: Roles, settings: DistillConfig, max_tokens: int, temperature: Distribution
) -> Batch:
    """Add the teacher's log-probs of the sampled tokens, if the advantages read them.

    Args:
        batch: The batch of the step.
        roles: Gives the teacher.
        settings: The settings ``algorithm.distill``.
        max_tokens: Largest number of tokens of a micro-batch.
        temperature: Temperature of the log-probs.
    """
    teacher = roles.teacher
    if teacher is None or settings.kind != "sampled":
        return batch
    return batch.replace(
        teacher_logprobs=compute_logprobs(teacher, batch, roles, max_tokens, temperature)
    )


def add_distillation_reward(advantages: Tensor, batch: Batch, settings: DistillConfig) -> Tensor:
    """Subtract ``coef`` times the log-ratio of policy to teacher from the advantages, ``[N]``.

    Args:
        advantages: ``[N]``.
        batch: Has old and teacher log-probs. Without teacher log-probs, ``advantages`` is returned
            as it is.
        settings: ``algorithm.distill``.

    Raises:
        ValueError: If ``batch.old_logprobs`` is missing.
    """
    if batch.teacher_logprobs is None:
        return advantages
    if batch.old_logprobs is None:
        raise ValueError("distillation by the sampled token needs batch.old_logprobs")
    old = batch.old_logprobs.to(advantages.dtype)
    ratio = (old - batch.teacher_logprobs.to(advantages.dtype)) * settings.coef
    # A token that is not trained may have infinite log-probs.
    return advantages - torch.where(batch.mask, ratio, torch.zeros_like(ratio))


def distillation_targets(
    roles: Roles, settings: DistillConfig, temperature: Distribution
) -> Callable[[Batch], Target | None]:
    """Return a function from a micro-batch to the teacher's distributions at its tokens.

    The function returns ``None`` if no loss compares full vocabularies. Every rank must call
    ``targets`` and the returned function.

    Args:
        roles: Gives the teacher.
        settings: The settings ``algorithm.distill``.
        temperature: Temperature of the distributions, unless ``settings`` name another one.

    Raises:
        ConfigError: If the teacher cannot return full distributions.
    """
    if not settings.whole:
        return lambda part: None
    options = {
        "temperature": settings.temperature or temperature_of(temperature),
        "beta": settings.beta,
    }
    return target_of(roles.teacher, roles, settings.kind, **options)


def target_of(
    model: object, roles: Roles, kind: str, **options: float
) -> Callable[[Batch], Target | None]:
    """Return a function from a micro-batch to the distributions of ``model`` at its tokens.

    Every rank must call ``target_of`` and the returned function.

    Args:
        model: A frozen model or a remote teacher. ``None`` has no distributions.
        roles: Gives the strategy.
        kind: Name of the divergence.
        options: ``temperature`` and ``beta`` of the divergence.

    Raises:
        ConfigError: If ``model`` cannot return full distributions.
    """
    return (lambda part: None) if model is None else _target_of(model, roles, kind, **options)


@runtime_checkable
class TopTokensTeacher(Protocol):
    """A remote teacher that returns its most probable tokens alone."""

    def top_target(self, batch: Batch, settings: DistillationConfig) -> TopTarget:
        """Return the teacher's top k at the response tokens of ``batch``."""
        ...


def teacher_target(
    model: object, roles: Roles, settings: DistillationConfig
) -> Callable[[Batch], TeacherTarget]:
    """Return a function from a micro-batch to the distributions that a student learns from.

    Every rank must call ``teacher_target`` and the returned function.

    Args:
        model: A frozen model or a remote teacher.
        roles: Gives the strategy.
        settings: The settings ``distill``.

    Raises:
        ConfigError: If ``model`` cannot return full distributions.
    """
    if isinstance(model, TopTokensTeacher):
        return lambda part: model.top_target(part, settings)
    options = {"temperature": settings.temperature, "beta": settings.beta}
    target = _target_of(model, roles, settings.kind, **options)
    return lambda part: replace(target(part), top_k=settings.top_k, tail=settings.tail)


def _target_of(
    model: object, roles: Roles, kind: str, **options: float
) -> Callable[[Batch], Target]:
    if isinstance(model, FrozenModel):
        frozen, head = model.model, gathered_head(model.model, roles.strategy)
        return lambda part: frozen.target(part, kind, head=head, **options)
    if isinstance(model, AdapterFreeReference):
        actor, own_head = model.actor, gathered_head(model.actor, roles.strategy)

        def without_adapters(part: Batch) -> Target:
            with actor.reference():
                return actor.target(part, kind, head=own_head, **options)

        return without_adapters
    if isinstance(model, DistillationTeacher):
        return lambda part: model.target(part, kind, **options)
    raise ConfigError(
        f"algorithm.distill.kind = {kind} compares whole distributions, which this "
        "teacher cannot tell; set algorithm.distill.kind=sampled"
    )


def gathered_head(model: Actor, strategy: Strategy) -> nn.Module:
    """Gather the output head of ``model`` on each rank's device.

    A loss reads the head in parts, in the backward pass too, when no call of the model gathers it.
    """
    head = model.base.get_output_embeddings()
    if strategy.ranks.size == 1:
        return head
    with strategy.local_parameters(head) as own:
        whole: dict[int, nn.Parameter] = {}
        for parameter in own.values():
            # A copy: of a parameter that is not sharded, gather returns the parameter itself.
            full = strategy.gather(parameter.detach()).to(strategy.device, copy=True)
            whole[id(parameter)] = nn.Parameter(full, requires_grad=False)
    # deepcopy takes the gathered parameters for copies that it has made already.
    if not is_plain_linear(head):
        return copy.deepcopy(head, whole)
    plain = nn.Linear(
        head.in_features, head.out_features, bias=head.bias is not None, device="meta"
    )
    # Parameters only, since sharding also attaches hooks to the modules of a model.
    for name, parameter in own.items():
        setattr(plain, name, whole[id(parameter)])
    return plain
