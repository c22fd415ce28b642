"""The result of one check of a user's function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Args:
        check: name of the check.
        asks: the condition that the function must meet.
        broken: description of the violation. Empty if the check passed.
    """

    check: str
    asks: str
    broken: str
