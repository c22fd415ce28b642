"""Describe the kinds of functions of an algorithm: their registries and call signatures."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from inspect import Parameter
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.group_filters import FILTERS
from lightrft.algorithms.importance_sampling import IS_CORRECTIONS
from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.policy_losses import POLICY_LOSSES
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.reward_model.losses import REWARD_LOSSES
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

    def options(self, function: Function) -> dict[str, object]:
        """Return the options of ``function`` with their defaults.

        A required option has ``inspect.Parameter.empty``.
        """
        parameters = list(inspect.signature(function).parameters.values())
        options = {}
        for parameter in parameters[len(self.arguments) :]:
            by_name = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if by_name and parameter.name not in self.given:
                options[parameter.name] = parameter.default
        return options


COMPONENT_KINDS: dict[str, ComponentKind] = {
    "advantage": ComponentKind(
        ADVANTAGES, "algorithm.advantage", ("batch", "token_rewards", "settings")
    ),
    "loss": ComponentKind(
        POLICY_LOSSES,
        "algorithm.loss",
        ("logprobs", "old", "advantages", "rows", "settings"),
    ),
    "correction": ComponentKind(
        IS_CORRECTIONS,
        "algorithm.importance_sampling",
        ("logprobs", "old", "behavior", "advantages", "rows"),
    ),
    "token_mask": ComponentKind(
        TOKEN_MASKS, "algorithm.token_masks", ("batch", "settings", "generator")
    ),
    "shaping": ComponentKind(
        SHAPINGS, "algorithm.shaping", ("batch", "rewards"), ("max_new_tokens",)
    ),
    "filter": ComponentKind(FILTERS, "algorithm.filters", ("group",)),
    "aggregation": ComponentKind(AGGREGATIONS, "algorithm.aggregation", ("rows", "constant")),
    "kl": ComponentKind(KL_ESTIMATORS, "algorithm.kl.estimator", ("logprobs", "ref")),
    "preference": ComponentKind(PREFERENCE_LOSSES, "preference.losses", ("data", "settings")),
    "reward_model": ComponentKind(REWARD_LOSSES, "reward_model.losses", ("data",)),
}


def kind_of(name: str) -> str:
    """Return the kind of a registered name or of a user's function.

    A user's function is recognized by the number and names of its arguments.

    Raises:
        ConfigError: If no kind, or more than one, fits.
    """
    if ":" not in name:
        return _kind_of_registered(name)
    # any registry will do: all import ``package.module:function`` in the same way
    function = COMPONENT_KINDS["loss"].registry[name]
    if not callable(function):
        raise ConfigError(f"{name!r} is a {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters
    # "batch" is a keyword of one kind and a positional argument of others, so keywords go first.
    known_keywords = {keyword for kind in COMPONENT_KINDS.values() for keyword in kind.given}
    keywords = known_keywords & parameters.keys()
    arguments = [
        parameter.name
        for parameter in _positional(parameters.values())
        if parameter.default is parameter.empty and parameter.name not in keywords
    ]
    best = _closest_kinds(arguments, keywords)
    # a loss of reward models says its form of the data, and a filter does not
    if len(best) > 1 and not hasattr(function, "kind"):
        best = [kind for kind in best if kind != "reward_model"]
    if len(best) == 1:
        return best[0]
    # without a kind of as many arguments, all kinds are shown
    forms = "; ".join(
        f"{kind} ({', '.join(COMPONENT_KINDS[kind].arguments)})" for kind in best or COMPONENT_KINDS
    )
    taken = ", ".join(arguments)
    raise ConfigError(
        f"{name!r} takes ({taken}), which fits no kind alone: {forms}. Say which with --kind"
    )


def _kind_of_registered(name: str) -> str:
    """Return the only kind whose registry holds ``name``."""
    # a name may stand in two tables: reinforce is an advantage and a loss
    holders = [kind for kind, row in COMPONENT_KINDS.items() if name in row.registry]
    if len(holders) == 1:
        return holders[0]
    found = f"is a {' and a '.join(holders)}" if holders else "is not the name of any part"
    choices = "|".join(holders or COMPONENT_KINDS)
    raise ConfigError(f"{name!r} {found}; say which kind is meant with --kind <{choices}>")


def _closest_kinds(arguments: list[str], keywords: set[str]) -> list[str]:
    """Return the kinds with this call signature that share the most argument names with it.

    Args:
        arguments: Names of the required positional arguments.
        keywords: Names of the keyword arguments that a kind passes.
    """
    shared = {}
    for kind, row in COMPONENT_KINDS.items():
        if len(row.arguments) == len(arguments) and set(row.given) == keywords:
            shared[kind] = sum(map(operator.eq, row.arguments, arguments))
    most = max(shared.values(), default=0)
    return [kind for kind, count in shared.items() if count == most]


def _positional(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters that can be given by position."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind in kinds]


def signature_problems(
    key: str,
    registry: Registry[Any],
    part: ComponentConfig,
    arguments: int,
    *given: str,
) -> Iterator[str]:
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
    kinds = {parameter.kind for parameter in parameters}
    positional = _positional(parameters)
    wrong_count = (
        f"{key}: {part.name!r} takes {len(positional)} arguments; it is called with {arguments}"
    )
    if len(positional) < arguments and Parameter.VAR_POSITIONAL not in kinds:
        yield wrong_count
    by_name = [
        parameter
        for parameter in parameters
        if parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    # given by position, so the function may name them as it likes
    by_position = positional[:arguments]
    keywords = {parameter.name: parameter for parameter in by_name if parameter not in by_position}
    if Parameter.VAR_KEYWORD not in kinds:
        yield from _unknown_keywords(key, part, keywords.keys(), set(given))
    for name, choices in _choices(function, part.options).items():
        value = part.options[name]
        if value not in choices:
            yield f"{key}.options.{name} = {value!r} is none of {', '.join(choices)}"
    passed = {*part.options, *given}
    for name, parameter in keywords.items():
        if parameter.default is parameter.empty and name not in passed:
            yield f"{key}.options.{name} is missing: {part.name!r} needs it"
    for parameter in positional[arguments:]:
        # An option cannot be passed to it: it would stay without a value.
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            yield wrong_count


def _unknown_keywords(
    key: str, part: ComponentConfig, keywords: Set[str], given: set[str]
) -> Iterator[str]:
    """Yield the keywords that the function does not take: those of its kind, then options.

    Args:
        key: The setting, for messages.
        part: Name and options of the function.
        keywords: Names that the function accepts as keywords.
        given: Keywords that the kind passes.
    """
    for name in sorted(given - keywords):
        yield f"{key}: {part.name!r} must take the keyword {name}"
    options = keywords - given
    known = ", ".join(sorted(options)) or "none"
    for name in sorted(part.options.keys() - options):
        yield f"{key}.options.{name} is not an option of {part.name!r}; it takes {known}"


def _choices(function: Function, options: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the options that accept a fixed set of strings, with these strings.

    Other annotations are not evaluated, since they may name torch types, which would import torch.
    """
    unwrapped = inspect.unwrap(function)
    annotations = getattr(unwrapped, "__annotations__", {})
    named = {name: hint for name, hint in annotations.items() if name in options}
    names_in_scope = getattr(unwrapped, "__globals__", {})
    try:
        hints = get_type_hints(SimpleNamespace(__annotations__=named), names_in_scope)
    except (NameError, TypeError):
        # A user's annotations may use names that exist only for the type checker.
        return {}
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
