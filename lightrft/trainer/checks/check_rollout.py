"""Reject rollout settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightrft.algorithms.group_filters import FILTERS
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.sample_selection import SELECTIONS
from lightrft.algorithms.validate.check_parts import check_parts
from lightrft.algorithms.validate.component_kinds import signature_problems
from lightrft.config.base import ComponentConfig
from lightrft.config.rollout import RolloutConfig
from lightrft.config.verbs import RLConfig
from lightrft.rollout.curriculum import CURRICULA
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy_imports import np
from lightrft.utils.registry import Registry


def check_algorithm(config: RLConfig) -> Requirements:
    """Return what the algorithm reads, once its parts and the rollouts are checked.

    It needs no model and no data. Raises ``ConfigError`` for settings that cannot work.
    """
    check_parts(config.algorithm)
    requirements = Requirements.of(config.algorithm)
    check_rollout(config, requirements)
    return requirements


def check_rollout(config: RLConfig, requirements: Requirements) -> None:
    """Raise ``ConfigError`` with every setting of ``rollout`` and of filters that cannot work."""
    problems = list(_rollout_problems(config, requirements))
    if problems:
        raise ConfigError("\n".join(problems))


def _rollout_problems(config: RLConfig, requirements: Requirements) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    if requirements.steps:
        name = algorithm.advantage.name
        yield (
            f"algorithm.advantage.name = {name}: it compares the steps of responses by the "
            "states that they were taken in, and no environment of this version names states; "
            "take grpo, which compares whole responses"
        )
    for i, part in enumerate(algorithm.filters):
        yield from _refused(f"algorithm.filters.{i}", FILTERS, part, _example())
    if rollout.select is not None:
        wrong = list(signature_problems("rollout.select", SELECTIONS, rollout.select, 1))
        yield from wrong or _refused("rollout.select", SELECTIONS, rollout.select, _example())
        yield from _kept(config, rollout.select, requirements)
    if rollout.curriculum is not None:
        part = ComponentConfig(name=rollout.curriculum.name, options=rollout.curriculum.options)
        wrong = list(signature_problems("rollout.curriculum", CURRICULA, part, 2))
        yield from wrong or _refused(
            "rollout.curriculum", CURRICULA, part, np.array([np.nan, 0.5]), 0.0
        )
        if not config.data.shuffle:
            yield (
                "data.shuffle = False: rollout.curriculum samples prompts by weight, in no "
                "order; leave one of the two out"
            )
    if not requirements.reward:
        yield from _rewardless(rollout)
    if rollout.carry_over and rollout.oversample == 1:
        yield (
            "rollout.carry_over = True changes nothing: without rollout.oversample above 1 no "
            "group is left over"
        )
    yield from _unfinished(rollout, config.sampling.max_new_tokens)
    if rollout.carry_over and rollout.staleness:
        yield (
            "rollout.carry_over = True would take responses from further back than "
            f"rollout.staleness = {rollout.staleness}; leave one of the two out"
        )
    if rollout.carry_over and requirements.ignores_sampler_logprobs:
        yield (
            "rollout.carry_over = True trains on responses of an older policy, which nothing "
            "corrects: set algorithm.importance_sampling=[tis], or "
            "algorithm.old_logprobs=rollout with a loss that clips the ratio"
        )
    if config.engine.quantization is not None and requirements.ignores_sampler_logprobs:
        yield (
            f"engine.quantization = {config.engine.quantization} samples from other probabilities "
            "than training computes, and nothing corrects for it: set "
            "algorithm.importance_sampling=[tis], or algorithm.old_logprobs=rollout with a loss "
            "that clips the ratio"
        )


def _rewardless(rollout: RolloutConfig) -> Iterator[str]:
    """Yield the settings that read rewards, for an algorithm that has none."""
    for name in ("select", "curriculum"):
        if getattr(rollout, name) is not None:
            yield (
                f"rollout.{name} reads rewards, and this algorithm has none: all that it learns "
                "comes from a teacher; leave it out"
            )


def _unfinished(rollout: RolloutConfig, max_new_tokens: int) -> Iterator[str]:
    """Yield problems of the settings for responses that continue in the next step."""
    most = rollout.max_tokens_per_step
    if rollout.partial and rollout.oversample == 1 and most is None:
        yield (
            "rollout.partial = True changes nothing: no response is left unfinished; set "
            "rollout.max_tokens_per_step, or rollout.oversample above 1"
        )
    if most is None:
        return
    if not rollout.partial:
        yield (
            f"rollout.max_tokens_per_step = {most} needs "
            "rollout.partial=true, which continues unfinished responses"
        )
    if most >= max_new_tokens:
        yield (
            f"rollout.max_tokens_per_step = {most} changes nothing: "
            f"responses have at most sampling.max_new_tokens = {max_new_tokens} "
            "tokens"
        )


def _kept(config: RLConfig, part: ComponentConfig, requirements: Requirements) -> Iterator[str]:
    keep, samples = part.options.get("keep"), config.rollout.group_size
    if part.name not in SELECTIONS or not isinstance(keep, int):
        return
    if keep >= samples:
        yield (
            f"rollout.select.options.keep = {keep} leaves out none of rollout.group_size = "
            f"{samples} responses; lower it, or generate more"
        )
    if keep < 2 and requirements.groups:
        name = config.algorithm.advantage.name
        yield (
            f"rollout.select.options.keep = {keep}: advantage {name!r} compares the responses of "
            "a group; set it to 2 or more"
        )


def _refused(
    key: str, registry: Registry[Any], part: ComponentConfig, *example: object
) -> Iterator[str]:
    """Yield the errors of a built-in function about its options, when called with an example."""
    if part.name not in registry:
        return
    try:
        registry[part.name](*example, **part.options)
    except ConfigError as error:
        yield f"{key}: {error}"
    except TypeError as error:  # e.g. a string option where a number is expected
        yield f"{key}: {part.name!r} cannot use its options {part.options}: {error}"


def _example() -> list[Rollout]:
    return [
        Rollout(Prompt("", [0]), [0], [True], [-1.0], [0], "stop", i, i, reward=float(i))
        for i in range(2)
    ]
