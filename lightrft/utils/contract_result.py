"""The result of one check of a user's function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check: its name, what it asks for, and what was broken (empty where it holds)."""

    check: str
    asks: str
    broken: str
