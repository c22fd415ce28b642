"""Check that every function that an algorithm names exists and fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.token_masks import TOKEN_MASKS
from lightrft.algorithms.validate.compatibility import incompatible_settings
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS, signature_problems
from lightrft.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    LossConfig,
    NormalizeConfig,
    ValueConfig,
)
from lightrft.config.base import ComponentConfig
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import Registry


def check_parts(algorithm: AlgorithmConfig) -> None:
    """Raise ``ConfigError`` with every unknown name, misfit option and nonsense combination."""
    problems = [*_problems(algorithm), *incompatible_settings(algorithm)]
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    for kind, key, part in named_parts(algorithm):
        row = COMPONENT_KINDS[kind]
        yield from signature_problems(key, row.registry, part, len(row.arguments), *row.given)
    advantage = algorithm.advantage
    # whitening reads eps too, even if the advantage's function does not
    read_by_whitening = {"eps"} if advantage.normalize != "none" else set()
    yield from _unread("algorithm.advantage", ADVANTAGES, advantage, read_by_whitening)
    read_by_masks: set[str] = set()
    for mask in algorithm.token_masks:
        if mask.name in TOKEN_MASKS:
            # token masks share the bounds of ``algorithm.loss``
            read_by_masks |= TOKEN_MASKS.about(mask.name).reads
    yield from _unread("algorithm.loss", POLICY_LOSSES, algorithm.loss, read_by_masks)
    yield from _unfit_scales(algorithm)


def named_parts(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str, ComponentConfig]]:
    """Yield the functions that the settings name: kind, setting, and name with options."""
    advantage = ComponentConfig(
        name=algorithm.advantage.name,
        options=algorithm.advantage.options,
    )
    loss = ComponentConfig(name=algorithm.loss.name, options=algorithm.loss.options)
    yield "advantage", "algorithm.advantage", advantage
    yield "loss", "algorithm.loss", loss
    yield "aggregation", "algorithm.aggregation", ComponentConfig(name=algorithm.aggregation)
    yield "kl", "algorithm.kl.estimator", ComponentConfig(name=algorithm.kl.estimator)
    yield (
        "kl",
        "algorithm.policy_drift.estimator",
        ComponentConfig(name=algorithm.policy_drift.estimator),
    )
    lists = {
        "correction": algorithm.importance_sampling,
        "token_mask": algorithm.token_masks,
        "shaping": algorithm.shaping,
        "filter": algorithm.filters,
    }
    for kind, parts in lists.items():
        for i, part in enumerate(parts):
            yield kind, f"{COMPONENT_KINDS[kind].key}.{i}", part


def _unfit_scales(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield reward and value scales that the configured advantage does not use."""
    name = algorithm.advantage.name
    normalize = algorithm.normalize
    try:
        needs = ADVANTAGES.about(name).needs
    except ConfigError:
        return  # reported where the name is looked up
    if "critic" not in needs:
        no_critic = f"changes nothing: advantage {name!r} has no critic"
        if normalize.values:
            yield f"algorithm.normalize.values = True {no_critic}"
        if algorithm.value != ValueConfig():
            yield f"algorithm.value.clip = {algorithm.value.clip} {no_critic}"
    only_eps_is_set = normalize == NormalizeConfig(eps=normalize.eps)
    if only_eps_is_set and normalize != NormalizeConfig():
        yield (
            f"algorithm.normalize.eps = {normalize.eps} changes nothing: no terms, rewards or "
            "values are normalised"
        )
    changes = []
    if normalize.terms != "none":
        changes.append("normalize.terms")
    if normalize.rewards != "none":
        changes.append("normalize.rewards")
    if algorithm.shaping:
        changes.append("shaping")
    if "greedy" in needs and changes:
        yield (
            f"algorithm.{changes[0]} changes the rewards of responses but not of the greedy "
            f"response, which advantage {name!r} subtracts from them; leave it out"
        )


def _unread(
    key: str,
    registry: Registry[Any],
    settings: AdvantageConfig | LossConfig,
    also: set[str],
) -> Iterator[str]:
    """Yield changed settings that the configured built-in function does not read.

    Args:
        key: The section, for messages.
        registry: Where the function is looked up. A user's function may read every setting.
        settings: The section that names the function.
        also: Fields that something else reads.
    """
    if settings.name not in registry:
        return
    reads = registry.about(settings.name).reads
    known = ", ".join(sorted(reads)) or "none of them"
    # name and options select the function; normalize and clip apply to the result of any
    read = reads | also | {"name", "options", "normalize", "clip"}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name not in read and value != field.default:
            yield f"{key}.{name} = {value} changes nothing: {settings.name!r} reads {known}"
