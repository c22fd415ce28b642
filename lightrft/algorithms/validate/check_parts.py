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
    advantage, loss = algorithm.advantage, algorithm.loss
    for kind, key, part in _named(algorithm):
        row = COMPONENT_KINDS[kind]
        yield from signature_problems(key, row.registry, part, len(row.arguments), *row.given)
    yield from _unread(
        "algorithm.advantage",
        ADVANTAGES,
        advantage,
        {"eps"} if advantage.whiten != "none" else set(),
    )
    gates = [TOKEN_MASKS.about(part.name).reads for part in algorithm.gates if part.name in TOKEN_MASKS]
    yield from _unread("algorithm.loss", POLICY_LOSSES, loss, set().union(*gates))
    yield from _unfit_scales(algorithm)


def _named(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str, ComponentConfig]]:
    """Yield the functions that the settings name: kind, setting, and name with options."""
    advantage, loss = algorithm.advantage, algorithm.loss
    yield (
        "advantage",
        "algorithm.advantage",
        ComponentConfig(name=advantage.name, options=advantage.options),
    )
    yield "loss", "algorithm.loss", ComponentConfig(name=loss.name, options=loss.options)
    yield "aggregation", "algorithm.aggregation", ComponentConfig(name=algorithm.aggregation)
    yield "kl", "algorithm.kl.estimator", ComponentConfig(name=algorithm.kl.estimator)
    yield "kl", "algorithm.drift.estimator", ComponentConfig(name=algorithm.drift.estimator)
    lists = {
        "correction": algorithm.corrections,
        "gate": algorithm.gates,
        "shaping": algorithm.shaping,
        "filter": algorithm.filters,
    }
    for kind, parts in lists.items():
        yield from ((kind, f"{COMPONENT_KINDS[kind].key}.{i}", part) for i, part in enumerate(parts))


def _unfit_scales(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield reward and value scales that the configured advantage does not use."""
    name, settings = algorithm.advantage.name, algorithm.normalize
    try:
        needs = ADVANTAGES.about(name).needs
    except ConfigError:
        return  # reported where the name is looked up
    if settings.values and "critic" not in needs:
        yield f"algorithm.normalize.values = True changes nothing: advantage {name!r} has no critic"
    if algorithm.value != ValueConfig() and "critic" not in needs:
        yield (f"algorithm.value.clip = {algorithm.value.clip} changes nothing: advantage {name!r} has no critic")
    if settings == NormalizeConfig(eps=settings.eps) != NormalizeConfig():
        yield (f"algorithm.normalize.eps = {settings.eps} changes nothing: no terms, rewards or values are normalised")
    given = [f"normalize.{k}" for k in ("terms", "rewards") if getattr(settings, k) != "none"]
    given += ["shaping"] if algorithm.shaping else []
    if "greedy" in needs and given:
        yield (
            f"algorithm.{given[0]} changes the rewards of answers and not that of the greedy "
            f"answer, which advantage {name!r} takes off them; leave it out"
        )


def _unread(key: str, registry: Registry[Any], settings: AdvantageConfig | LossConfig, also: set[str]) -> Iterator[str]:
    """Yield changed settings that the configured built-in function does not read."""
    if settings.name not in registry:
        return
    read = registry.about(settings.name).reads | also | {"name", "options", "whiten"}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name not in read and value != field.default:
            known = ", ".join(sorted(registry.about(settings.name).reads)) or "none of them"
            yield f"{key}.{name} = {value} changes nothing: {settings.name!r} reads {known}"
