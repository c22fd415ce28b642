"""Parse and validate the lines that a reward worker sends.

A reward function can reach the same socket and write anything to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightrft.rewards.sandbox.results import VALUE

KINDS = ("deadline", "memory", "raised", "value")
"""Kinds of failed calls that a worker reports."""


class Unreadable(Exception):
    """A line is not one of the worker's messages."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of one call: either ``terms``, or the ``kind`` and ``reason`` of a failure.

    Attributes:
        index: Number of the call within its group.
        seconds: Duration of the call.
        terms: Named numbers of a successful call.
        kind: Kind of failure, one of ``COMPONENT_KINDS``.
        reason: Message of the failure.
        again: Kind of failure of a call shared by several rollouts. Each rollout is then called
            alone.
    """

    index: int
    seconds: float
    terms: Mapping[str, float] | None = None
    kind: str = ""
    reason: str = ""
    again: str = ""


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """One line. Exactly one of its fields is set."""

    ready: bool = False
    begun: bool = False
    full: bool = False
    error: str = ""
    outcome: CallOutcome | None = None


def message_of(line: bytes) -> WorkerMessage:
    """Parse one line.

    Raises:
        Unreadable: If it is not one of the worker's messages.
    """
    try:
        tree = json.loads(line)
    # Thousands of opening brackets are a RecursionError.
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{line[:60]!r} is not JSON ({type(error).__name__})") from None
    found = _message(tree) if isinstance(tree, dict) else None
    if found is None:
        raise Unreadable(f"{line[:60]!r} is no message")
    return found


def _message(tree: dict[str, object]) -> WorkerMessage | None:
    if len(tree) != 1:
        outcome = _outcome(tree)
        return None if outcome is None else WorkerMessage(outcome=outcome)
    ((name, value),) = tree.items()
    # Not ==: 1 equals True.
    if name in ("ready", "begun", "full") and value is True:
        return WorkerMessage(ready=name == "ready", begun=name == "begun", full=name == "full")
    if name == "error" and isinstance(value, str) and value:
        return WorkerMessage(error=value)
    return None


def _outcome(tree: dict[str, Any]) -> CallOutcome | None:
    index = tree.pop("i", None)
    seconds = tree.pop("s", None)
    # Not isinstance: True is an int, too.
    if type(index) is not int or index < 0:
        return None
    if not _is_number(seconds) or seconds < 0:
        return None
    names = set(tree)
    if names == {"terms"} and _are_terms(tree["terms"]):
        return CallOutcome(index, seconds, terms=tree["terms"])
    if names == {"again"} and tree["again"] in KINDS:
        return CallOutcome(index, seconds, again=tree["again"])
    is_failure = names == {"kind", "reason"} and tree["kind"] in KINDS
    if is_failure and isinstance(tree["reason"], str):
        return CallOutcome(index, seconds, kind=tree["kind"], reason=tree["reason"])
    return None


def _are_terms(value: object) -> bool:
    if not isinstance(value, dict) or VALUE not in value:
        return False
    return all(map(_is_number, value.values()))


def _is_number(value: object) -> bool:
    # The worker makes every number a float, so an int is not its own. json also reads NaN.
    return type(value) is float and math.isfinite(value)
