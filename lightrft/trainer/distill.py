"""On-policy distillation: what a teacher says of the policy's own answers, as advantages or as a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.config import DistillConfig, RLConfig
from lightrft.models.divergence import Target
from lightrft.trainer.roles import Frozen, Roles
from lightrft.trainer.scoring import logprobs_by_parts, sampling_temperature
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import About

SAMPLED = About(
    "A_t <- A_t - coef (logp_old - logp_teacher)",
    r"\hat A_t\leftarrow\hat A_t-\lambda\,(\log\pi_{old}-\log\pi_T)",
    "Thinking Machines, On-Policy Distillation, 2025; GKD, arXiv 2306.13649",
)
"""The form ``sampled``, as ``explain`` shows it. The log-ratio is the reward of its own token only: no discount carries it back."""


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


def target_of(part: Batch, roles: Roles, config: RLConfig) -> Target | None:
    """The teacher's distributions at the tokens of the micro-batch ``part``, when a loss compares whole vocabularies."""
    settings = config.algorithm.distill
    if roles.teacher is None or not settings.whole:
        return None
    if not isinstance(roles.teacher, Frozen):
        raise ConfigError(
            f"algorithm.distill.kind = {settings.kind}: whole distributions are compared where the policy is, and this teacher lives in "
            "workers; set algorithm.distill.kind to sampled, or give the teacher no workers"
        )
    temperature = settings.temperature or sampling_temperature(config)
    return roles.teacher.model.target(part, settings.kind, temperature=temperature, beta=settings.beta)
