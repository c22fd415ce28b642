"""A line of the report of ``lightrft doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        section: Heading of the line.
        verdict: ``bad`` if the run would fail, ``warn`` if it may be slow or learn less.
        about: Subject of the line, e.g. a setting.
        says: The result, and a remedy if one is needed.
    """

    section: str
    verdict: Verdict
    about: str
    says: str
