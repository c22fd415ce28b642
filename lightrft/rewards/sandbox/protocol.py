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
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{line[:60]!r} is not JSON ({type(error).__name__})") from None
    found = _message(tree) if isinstance(tree, dict) else None
    if found is None:
        raise Unreadable(f"{line[:60]!r} is no message")
    return found


def _message(tree: dict[str, Any]) -> WorkerMessage | None:
    if len(tree) == 1:
        ((name, value),) = tree.items()
        if name in ("ready", "begun", "full") and value is True:
            return WorkerMessage(ready=name == "ready", begun=name == "begun", full=name == "full")
        return WorkerMessage(error=value) if name == "error" and isinstance(value, str) and value else None
    outcome = _outcome(tree)
    return None if outcome is None else WorkerMessage(outcome=outcome)


def _outcome(tree: dict[str, Any]) -> CallOutcome | None:
    index, seconds, names = tree.pop("i", None), tree.pop("s", None), set(tree)
    if type(index) is not int or index < 0 or not _is_number(seconds) or seconds < 0:
        return None
    if names == {"terms"} and _are_terms(tree["terms"]):
        return CallOutcome(index, seconds, terms=tree["terms"])
    if names == {"kind", "reason"} and tree["kind"] in KINDS and isinstance(tree["reason"], str):
        return CallOutcome(index, seconds, kind=tree["kind"], reason=tree["reason"])
    if names == {"again"} and tree["again"] in KINDS:
        return CallOutcome(index, seconds, again=tree["again"])
    return None


def _are_terms(value: Any) -> bool:
    return isinstance(value, dict) and VALUE in value and all(map(_is_number, value.values()))


def _is_number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)
