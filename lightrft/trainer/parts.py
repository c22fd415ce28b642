"""Every function that a config names is found, and its options fit its signature, before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from lightrft.config import AlgorithmConfig, Part
from lightrft.trainer.advantages import ADVANTAGES
from lightrft.trainer.aggregation import AGGREGATIONS
from lightrft.trainer.filters import FILTERS
from lightrft.trainer.kl import KL_ESTIMATORS
from lightrft.trainer.policy_loss import POLICY_LOSSES
from lightrft.trainer.shaping import SHAPINGS
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import Registry


def check_parts(algorithm: AlgorithmConfig) -> None:
    """Raises ``ConfigError`` with every name that is not known and every option that does not fit."""
    problems = list(_problems(algorithm))
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    named: list[tuple[str, Registry[Any], str, int]] = [
        ("algorithm.advantage.name", ADVANTAGES, algorithm.advantage.name, 3),
        ("algorithm.loss.name", POLICY_LOSSES, algorithm.loss.name, 5),
        ("algorithm.aggregation", AGGREGATIONS, algorithm.aggregation, 2),
        ("algorithm.kl.estimator", KL_ESTIMATORS, algorithm.kl.estimator, 2),
    ]
    for key, registry, name, arguments in named:
        yield from _misfit(key, registry, Part(name=name), arguments)
    for key, registry, part in (
        ("algorithm.advantage", ADVANTAGES, algorithm.advantage),
        ("algorithm.loss", POLICY_LOSSES, algorithm.loss),
    ):
        if part.options and part.name in registry:
            yield f"{key}.options are for functions of your own: {part.name!r} reads none"
    for i, part in enumerate(algorithm.shaping):
        yield from _misfit(f"algorithm.shaping.{i}", SHAPINGS, part, 2, "max_new_tokens")
    for i, part in enumerate(algorithm.filters):
        yield from _misfit(f"algorithm.filters.{i}", FILTERS, part, 1)


def _misfit(key: str, registry: Registry[Any], part: Part, arguments: int, *given: str) -> Iterator[str]:
    """Why ``part`` cannot be called with ``arguments`` values, the keywords ``given`` and its own options."""
    try:
        function = registry[part.name]
    except ConfigError as error:
        yield f"{key}: {error}"
        return
    if not callable(function):
        yield f"{key}: {part.name!r} is not a function"
        return
    parameters = list(inspect.signature(function).parameters.values())
    kinds = {p.kind for p in parameters}
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(ordered) < arguments and inspect.Parameter.VAR_POSITIONAL not in kinds:
        yield f"{key}: {part.name!r} takes {len(ordered)} arguments; it is called with {arguments}"
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p not in ordered[:arguments]]
    known = {p.name for p in named} - set(given)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in sorted(set(given) - {p.name for p in named}):
            yield f"{key}: {part.name!r} must take the keyword {name}"
        for name in sorted(part.options.keys() - known):
            yield f"{key}.options.{name} is not an option of {part.name!r}; it takes {', '.join(sorted(known)) or 'none'}"
    for p in named:
        if p.default is p.empty and p.name not in part.options and p.name not in given:
            yield f"{key}.options.{p.name} is missing: {part.name!r} needs it"
    for p in ordered[arguments:]:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            yield f"{key}: {part.name!r} takes {len(ordered)} arguments; it is called with {arguments}"
