"""Every function that a config names is found, and its options fit its signature, before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
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
    named: list[tuple[str, Registry[Any], str]] = [
        ("algorithm.advantage.name", ADVANTAGES, algorithm.advantage.name),
        ("algorithm.loss.name", POLICY_LOSSES, algorithm.loss.name),
        ("algorithm.aggregation", AGGREGATIONS, algorithm.aggregation),
        ("algorithm.kl.estimator", KL_ESTIMATORS, algorithm.kl.estimator),
    ]
    for key, registry, name in named:
        yield from _unknown(key, registry, name)
    for i, part in enumerate(algorithm.shaping):
        yield from _options(f"algorithm.shaping.{i}", SHAPINGS, part, max_new_tokens=1)
    for i, part in enumerate(algorithm.filters):
        yield from _options(f"algorithm.filters.{i}", FILTERS, part)


def _unknown(key: str, registry: Registry[Any], name: str) -> Iterator[str]:
    try:
        registry[name]
    except ConfigError as error:
        yield f"{key}: {error}"


def _options(key: str, registry: Registry[Any], part: Part, **given: Any) -> Iterator[str]:
    problems = list(_unknown(key, registry, part.name))
    yield from problems
    if not problems:
        yield from _misfit(key, registry[part.name], part, given)


def _misfit(key: str, function: Callable[..., Any], part: Part, given: dict[str, Any]) -> Iterator[str]:
    parameters = inspect.signature(function).parameters.values()
    takes = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in given]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = {p.name for p in takes}
    for name in part.options.keys() - known:
        yield f"{key}.options.{name} is not an option of {part.name!r}; it takes {', '.join(sorted(known)) or 'none'}"
    for p in takes:
        if p.default is p.empty and p.name not in part.options:
            yield f"{key}.options.{p.name} is missing: {part.name!r} needs it"
