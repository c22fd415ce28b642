"""Signatures and docstrings of the functions of verbs, which notebooks and editors show."""

from __future__ import annotations

import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from lightrft.config.base import Settings, descriptions, has_setting
from lightrft.config.texts.python_form import SHORT
from lightrft.observability.events import EVENTS, OF_ROLLOUTS, RolloutsEvent
from lightrft.utils.errors import ConfigError

_TYPES = {"rewards": "Any", "data": "Data", "steps": "int", "epochs": "int", "lr": "float"}
"""Types of short keywords. The others are text."""
WIDTH = 100
"""Longest line of a docstring."""


def sign(
    function: Callable[..., Any], verb: str, classes: Sequence[type[Settings]], *, trains: bool
) -> None:
    """Give a function the signature of its settings, and a docstring that describes them.

    Args:
        function: The function, with the first line of its docstring.
        verb: Name of the verb.
        classes: Its settings.
        trains: The verb trains, and calls callbacks.
    """
    kinds = inspect.Parameter
    hints = keywords(verb, classes, trains=trains)
    function.__signature__ = inspect.Signature(  # ty: ignore[missing-attribute]
        [
            *([kinds("method", kinds.POSITIONAL_ONLY, annotation="str")] * (verb == "grm")),
            kinds("configs", kinds.VAR_POSITIONAL, annotation="Given"),
            *(
                kinds(name, kinds.KEYWORD_ONLY, default=..., annotation=hint)
                for name, hint in hints.items()
            ),
            kinds("settings", kinds.VAR_KEYWORD, annotation="Any"),
        ]
    )
    known = {name: text for cls in classes for name, text in descriptions(cls).items()}
    known |= {name: f"Short for `{long}`." for name, long in short_names(classes).items()}
    known |= {name: (inspect.getdoc(event) or "").split("\n")[0] for name, event in EVENTS.items()}
    lines = [function.__doc__ or "", "", "Args:"]
    for name in hints:
        text = f"{name}: {known.get(name, '')}"
        lines += textwrap.wrap(
            text,
            WIDTH - 4,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
        )
    function.__doc__ = "\n".join(lines)


def check_call(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise ``ConfigError`` for a function that cannot be called as a run calls it.

    Args:
        name: Name of the function in messages.
        function: The function.
        arguments: Names of the arguments that it gets.
    """
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(called):
        raise ConfigError(f"{name} is async, and a run does not wait for it; give a plain function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name} is called as function({', '.join(arguments)}), but its signature is "
            f"{signature}: {error}"
        ) from None


def short_names(classes: Sequence[type[Settings]]) -> dict[str, str]:
    """Return the setting of each short keyword that is no setting itself."""
    found = {}
    for name, settings in SHORT.items():
        if not any(name in cls.model_fields for cls in classes):
            long = (one for one in settings if any(has_setting(cls, one) for cls in classes))
            found[name] = next(long, "")
    return {name: long for name, long in found.items() if long}


def keywords(verb: str, classes: Sequence[type[Settings]], *, trains: bool) -> dict[str, str]:
    """Return the type of each keyword of a function, as text.

    Args:
        verb: Name of the verb.
        classes: Its settings.
        trains: The verb trains, and calls callbacks.
    """
    fields = {name: field for cls in classes for name, field in cls.model_fields.items()}
    found = {name: _hint(name, field.annotation) for name, field in fields.items()}
    found |= {name: _TYPES.get(name, "str") for name in short_names(classes)}
    for keyword, event in EVENTS.items():
        of_rollouts = event is RolloutsEvent
        if verb in (*OF_ROLLOUTS, "grm") if of_rollouts else trains:
            found[keyword] = f"Callable[[{event.__name__}], object] | None"
    return found


def _hint(name: str, kind: Any) -> str:
    """Return the type of a keyword of a function."""
    if name in ("data", "validation", "eval"):
        return "Data"
    if name in ("model", "reward", "teacher", "reference"):
        return "Any"
    inner = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Settings):
        return f"{kind.__name__} | Mapping[str, Any]" + " | str" * bool(kind.shorthand)
    if typing.get_origin(kind) is typing.Literal:
        return f"Literal[{', '.join(map(repr, inner))}]".replace("'", '"')
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join("None" if one is type(None) else _hint(name, one) for one in inner)
    if kind in (str, int, float, bool):
        return kind.__name__
    return {dict: "Mapping[str, Any]", tuple: "Sequence[Any]"}.get(typing.get_origin(kind), "Any")
