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
    # A pattern ignores other keys, so their number is compared, too. ``True`` does not match 1.
    match len(tree), tree:
        case 1, {"ready": True}:
            return WorkerMessage(ready=True)
        case 1, {"begun": True}:
            return WorkerMessage(begun=True)
        case 1, {"full": True}:
            return WorkerMessage(full=True)
        case 1, {"error": str(error)} if error:
            return WorkerMessage(error=error)
    outcome = _outcome(tree)
    return None if outcome is None else WorkerMessage(outcome=outcome)


def _outcome(tree: dict[str, Any]) -> CallOutcome | None:
    index = tree.pop("i", None)
    seconds = tree.pop("s", None)
    # Not isinstance: True is an int, too.
    if type(index) is not int or not _is_number(seconds) or min(index, seconds) < 0:
        return None
    match len(tree), tree:
        case 1, {"terms": terms} if _are_terms(terms):
            return CallOutcome(index, seconds, terms=terms)
        case 1, {"again": again} if again in KINDS:
            return CallOutcome(index, seconds, again=again)
        case 2, {"kind": kind, "reason": str(reason)} if kind in KINDS:
            return CallOutcome(index, seconds, kind=kind, reason=reason)
    return None


def _are_terms(value: object) -> bool:
    if not isinstance(value, dict) or VALUE not in value:
        return False
    return all(map(_is_number, value.values()))


def _is_number(value: object) -> bool:
    # The worker makes every number a float, so an int is not its own. json also reads NaN.
    return type(value) is float and math.isfinite(value)
