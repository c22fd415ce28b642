"""Check for rows that cannot be scored because their label is missing."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.datasets.row_warnings import UNLABELLED, CountedRows, unlabelled
from lightrft.rewards.registry import REWARDS
from lightrft.utils.errors import DataError

log = logging.getLogger(__name__)


def check_labels(rows: CountedRows, reward: RewardConfig, key: str) -> None:
    """Warn about rows without a label if other rows have one.

    Args:
        rows: The rows.
        reward: The settings ``reward``.
        key: The setting that names the rows, for messages.

    Raises:
        DataError: If a reward configured for such a row compares responses with the label.
    """
    missing = unlabelled(rows.counts)
    for source, count in missing.items():
        where = rows.first_with(f"{UNLABELLED}/{source}")
        if needy := next(_needing_labels(reward.per_source.get(source) or reward.terms), ""):
            raise DataError(
                f"{key}: {where}: there is no label (or reference), and reward {needy!r} "
                f"compares responses with it. {_are(count)} without one; name the column in "
                f"{key.removesuffix('.sources')}.columns.label, or mend the rows"
            )
    every, count = rows.counts["prompts"], sum(missing.values())
    if 0 < count < every:
        where = rows.first_with(f"{UNLABELLED}/{next(iter(missing))}")
        log.warning(
            "%s: %s no label; the first is %s",
            key,
            f"{count} of {every} rows {'has' if count == 1 else 'have'}",
            where,
        )


def _are(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def _needing_labels(terms: tuple[RewardTerm, ...]) -> Iterator[str]:
    """Yield the functions of ``terms`` that are registered as needing a label."""
    for term in terms:
        if "label" in REWARDS.about(term.function).needs:
            yield term.function
