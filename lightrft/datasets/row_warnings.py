"""Warnings about readable rows: unknown text, missing labels, and separators within steps.

All counts are in one ``Counter``, so that they are stored and restored with the counts of a
dataset.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lightrft.utils.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


UNKNOWN, TOKENS, UNLABELLED = "unknown_tokens", "tokens", "unlabelled"

SEPARATED = "steps/with_separator"

_SOURCE, _ROW = "source_of", "row_of"

EXOTIC = "\u2603\u4e2d\U0001f600"
"""Characters that only a byte-level tokenizer can encode."""


class UnknownText:
    """Counts text that ``tokenizer`` cannot encode.

    These are unknown tokens or, for a tokenizer without an unknown token, dropped characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        unknown = tokenizer.unk_token_id
        # GPT-2 has one token for unknown text, begin and end: its presence tells nothing
        ends = unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id)
        self._unknown = None if ends else unknown
        self._drops = self._unknown is None and not self._ids(EXOTIC)
        self._known: dict[str, bool] = {}

    def count(self, text: str, ids: Sequence[int]) -> int:
        """Return the number of unknown tokens in ``ids``.

        For a tokenizer without an unknown token, return the number of characters of ``text`` that
        it drops.
        """
        if self._drops:
            return sum(not self._knows(character) for character in text)
        # no token is None, so a tokenizer without an unknown token that drops nothing gives 0
        return ids.count(self._unknown)

    def _knows(self, character: str) -> bool:
        # Kept: encoding one character costs as much as encoding a line.
        if character not in self._known:
            matters = character.isprintable() and not character.isspace()
            self._known[character] = not matters or bool(self._ids(character))
        return self._known[character]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def note_text(counts: Counter[str], unknown: int, tokens: int, source: int, row: int) -> None:
    """Count the unknown tokens of a row.

    Args:
        counts: the counter to update.
        unknown: number of unknown tokens of the row.
        tokens: number of tokens of the row.
        source: index of the source.
        row: index of the row in its source.
    """
    counts[TOKENS] += tokens
    if unknown:
        _place(counts, UNKNOWN, source, row)
        counts[UNKNOWN] += unknown


def note_label(counts: Counter[str], data_source: str, gold: object, source: int, row: int) -> None:
    """Count a row that has neither a label nor a reference to compare a response with.

    Args:
        counts: the counter to update.
        data_source: name of the data source of the row.
        gold: the label or reference. The row is counted if ``is_missing(gold)``.
        source: index of the source.
        row: index of the row in its source.
    """
    if is_missing(gold):
        name = f"{UNLABELLED}/{data_source}"
        _place(counts, name, source, row)
        counts[name] += 1


def note_steps(
    counts: Counter[str], steps: Sequence[str], separator: str, source: int, row: int
) -> None:
    """Count the steps of a row that contain the separator of steps.

    Args:
        counts: the counter to update.
        steps: the steps of the row.
        separator: text between two steps.
        source: index of the source.
        row: index of the row in its source.
    """
    found = sum(separator in step for step in steps)
    if found:
        _place(counts, SEPARATED, source, row)
        counts[SEPARATED] += found


def is_missing(gold: object) -> bool:
    """Return True if a label is null, blank or NaN."""
    if gold is None:
        return True
    if isinstance(gold, str):
        return not gold.strip()
    # pandas and parquet write NaN for a missing value
    return isinstance(gold, float) and math.isnan(gold)


def unlabelled(counts: Counter[str]) -> dict[str, int]:
    """Return the number of rows without a label, for each data source that has any."""
    found = {}
    for name, count in counts.items():
        kind, _, data_source = name.partition("/")
        if kind == UNLABELLED:
            found[data_source] = count
    return found


def first_place(counts: Counter[str], name: str) -> tuple[int, int]:
    """Return source and row of the first row that was counted under ``name``."""
    return counts[f"{_SOURCE}/{name}"], counts[f"{_ROW}/{name}"]


def is_plain(name: str) -> bool:
    """Return True if ``name`` is a count of rows, and not a warning or a location."""
    return "/" not in name and name not in (TOKENS, UNKNOWN)


def _place(counts: Counter[str], name: str, source: int, row: int) -> None:
    # Not ``counts[name]``, which is 0 for the first row and for none alike.
    if name not in counts:
        counts[f"{_SOURCE}/{name}"] = source
        counts[f"{_ROW}/{name}"] = row


MOST_UNKNOWN = 0.01
"""Fraction of unknown tokens above which the tokenizer does not fit the text."""


class CountedRows(Protocol):
    """A dataset with counts of warnings."""

    counts: Counter[str]

    def first_with(self, doubt: str, /) -> str: ...


def check_text(rows: CountedRows, key: str) -> None:
    """Warn about tokens that are unknown to the tokenizer.

    ``key`` is the setting that names the rows.

    Raises ``DataError`` if their fraction exceeds ``MOST_UNKNOWN``.
    """
    unknown = rows.counts[UNKNOWN]
    tokens = rows.counts[TOKENS]
    if not unknown:
        return
    count = f"{unknown} of {tokens} tokens"
    first = f"the first are in {rows.first_with(UNKNOWN)}"
    problem = f"{key}: {count} are of text that the tokenizer does not know; {first}"
    if unknown > MOST_UNKNOWN * tokens:
        way_out = "Set model.tokenizer (or model.path) to one that was made for this text"
        raise DataError(f"{problem}. {way_out}, or mend the rows")
    log.warning("%s", problem)


def check_steps(rows: CountedRows, key: str) -> None:
    """Warn about steps that contain the separator. ``key`` is the setting of the rows."""
    found = rows.counts[SEPARATED]
    if found:
        log.warning(
            "%s.sources: %d of %d steps contain %s.separator, the first in %s; the model reads each "
            "as one step, but splits responses there. Set a separator that is in no step",
            key,
            found,
            rows.counts["steps/labelled"] + rows.counts["steps/unlabelled"],
            key,
            rows.first_with(SEPARATED),
        )
