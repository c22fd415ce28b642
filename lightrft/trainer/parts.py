"""Every function that a config names is found, and its options fit its signature, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightrft.config import AdvantageConfig, AlgorithmConfig, LossConfig, NormalizeConfig, Part, RLConfig
from lightrft.trainer.advantages import ADVANTAGES
from lightrft.trainer.aggregation import AGGREGATIONS
from lightrft.trainer.combinations import nonsense
from lightrft.trainer.corrections import CORRECTIONS
from lightrft.trainer.filters import FILTERS
from lightrft.trainer.gates import GATES
from lightrft.trainer.kinds import misfit as _misfit
from lightrft.trainer.kl import KL_ESTIMATORS
from lightrft.trainer.policy_loss import POLICY_LOSSES
from lightrft.trainer.shaping import SHAPINGS
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import Registry


def needs_of(algorithm: AlgorithmConfig) -> frozenset[str]:
    """What the parts in force need, by the names that they are registered with: ``groups``, ``critic``, ``behavior``, ``old``,
    ``current``, ``entropy``."""
    loss = algorithm.loss.name
    named = [ADVANTAGES.about(algorithm.advantage.name), POLICY_LOSSES.about(loss)]
    named += [CORRECTIONS.about(part.name) for part in algorithm.corrections]
    named += [GATES.about(part.name) for part in algorithm.gates]
    needs = frozenset().union(*(about.needs for about in named))
    if loss not in POLICY_LOSSES or algorithm.drift.coef or algorithm.kl.weighted:
        needs |= {"old"}  # a loss of the user's own is given the old log-probs, so it is taken to read them
    return needs | {"entropy"} if algorithm.entropy.target is not None else needs


def needs_old_logprobs(config: RLConfig) -> bool:
    """Whether the policy's log-probs are read before the update: by the KL, or by a ratio that leaves 1. A batch that gets exactly
    one update, on policy, needs none for the ratio: there the new ones, detached, are the old ones."""
    kl = config.algorithm.kl
    read_by_kl = kl.used and (kl.where == "reward" or kl.controller == "adaptive")
    several = config.train.updates * config.train.mini_batches > 1
    by_teacher = config.algorithm.distill.kind == "sampled"
    by_ratio = several and "old" in needs_of(config.algorithm)
    return config.algorithm.proximal == "policy" and (read_by_kl or by_ratio or by_teacher)


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether anything reads the reference: a KL term, or a process reward."""
    return algorithm.kl.used or "process" in needs_of(algorithm)


def needs_reward(algorithm: AlgorithmConfig) -> bool:
    """Whether anything reads a reward; without it all that is learned comes from a teacher."""
    return "teacher" not in needs_of(algorithm) or bool(algorithm.shaping or algorithm.filters)


def check_parts(algorithm: AlgorithmConfig) -> None:
    """Raises ``ConfigError`` with every name that is not known, every option that does not fit, and every nonsense combination."""
    problems = [*_problems(algorithm), *nonsense(algorithm)]
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantage, loss = algorithm.advantage, algorithm.loss
    yield from _misfit("algorithm.advantage", ADVANTAGES, Part(name=advantage.name, options=advantage.options), 3)
    yield from _misfit("algorithm.loss", POLICY_LOSSES, Part(name=loss.name, options=loss.options), 5)
    named: list[tuple[str, Registry[Any], str, int]] = [
        ("algorithm.aggregation", AGGREGATIONS, algorithm.aggregation, 2),
        ("algorithm.kl.estimator", KL_ESTIMATORS, algorithm.kl.estimator, 2),
        ("algorithm.drift.estimator", KL_ESTIMATORS, algorithm.drift.estimator, 2),
    ]
    for key, registry, name, arguments in named:
        yield from _misfit(key, registry, Part(name=name), arguments)
    yield from _unread("algorithm.advantage", ADVANTAGES, advantage, {"eps"} if advantage.whiten != "none" else set())
    gates = [GATES.about(part.name).reads for part in algorithm.gates if part.name in GATES]
    yield from _unread("algorithm.loss", POLICY_LOSSES, loss, set().union(*gates))
    yield from _unfit_scales(algorithm)
    for i, part in enumerate(algorithm.corrections):
        yield from _misfit(f"algorithm.corrections.{i}", CORRECTIONS, part, 5)
    for i, part in enumerate(algorithm.gates):
        yield from _misfit(f"algorithm.gates.{i}", GATES, part, 3)
    for i, part in enumerate(algorithm.shaping):
        yield from _misfit(f"algorithm.shaping.{i}", SHAPINGS, part, 2, "max_new_tokens")
    for i, part in enumerate(algorithm.filters):
        yield from _misfit(f"algorithm.filters.{i}", FILTERS, part, 1)


def _unfit_scales(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Scales of rewards and values that the advantage in force has no use for."""
    name, settings = algorithm.advantage.name, algorithm.normalize
    try:
        needs = ADVANTAGES.about(name).needs
    except ConfigError:
        return  # told where the name is looked up
    if settings.values and "critic" not in needs:
        yield f"algorithm.normalize.values = True changes nothing: advantage {name!r} has no critic"
    if settings == NormalizeConfig(eps=settings.eps) != NormalizeConfig():
        yield f"algorithm.normalize.eps = {settings.eps} changes nothing: no terms, rewards or values are normalised"
    given = [f"normalize.{k}" for k in ("terms", "rewards") if getattr(settings, k) != "none"]
    given += ["shaping"] if algorithm.shaping else []
    if "greedy" in needs and given:
        yield (
            f"algorithm.{given[0]} changes the rewards of answers and not that of the greedy answer, which advantage {name!r} takes "
            "off them; leave it out"
        )


def _unread(key: str, registry: Registry[Any], settings: AdvantageConfig | LossConfig, also: set[str]) -> Iterator[str]:
    """Settings that were changed and that the built-in function in force does not read."""
    if settings.name not in registry:
        return
    read = registry.about(settings.name).reads | also | {"name", "options", "whiten"}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name not in read and value != field.default:
            known = ", ".join(sorted(registry.about(settings.name).reads)) or "none of them"
            yield f"{key}.{name} = {value} changes nothing: {settings.name!r} reads {known}"
