"""Collect every effective setting of an algorithm and its origin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.sample_selection import SELECTIONS
from lightrft.algorithms.token_masks import TOKEN_MASKS
from lightrft.algorithms.validate.component_kinds import COMPONENT_KINDS, ComponentKind
from lightrft.config.algorithm import PARTS, AlgorithmConfig
from lightrft.config.base import Tree
from lightrft.config.presets import PRESETS, source_of
from lightrft.config.verbs import RLConfig
from lightrft.rollout.curriculum import CURRICULA
from lightrft.utils.registry import Registry

OF_ADVANTAGE = frozenset({"gamma", "gae_lambda", "eps"})
OF_LOSS = frozenset({"ratio", "clip_low", "clip_high", "dual_clip", "ratio_cap"})
"""Settings that several advantages read, and that several losses read."""
OF_LIST = {row.key.removeprefix("algorithm."): row for row in COMPONENT_KINDS.values()}


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One effective setting and its origin."""

    key: str
    value: object
    source: str


def numbers(config: RLConfig, sources: Mapping[str, str]) -> tuple[EffectiveSetting, ...]:
    """Return the settings that the algorithm reads, including options and related other settings.

    ``sources`` gives the file or argument that set a key.
    """
    algorithm = config.algorithm
    preset = algorithm.preset or ""
    in_preset = flat(PRESETS.get(preset, {}))
    tree = algorithm.model_dump(mode="json")
    given = flat(tree)
    found = []
    # ``given`` lacks options that the user left to the defaults of their function.
    for key, value in flat(with_option_defaults(tree)).items():
        branch, _, leaf = key.partition(".")
        if value in (None, {}) or IDLE.get(branch, _never)(leaf, algorithm):
            continue
        full = f"algorithm.{key}"
        if key not in given:
            origin = f"default of {_owner(key, algorithm)}"
        elif given_by := set_by(full, sources):
            origin = given_by
        elif key in in_preset:
            # True and False are ints in Python.
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            cited = source_of(preset, key) if is_number else None
            origin = f"preset {preset}: {cited}" if cited else f"preset {preset}"
        else:
            origin = "default"
        found.append(EffectiveSetting(full, value, origin))
    for key, value in _beside(config):
        found.append(EffectiveSetting(key, value, sources.get(key, "default")))
    return tuple(found)


def flat(tree: Tree | Sequence[Any], prefix: str = "") -> Tree:
    """Flatten a tree to ``{"a.b": value, "list.0.c": value}``.

    An empty mapping is a leaf. An empty list is dropped.
    """
    branches = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    leaves: Tree = {}
    for key, value in branches:
        name = f"{prefix}{key}"
        is_branch = isinstance(value, list | tuple | Mapping) and value != {}
        leaves |= flat(value, f"{name}.") if is_branch else {name: value}
    return leaves


def _never(leaf: str, algorithm: AlgorithmConfig) -> bool:
    return False


def _unread(registry: Registry[Any], name: str, shared: frozenset[str]) -> frozenset[str]:
    """Return the settings of ``shared`` that the function ``name`` does not read.

    Args:
        registry: The registry of the function.
        name: Name of the function.
        shared: Settings that several functions of the registry read.
    """
    # A function of the user may read all of them.
    return shared - registry.about(name).reads if name in registry else frozenset()


def _idle_advantage(leaf: str, algorithm: AlgorithmConfig) -> bool:
    if leaf == "eps" and algorithm.advantage.normalize != "none":  # read by the whitening
        return False
    return leaf in _unread(ADVANTAGES, algorithm.advantage.name, OF_ADVANTAGE)


def _idle_loss(leaf: str, algorithm: AlgorithmConfig) -> bool:
    idle = _unread(POLICY_LOSSES, algorithm.loss.name, OF_LOSS)
    # Token masks read settings of the loss too.
    for mask in algorithm.token_masks:
        idle &= _unread(TOKEN_MASKS, mask.name, OF_LOSS)
    return leaf in idle


def _idle_kl(leaf: str, algorithm: AlgorithmConfig) -> bool:
    kl = algorithm.kl
    # Of a KL term that is not used, the reference may still be: by a process reward.
    of_reference = dict.fromkeys(("refresh_every", "refresh_decay"), not kl.refresh_every)
    if not kl.used:
        return leaf != "where" and of_reference.get(leaf, True)
    is_scheduled = kl.controller in ("linear", "cosine")
    idle = {
        **of_reference,
        "target": kl.controller != "adaptive",
        "horizon": kl.controller != "adaptive",
        "final": not is_scheduled,
        "steps": not is_scheduled,
        "weighted": kl.where != "loss",
    }
    return idle.get(leaf, False)


def _idle_normalize(leaf: str, algorithm: AlgorithmConfig) -> bool:
    settings = algorithm.normalize
    active = {
        "terms": settings.terms != "none",
        "rewards": settings.rewards != "none",
        "values": settings.values,
    }
    return not active.get(leaf, any(active.values()))


def _idle_distill(leaf: str, algorithm: AlgorithmConfig) -> bool:
    kind = algorithm.distill.kind
    return kind == "none" or (leaf == "beta" and kind != "jsd")


def _idle_lagrangian(leaf: str, algorithm: AlgorithmConfig) -> bool:
    settings = algorithm.lagrangian
    if not settings.costs:
        return True
    read_by_fixed = leaf in ("init", "lr") or leaf.endswith(".name")
    return not settings.lr and not read_by_fixed


IDLE: dict[str, Callable[[str, AlgorithmConfig], bool]] = {
    "advantage": _idle_advantage,
    "loss": _idle_loss,
    "kl": _idle_kl,
    "distill": _idle_distill,
    "entropy": lambda leaf, algorithm: leaf != "coef" and algorithm.entropy.target is None,
    "lagrangian": _idle_lagrangian,
    "normalize": _idle_normalize,
    "policy_drift": lambda leaf, algorithm: algorithm.policy_drift.coef == 0,
    "positive_nll": lambda leaf, algorithm: algorithm.positive_nll.coef == 0,
    "value": lambda leaf, algorithm: not Requirements.of(algorithm).critic,
    "constant_length": lambda leaf, algorithm: algorithm.aggregation != "constant",
}
"""Predicate for each branch of ``algorithm``: True for a leaf that nothing reads."""


def with_option_defaults(tree: Tree) -> Tree:
    """Return the settings as a tree in which options have the defaults of their function."""
    full = dict(tree)
    # These are single functions. The branches of ``PARTS`` are lists of functions.
    for branch in ("advantage", "loss"):
        full[branch] = _with_defaults(COMPONENT_KINDS[branch], tree[branch])
    for branch in PARTS:
        full[branch] = [_with_defaults(OF_LIST[branch], part) for part in tree[branch]]
    return full


def _with_defaults(kind: ComponentKind, part: Tree) -> Tree:
    """Return the settings of a function with the defaults of options that are not given."""
    options = kind.options(kind.registry[part["name"]])
    required = inspect.Parameter.empty
    defaults = {option: value for option, value in options.items() if value is not required}
    return {**part, "options": {**defaults, **part["options"]}}


def _owner(key: str, algorithm: AlgorithmConfig) -> str:
    """Return the name of the function with the option ``key``."""
    place: Any = algorithm
    for word in key.partition(".options.")[0].split("."):
        place = place[int(word)] if word.isdigit() else getattr(place, word)
    return place.name


def set_by(key: str, sources: Mapping[str, str]) -> str | None:
    """Return the origin of ``key``: the key itself, an enclosing list, or a shorthand value."""
    words = key.split(".")
    # Not down to one word, unless it is the key itself: ``algorithm`` is the key of a preset, which
    # is no origin of a number.
    for count in range(len(words), min(len(words), 2) - 1, -1):
        above = ".".join(words[:count])
        if sources.get(above):
            return sources[above]
    for other, source in sources.items():
        if other.startswith(f"{key}."):
            return source
    return None


def effective(
    values: Mapping[str, object], sources: Mapping[str, str]
) -> tuple[EffectiveSetting, ...]:
    """Return settings, given by key, with the file or argument that set each."""
    found = []
    for key, value in values.items():
        found.append(EffectiveSetting(key, value, set_by(key, sources) or "default"))
    return tuple(found)


def _options(
    key: str,
    given: Mapping[str, object],
    function: Callable[..., object],
) -> Iterator[tuple[str, object]]:
    """Yield the options of a function, as given or by default.

    Args:
        key: The setting that names the function.
        given: The options that are set.
        function: Has its options as keyword-only arguments.
    """
    values: dict[str, object] = {}
    for parameter in inspect.signature(function).parameters.values():
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.KEYWORD_ONLY and has_default:
            values[parameter.name] = parameter.default
    for name, value in {**values, **given}.items():
        if value is not None:
            yield f"{key}.options.{name}", value


def _beside(config: RLConfig) -> Iterator[tuple[str, object]]:
    """Yield the settings of other sections that change the objective."""
    requirements = Requirements.of(config.algorithm)
    if requirements.critic:
        yield "critic.warmup_steps", config.critic.warmup_steps
        yield "critic.optimizer.lr", config.critic.optimizer.lr
    if requirements.cost_critic:
        yield "cost_critic.optimizer.lr", config.cost_critic.optimizer.lr
    if requirements.prm:
        yield "prm.beta", config.prm.beta
        yield "prm.threshold", config.prm.threshold
        yield "prm.forward", config.prm.forward
        yield "prm.optimizer.lr", config.prm.optimizer.lr
    if config.ptx.coef:
        yield "ptx.coef", config.ptx.coef
        yield "ptx.batch_size", config.ptx.batch_size
    yield "rollout.group_size", config.rollout.group_size
    select = config.rollout.select
    if select is not None:
        yield from _options("rollout.select", select.options, SELECTIONS[select.name])
    curriculum = config.rollout.curriculum
    if curriculum is not None:
        yield "rollout.curriculum.threshold", curriculum.threshold
        yield "rollout.curriculum.momentum", curriculum.momentum
        yield from _options("rollout.curriculum", curriculum.options, CURRICULA[curriculum.name])
    yield "train.ppo_epochs", config.train.ppo_epochs
    yield "train.num_mini_batches", config.train.num_mini_batches
    yield "sampling.temperature", config.sampling.temperature
    yield "sampling.max_new_tokens", config.sampling.max_new_tokens
