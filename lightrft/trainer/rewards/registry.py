"""Where reward functions are filed, and what makes a function one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightrft.utils.errors import ConfigError, RewardError
from lightrft.utils.registry import Registry

REWARDS: Registry[Callable[..., Any]] = Registry("reward")
"""``reward(rollout, **options) -> float | {term: float}``; with a first parameter named ``rollouts``, a list in and a list (or a
dict of lists) out; either may be ``async def``. A function ``warm_up()`` in the same module runs once in each worker, outside
the deadline, before the first call."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its options. ``name`` finds it from another process."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    batched: bool
    asynchronous: bool

    @property
    def grouped(self) -> bool:
        """Whether one call, or one event loop, serves several rollouts."""
        return self.batched or self.asynchronous


def load_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """The function called ``name``, checked to take a rollout and ``options``.

    Raises ``RewardError`` when it cannot be found, is not a function, or does not take them.
    """
    try:
        function = REWARDS[name]
    except ConfigError as error:
        raise RewardError(str(error)) from None
    if not callable(function) or inspect.isclass(function):
        raise RewardError(f"reward {name!r} is {type(function).__name__}, not a function of a rollout")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(f"reward {name!r} has no signature that can be read: {error}; wrap it in a def") from None
    _check_signature(name, signature, options)
    called = function if inspect.isroutine(function) else type(function).__call__
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    batched = next(iter(signature.parameters)) == "rollouts"
    return Reward(_portable_name(name, function), function, dict(options), batched, asynchronous)


def _check_signature(name: str, signature: inspect.Signature, options: Mapping[str, Any]) -> None:
    shown = f"reward {name!r} is called as function(rollout{''.join(f', {k}=...' for k in options)})"
    first = next(iter(signature.parameters.values()), None)
    by_position = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    if first is None or first.kind not in by_position:
        raise RewardError(f"{shown}, but its signature is {signature}: its first parameter must take the rollout")
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise RewardError(f"{shown}, but its signature is {signature}: {error}") from None


def _portable_name(name: str, function: Callable[..., Any]) -> str:
    """A name under which a worker, which has not run the user's program, finds ``function`` too."""
    if ":" in name:
        if name.startswith("__main__:"):
            raise RewardError(f"reward {name!r}: workers cannot import the running program; use file.py:function")
        return name
    module, qualified = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", ".")
    if module.startswith("lightrft.trainer.rewards."):
        return name
    if module == "__main__" or "." in qualified:
        raise RewardError(
            f"reward {name!r} was registered by the running program, where workers cannot find it; use file.py:function"
        )
    return f"{module}:{qualified}"
