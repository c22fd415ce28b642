"""Check that the rewards can score the rows of the data."""

from __future__ import annotations

import logging
from collections.abc import Collection

from lightrft.config.reward import RewardConfig
from lightrft.datasets.row_warnings import FRACTION, UNLABELLED, CountedRows, unlabelled
from lightrft.rewards.registry import REWARDS
from lightrft.utils.errors import ConfigError, DataError, did_you_mean

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
    has_pairs = any({"chosen", "rejected"} <= columns.keys() for columns in rows.unread.values())
    pairs = "; chosen and rejected are for lightrft dpo or rm" if has_pairs else ""
    for source, count in missing.items():
        where = rows.first_with(f"{UNLABELLED}/{source}")
        lacking = "1 row is" if count == 1 else f"{count} rows are"
        for term in reward.terms_of(source):
            if "label" in REWARDS.about(term.function).needs:
                raise DataError(
                    f"{key}: {where}: there is no label (or reference), and reward "
                    f"{term.function!r} compares responses with it. {lacking} without one; name "
                    f"the column in {key.removesuffix('.sources')}.columns.label, or mend the rows"
                    f"{pairs}"
                )
    _check_fractions(rows, reward, key)
    every, count = rows.counts["prompts"], sum(missing.values())
    if 0 < count < every:
        where = rows.first_with(f"{UNLABELLED}/{next(iter(missing))}")
        have = "has" if count == 1 else "have"
        log.warning(
            "%s: %d of %d rows %s no label; the first is %s", key, count, every, have, where
        )


def _check_fractions(rows: CountedRows, reward: RewardConfig, key: str) -> None:
    """Warn about labels of type float, which ``exact_match`` compares with their fraction."""
    for source, count in unlabelled(rows.counts, FRACTION).items():
        terms = reward.terms_of(source)
        if any(term.function == "exact_match" for term in terms):
            log.warning(
                "%s: %d label%s a float, such as 12.0, which exact_match does not find in a response "
                "of 12; the first is in %s. Write labels as text or whole numbers, or take math",
                key,
                count,
                " is" if count == 1 else "s are",
                rows.first_with(f"{FRACTION}/{source}"),
            )


def check_named_sources(reward: RewardConfig, sources: Collection[str]) -> None:
    """Warn about data sources that ``reward`` names and no row is of.

    Args:
        reward: The settings ``reward``.
        sources: Data sources of all rows.

    Raises:
        ConfigError: A reward model would score no row.
    """
    known = f"the sources of the rows are {', '.join(map(repr, sorted(sources)))}"
    named = {f"reward.models.{i}.sources": model.sources for i, model in enumerate(reward.models)}
    for key, names in {**named, "reward.per_source": tuple(reward.per_source)}.items():
        unknown = [name for name in names if name not in sources]
        if not unknown:
            continue
        says = f"{key}: no row is of {', '.join(map(repr, unknown))}; {known}"
        says += did_you_mean(unknown[0], sources)
        if key in named and len(unknown) == len(names):
            raise ConfigError(says)
        log.warning("%s", says)
