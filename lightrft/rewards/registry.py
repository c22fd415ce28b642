"""Register reward functions and check their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lightrft.utils.errors import ConfigError, RewardError
from lightrft.utils.registry import Registry, other_names

F = TypeVar("F", bound=Callable[..., Any])

CONTRACT = "def reward(r): return score(r.text, r.prompt.label)"
"""A function that fits, for messages."""

OTHER_NAMES = {
    **dict.fromkeys(("accuracy", "accuracy_reward", "gsm8k", "math_verify"), "math"),
    **dict.fromkeys(("format_reward", "think_format_reward"), "format"),
}
"""Names of rewards in other frameworks, and the nearest one here."""

REWARDS: Registry[Callable[..., Any]] = Registry("reward", other_names(OTHER_NAMES))
"""Registry of reward functions: ``reward(rollout, **options) -> float | {term: float}``.

A dict names its reward ``reward`` or ``score``. Its other values are only reported.

If the first parameter is named ``rollouts``, the function takes a list and returns a list, or a
dict of lists. Either form may be ``async def``. A function ``warm_up()`` in the same module runs
once in each worker, outside the deadline, before the first call.
"""


class OverBudget(BaseException):
    """Raised in a call that has used its CPU time.

    Not an ``Exception``, so that handlers in libraries do not catch it.
    """


_CPU_SECONDS: dict[Callable[..., Any], float] = {}


def ungraded_beyond(cpu_seconds: float) -> Callable[[F], F]:
    """Limit the CPU time of a reward function; a call beyond ``cpu_seconds`` counts as wrong.

    Such a response gets reward 0 and the term ``ungraded`` = 1. Without this limit the call costs
    ``reward.timeout`` and fails, so the policy never learns to avoid the response. Applies to
    functions of one rollout that are not ``async``.
    """

    def mark(function: F) -> F:
        _CPU_SECONDS[function] = cpu_seconds
        return function

    return mark


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its options.

    Attributes:
        name: Finds the function from another process.
        function: The function itself.
        options: Keyword arguments of every call.
        batched: The function takes a list of rollouts.
        asynchronous: The function is a coroutine function.
        cpu_seconds: See ``ungraded_beyond``. ``None`` sets no limit.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, object]
    batched: bool
    asynchronous: bool
    cpu_seconds: float | None = None

    @property
    def grouped(self) -> bool:
        """Return whether one call, or one event loop, serves several rollouts."""
        return self.batched or self.asynchronous


def load_reward(name: str, options: Mapping[str, object]) -> Reward:
    """Return the reward function ``name``, checked to take a rollout and ``options``.

    Raises:
        RewardError: If it is not found, is not a function, or does not take these arguments.
    """
    try:
        function = REWARDS[name]
    except ConfigError as error:
        raise RewardError(str(error)) from None
    if not callable(function) or inspect.isclass(function):
        kind = type(function).__name__
        way_out = f"write {CONTRACT}" if kind != "type" else "name an instance of the class"
        raise RewardError(f"reward {name!r} is {kind}, not a function of a rollout; {way_out}")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(
            f"reward {name!r} has no signature that can be read: {error}; wrap it in a def"
        ) from None
    _refuse_foreign(name, signature, options)
    _check_signature(name, signature, options)
    # An object may be callable by a method that is a coroutine function.
    called = function if inspect.isroutine(function) else type(function).__call__
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    batched = next(iter(signature.parameters)) == "rollouts"
    budget = None if batched or asynchronous else _budget(function)
    # Last: a function with a wrong signature gets that message, not one about its name.
    portable = _portable_name(name, function)
    return Reward(portable, function, dict(options), batched, asynchronous, budget)


def _budget(function: Callable[..., Any]) -> float | None:
    try:
        return _CPU_SECONDS.get(function)
    except TypeError:  # an object that has no hash
        return None


FOREIGN = {
    "completions": "TRL",
    "solution_str": "verl",
    "ground_truth": "verl",
    "queries": "OpenRLHF",
    "reward_inputs": "EasyR1",
}
"""Parameter of a reward function of another framework, to the framework."""


def _refuse_foreign(name: str, signature: inspect.Signature, options: Mapping[str, object]) -> None:
    """Raise ``RewardError`` for a function that takes what another framework gives it."""
    needed = {
        each.name
        for each in signature.parameters.values()
        if each.default is inspect.Parameter.empty
    }
    for parameter, framework in FOREIGN.items():
        if parameter in needed - options.keys():
            raise RewardError(
                f"reward {name!r} has the parameter {parameter!r} of rewards of {framework}; here "
                f"a function gets one rollout and returns a number: {CONTRACT}. The other columns "
                "of the row are in r.prompt.columns (docs/tutorials/own-reward.md)"
            )


def _check_signature(
    name: str, signature: inspect.Signature, options: Mapping[str, object]
) -> None:
    arguments = "".join(f", {option}=..." for option in options)
    shown = f"reward {name!r} is called as function(rollout{arguments})"
    first = next(iter(signature.parameters.values()), None)
    by_position = {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    if first is None or first.kind not in by_position:
        raise RewardError(
            f"{shown}, but its signature is {signature}: its first parameter must take the rollout"
        )
    try:
        signature.bind(None, **options)
    except TypeError as error:
        given = "{function: " + name + ", options: {" + _options_of(signature) + "}}"
        raise RewardError(
            f"{shown}, but its signature is {signature}: {error}. The first has all of the row: "
            "r.text, r.prompt.label, r.prompt.columns. Arguments after it are options of the term: "
            f"{given}"
        ) from None


def _options_of(signature: inspect.Signature) -> str:
    """Return the options of a reward without defaults as YAML, or all of them if it needs none."""
    _, *others = signature.parameters.values()
    named = [one for one in others if one.kind is not inspect.Parameter.VAR_KEYWORD]
    needed = [one for one in named if one.default is inspect.Parameter.empty] or named
    return ", ".join(f"{one.name}: ..." for one in needed)


def _portable_name(name: str, function: Callable[..., Any]) -> str:
    """Return a name under which a worker finds ``function`` without running the user's program."""
    if name.startswith("__main__:"):
        raise RewardError(
            f"reward {name!r}: workers cannot import the running program; use file.py:function"
        )
    if ":" in name:
        return name
    module = getattr(function, "__module__", "__main__")
    if module.startswith("lightrft.rewards."):
        return name
    qualified = getattr(function, "__qualname__", ".")
    if module == "__main__" or "." in qualified:
        raise RewardError(
            f"reward {name!r} was registered by the running program, where workers cannot find "
            "it; use file.py:function"
        )
    return f"{module}:{qualified}"
