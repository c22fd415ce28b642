"""Describe the kinds of functions of an algorithm: their registries and call signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.group_filters import FILTERS
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.reward_shaping import SHAPINGS
from lightrft.algorithms.token_masks import TOKEN_MASKS
from lightrft.config.base import ComponentConfig
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import Registry

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ComponentKind:
    """The registry and call signature of one kind of function.

    Any other keyword of a function is an option.

    Attributes:
        registry: Where the functions are registered.
        key: The setting that names a function.
        arguments: Names of the positional arguments.
        given: Names of the keyword arguments.
    """

    registry: Registry[Any]
    key: str
    arguments: tuple[str, ...]
    given: tuple[str, ...] = ()

    def options(self, function: Function) -> dict[str, Any]:
        """Return the options of ``function`` with their defaults.

        A required option has ``inspect.Parameter.empty``.
        """
        parameters = list(inspect.signature(function).parameters.values())[len(self.arguments) :]
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return {p.name: p.default for p in parameters if p.kind in kinds and p.name not in self.given}


COMPONENT_KINDS: dict[str, ComponentKind] = {
    "advantage": ComponentKind(ADVANTAGES, "algorithm.advantage", ("batch", "token_rewards", "settings")),
    "loss": ComponentKind(POLICY_LOSSES, "algorithm.loss", ("logprobs", "old", "advantages", "rows", "settings")),
    "correction": ComponentKind(IS_CORRECTIONS, "algorithm.corrections", ("logprobs", "old", "behavior", "advantages", "rows")),
    "gate": ComponentKind(TOKEN_MASKS, "algorithm.gates", ("batch", "settings", "generator")),
    "shaping": ComponentKind(SHAPINGS, "algorithm.shaping", ("batch", "rewards"), ("max_new_tokens",)),
    "filter": ComponentKind(FILTERS, "algorithm.filters", ("group",)),
    "aggregation": ComponentKind(AGGREGATIONS, "algorithm.aggregation", ("rows", "constant")),
    "kl": ComponentKind(KL_ESTIMATORS, "algorithm.kl.estimator", ("logprobs", "ref")),
}


def kind_of(name: str) -> str:
    """Return the kind of a registered name or of a user's function.

    A user's function is recognized by the number and names of its arguments.

    Raises:
        ConfigError: If no kind, or more than one, fits.
    """
    if ":" not in name:
        holders = [kind for kind, row in COMPONENT_KINDS.items() if name in row.registry]
        if len(holders) == 1:
            return holders[0]
        found = f"is a {' and a '.join(holders)}" if holders else "is not the name of any part"
        raise ConfigError(f"{name!r} {found}; say which kind is meant with --kind <{'|'.join(holders or COMPONENT_KINDS)}>")
    parameters = inspect.signature(COMPONENT_KINDS["loss"].registry[name]).parameters
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    keywords = {k for row in COMPONENT_KINDS.values() for k in row.given if k in parameters}
    taken = [p for p in parameters.values() if p.kind in places and p.default is p.empty]
    ordered = [p.name for p in taken if p.name not in keywords]
    fitting = [kind for kind, row in COMPONENT_KINDS.items() if len(row.arguments) == len(ordered) and set(row.given) == keywords]
    shared = {kind: sum(a == b for a, b in zip(COMPONENT_KINDS[kind].arguments, ordered, strict=True)) for kind in fitting}
    best = [kind for kind in fitting if shared[kind] == max(shared.values())]
    if len(best) != 1:
        forms = "; ".join(f"{kind} ({', '.join(COMPONENT_KINDS[kind].arguments)})" for kind in best or COMPONENT_KINDS)
        raise ConfigError(f"{name!r} takes ({', '.join(ordered)}), which fits no kind alone: {forms}. Say which with --kind")
    return best[0]


def signature_problems(key: str, registry: Registry[Any], part: ComponentConfig, arguments: int, *given: str) -> Iterator[str]:
    """Yield the reasons why ``part`` cannot be called as its kind is.

    Args:
        key: The setting, for messages.
        registry: Where the function is looked up.
        part: Name and options of the function.
        arguments: Number of positional arguments.
        given: Names of the keyword arguments.
    """
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
            yield (f"{key}.options.{name} is not an option of {part.name!r}; it takes {', '.join(sorted(known)) or 'none'}")
    for name, choices in _choices(function, part.options).items():
        if part.options[name] not in choices:
            yield f"{key}.options.{name} = {part.options[name]!r} is none of {', '.join(choices)}"
    for p in named:
        if p.default is p.empty and p.name not in part.options and p.name not in given:
            yield f"{key}.options.{p.name} is missing: {part.name!r} needs it"
    for p in ordered[arguments:]:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            yield (f"{key}: {part.name!r} takes {len(ordered)} arguments; it is called with {arguments}")


def _choices(function: Any, options: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the options that accept a fixed set of strings, with these strings.

    Other annotations are not evaluated, since they may name torch types, which would import torch.
    """
    bare = inspect.unwrap(function)
    named = {name: hint for name, hint in getattr(bare, "__annotations__", {}).items() if name in options}
    try:
        hints = get_type_hints(SimpleNamespace(__annotations__=named), getattr(bare, "__globals__", {}))
    except (
        NameError,
        TypeError,
    ):  # annotations of a user's own function may name what is not there
        return {}
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
