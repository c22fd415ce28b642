"""The weighted sum of losses of steps over a batch, whatever its split, and its checks."""

from __future__ import annotations

from collections.abc import Iterator

from lightrft.algorithms.process_reward.losses import STEP_KINDS, STEP_LOSSES, LabelledSteps
from lightrft.algorithms.reward_model.objective import RewardModelTerm
from lightrft.algorithms.validate.component_kinds import signature_problems
from lightrft.config.base import ComponentConfig
from lightrft.config.reward_model.sections import ProcessModelConfig, StepLossConfig
from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy_imports import Tensor, torch

STEPS = "steps"
"""Name of the head of a process reward model, in the terms of the loss."""


def step_terms(steps: LabelledSteps, settings: ProcessModelConfig) -> tuple[RewardModelTerm, ...]:
    """Compute every loss of ``settings`` for some whole responses."""
    terms = []
    for part in settings.losses:
        units = step_units(part, steps)
        losses = STEP_LOSSES[part.name](steps, **part.options) * units
        terms.append(RewardModelTerm(part.name, STEPS, part.weight, losses, units))
    return tuple(terms)


def step_units(part: StepLossConfig, steps: LabelledSteps) -> Tensor:
    """Return the share of each loss of ``part`` in the mean over the batch, ``[U]``.

    Each step, or each response, counts as much as its example. Scores are not read.
    """
    weights = steps.weights
    if weights is None:
        weights = torch.ones(steps.responses, dtype=torch.float64, device=steps.logits.device)
    is_step = STEP_LOSSES.about(part.name).kind == "step"
    return (weights[steps.response_of] if is_step else weights).to(steps.logits.dtype)


def check_process_model(settings: ProcessModelConfig) -> None:
    """Raise ``ConfigError`` with every unknown name, misfit option and nonsense combination."""
    problems = []
    for i, part in enumerate(settings.losses):
        named = ComponentConfig(name=part.name, options=part.options)
        key = f"process_model.losses.{i}"
        problems += signature_problems(key, STEP_LOSSES, named, 1)
    if not problems:
        problems = list(_incompatible(settings))
    if problems:
        raise ConfigError("\n".join(problems))


def _incompatible(settings: ProcessModelConfig) -> Iterator[str]:
    """Yield one line for each combination that cannot be intended."""
    seen: list[tuple[str, object]] = []
    for part in settings.losses:
        if (part.name, part.options) in seen:
            yield (
                f"process_model.losses names {part.name!r} twice with the same options; name it "
                "once with the sum of the weights"
            )
        seen.append((part.name, part.options))
        kind = STEP_LOSSES.about(part.name).kind
        if kind not in STEP_KINDS:
            yield (
                f"process_model.losses: the kind of {part.name!r} is {kind!r}; set the attribute "
                f"kind of the function to one of {', '.join(STEP_KINDS)}"
            )
        if part.name == "cross_entropy" and settings.head == "regression":
            yield (
                "process_model.losses: cross_entropy fits a probability, and head = 'regression' "
                "scores freely; take the loss mse, or head=linear"
            )
        if part.name == "pqm" and settings.last_step_only:
            yield (
                "process_model.last_step_only = true: pqm compares the steps of a response, and "
                "only one is left; take cross_entropy or mse, or leave it out"
            )
        margin = part.options.get("margin", 0)
        if part.name == "pqm" and not (isinstance(margin, int | float) and margin >= 0):
            yield f"process_model.losses: pqm: options.margin is {margin!r}; it must be 0 or more"
