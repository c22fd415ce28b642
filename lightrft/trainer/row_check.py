"""Rows from which nothing could be learned: text that the tokenizer does not know, labels that are missing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from lightrft.config import RewardConfig, RewardTerm
from lightrft.datasets.doubts import TOKENS, UNKNOWN, UNLABELLED, unlabelled
from lightrft.trainer.rewards.registry import REWARDS
from lightrft.utils.errors import DataError

log = logging.getLogger(__name__)

MOST_UNKNOWN = 0.01
"""Share of unknown tokens above which the tokenizer is not one of this text."""


class Rows(Protocol):
    """A data set that has counted its doubtful rows."""

    counts: Counter[str]

    def first_with(self, doubt: str, /) -> str: ...


def check_text(rows: Rows, key: str) -> None:
    """Warn of tokens that are unknown to the tokenizer. ``key`` is the setting that names the rows.

    Raises ``DataError`` where their share is above ``MOST_UNKNOWN``.
    """
    unknown, tokens = rows.counts[UNKNOWN], rows.counts[TOKENS]
    if not unknown:
        return
    problem = (
        f"{key}: {unknown} of {tokens} tokens are of text that the tokenizer does not know; the first are in "
        f"{rows.first_with(UNKNOWN)}"
    )
    if unknown > MOST_UNKNOWN * tokens:
        raise DataError(f"{problem}. Set model.tokenizer (or model.path) to one that was made for this text, or mend the rows")
    log.warning("%s", problem)


def check_labels(rows: Rows, reward: RewardConfig, key: str) -> None:
    """Warn of rows without a label among others that have one. ``key`` is the setting that names the rows.

    Raises ``DataError`` where a reward in force for such a row compares responses with the label.
    """
    missing = unlabelled(rows.counts)
    for source, count in missing.items():
        where = rows.first_with(f"{UNLABELLED}/{source}")
        if needy := next(_needing_labels(reward.per_source.get(source) or reward.terms), ""):
            raise DataError(
                f"{key}: {where}: there is no label (or reference), and reward {needy!r} compares responses with it. "
                f"{_are(count)} without one; name the column in {key.removesuffix('.sources')}.columns.label, or mend the rows"
            )
    every, count = rows.counts["prompts"], sum(missing.values())
    if 0 < count < every:
        where = rows.first_with(f"{UNLABELLED}/{next(iter(missing))}")
        log.warning("%s: %s no label; the first is %s", key, f"{count} of {every} rows {'has' if count == 1 else 'have'}", where)


def _are(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def _needing_labels(terms: tuple[RewardTerm, ...]) -> Iterator[str]:
    """Yield the functions of ``terms`` that are registered as needing a label."""
    for term in terms:
        if "label" in REWARDS.about(term.function).needs:
            yield term.function
