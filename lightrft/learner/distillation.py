"""On-policy distillation: what a teacher says of the policy's own answers, as advantages or as a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightrft.config.algorithm import DistillConfig
from lightrft.config.verbs import RLConfig
from lightrft.learner.forward_passes import logprobs_by_parts, sampling_temperature
from lightrft.models.actor import Actor
from lightrft.models.divergence import Target
from lightrft.roles import Frozen, Roles
from lightrft.strategy.base import Strategy
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError


@runtime_checkable
class Telling(Protocol):
    """A teacher elsewhere that tells whole distributions. See ``Actor.target``."""

    def target(self, batch: Batch, kind: str, *, temperature: float, beta: float) -> Target: ...


def with_teacher(batch: Batch, roles: Roles, config: RLConfig) -> Batch:
    """The teacher's log-probs of the sampled tokens, when the advantages read them."""
    teacher = roles.teacher
    if teacher is None or config.algorithm.distill.kind != "sampled":
        return batch
    return batch.replace(teacher_logprobs=logprobs_by_parts(teacher, batch, roles, config))


def distilled(advantages: Tensor, batch: Batch, settings: DistillConfig) -> Tensor:
    """``advantages [N]``, less ``coef`` times the log-ratio of policy to teacher at every sampled token."""
    if batch.teacher_logprobs is None:
        return advantages
    if batch.old_logprobs is None:
        raise ValueError("distillation by the sampled token needs batch.old_logprobs")
    ratio = (batch.old_logprobs.to(advantages.dtype) - batch.teacher_logprobs.to(advantages.dtype)) * settings.coef
    return advantages - torch.where(batch.mask, ratio, torch.zeros_like(ratio))


def targets(roles: Roles, config: RLConfig) -> Callable[[Batch], Target | None]:
    """What gives the teacher's distributions at the tokens of a micro-batch, or ``None`` where no loss compares whole vocabularies.
    To make it, and to call it, is a call of all ranks."""
    settings, teacher = config.algorithm.distill, roles.teacher
    if teacher is None or not settings.whole:
        return lambda part: None
    temperature = settings.temperature or sampling_temperature(config)
    options: dict[str, Any] = {"temperature": temperature, "beta": settings.beta}
    if isinstance(teacher, Frozen):
        options["head"] = whole_head(teacher.model, roles.strategy)
        return lambda part: teacher.model.target(part, settings.kind, **options)
    if isinstance(teacher, Telling):
        return lambda part: teacher.target(part, settings.kind, **options)
    raise ConfigError(
        f"algorithm.distill.kind = {settings.kind} compares whole distributions, which this teacher cannot tell; set "
        "algorithm.distill.kind=sampled"
    )


def whole_head(model: Actor, strategy: Strategy) -> nn.Module:
    """The head of ``model``, whole on each rank's device: a loss reads it in parts, also on its way back, when no call of the model is
    under way that would put it together."""
    head = model.base.get_output_embeddings()
    if strategy.ranks.size == 1:
        return head
    with strategy.tensors(head) as own:
        copies = ((p, strategy.full(p.detach()).to(strategy.device, copy=True)) for p in own.values())
        whole = {id(p): nn.Parameter(tensor, requires_grad=False) for p, tensor in copies}
    if type(head) is not nn.Linear:
        return copy.deepcopy(head, whole)
    plain = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    for name, parameter in own.items():  # nothing else of it: what shards a model also hangs on its modules
        setattr(plain, name, whole[id(parameter)])
    return plain
