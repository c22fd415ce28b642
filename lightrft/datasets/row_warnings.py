"""Warnings about readable rows: unknown text, missing labels, and separators within steps.

All counts are in one ``Counter``, so that they are stored and restored with the counts of a
dataset.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from lightrft.datasets.row_tables import Row
from lightrft.datasets.rows.recorded_row import RecordedRow
from lightrft.utils.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


UNKNOWN, TOKENS, UNLABELLED = "unknown_tokens", "tokens", "unlabelled"
SPELLED = "special_tokens"

FRACTION = "label_with_fraction"
SEPARATED, UNREAD = "steps/with_separator", "unread"

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


def note(counts: Counter[str], name: str, count: int, source: int, row: int) -> None:
    """Add ``count`` to a count, and keep the place of the first row that is counted.

    Args:
        counts: the counter to update.
        name: name of the count.
        count: number to add. 0 changes nothing.
        source: index of the source.
        row: index of the row in its source.
    """
    # Not ``counts[name]``, which is 0 for the first row and for none alike.
    if count and name not in counts:
        counts[f"{_SOURCE}/{name}"] = source
        counts[f"{_ROW}/{name}"] = row
    if count:
        counts[name] += count


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
    note(counts, UNKNOWN, unknown, source, row)


def note_label(counts: Counter[str], data_source: str, gold: object, source: int, row: int) -> None:
    """Count a row that has neither a label nor a reference, and one whose label is a float.

    Args:
        counts: the counter to update.
        data_source: name of the data source of the row.
        gold: the label or reference. The row is counted if ``is_missing(gold)``.
        source: index of the source.
        row: index of the row in its source.
    """
    # A whole number of type float is written with a fraction, which few responses have.
    is_float = isinstance(gold, float) and math.isfinite(gold)
    for kind, holds in ((UNLABELLED, is_missing(gold)), (FRACTION, is_float)):
        note(counts, f"{kind}/{data_source}", int(holds), source, row)


def note_unread(counts: Counter[str], row: Row, source: int) -> None:
    """Count the columns of a row that hold text, lists or media and that nothing has read.

    Args:
        counts: the counter to update.
        row: the row, after its last reader. A row without a record counts as read.
        source: index of the source.
    """
    if isinstance(row, RecordedRow):
        for name in row.unread_columns():
            counts[f"{UNREAD}/{source}/{name}"] += 1


def unread_columns(counts: Counter[str]) -> dict[int, dict[str, int]]:
    """Return the number of rows of each column that nothing has read, by index of the source."""
    found: dict[int, dict[str, int]] = {}
    for name, count in sorted(counts.items()):
        kind, *place = name.split("/", 2)
        if kind == UNREAD:
            found.setdefault(int(place[0]), {})[place[1]] = count
    return found


def is_missing(gold: object) -> bool:
    """Return True if a label is null, blank or NaN."""
    if gold is None:
        return True
    if isinstance(gold, str):
        return not gold.strip()
    # pandas and parquet write NaN for a missing value
    return isinstance(gold, float) and math.isnan(gold)


def unlabelled(counts: Counter[str], kind: str = UNLABELLED) -> dict[str, int]:
    """Return the number of rows without a label, for each data source that has any.

    With ``FRACTION`` as their ``kind``, the rows are those whose label is a float.
    """
    found = {}
    for name, count in counts.items():
        own, _, data_source = name.partition("/")
        if own == kind:
            found[data_source] = count
    return found


def first_place(counts: Counter[str], name: str) -> tuple[int, int]:
    """Return source and row of the first row that was counted under ``name``."""
    return counts[f"{_SOURCE}/{name}"], counts[f"{_ROW}/{name}"]


def is_plain(name: str) -> bool:
    """Return True if ``name`` is a count of rows, and not a warning or a location."""
    return "/" not in name and name not in (TOKENS, UNKNOWN)


MOST_UNKNOWN = 0.01
"""Fraction of unknown tokens above which the tokenizer does not fit the text."""


class CountedRows(Protocol):
    """A dataset with counts of warnings."""

    counts: Counter[str]
    feeds_rewards: ClassVar[bool]

    @property
    def unread(self) -> dict[str, dict[str, int]]: ...

    def first_with(self, doubt: str, /) -> str: ...


def check_rows(rows: CountedRows, key: str) -> None:
    """Warn about columns that nothing reads, special tokens in texts, and unknown tokens.

    ``key`` is the setting that names the rows.

    Raises ``DataError`` if the fraction of unknown tokens exceeds ``MOST_UNKNOWN``.
    """
    for path, columns in rows.unread.items():
        log.warning("%s: %s", key, unread_problem(path, columns, rewards=rows.feeds_rewards))
    if spelled := rows.counts[SPELLED]:
        log.warning(
            "%s: rows that spell a special token such as <think> or the end of a turn: %d. It is "
            "encoded as plain text; set %s.special_tokens=responses where a response must have the "
            "token, or control where every text must",
            key,
            spelled,
            key.removesuffix(".sources"),
        )
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


def check_held_out(learned: Iterable[bytes], held_out: Sequence[bytes], key: str) -> None:
    """Warn if held-out prompts are prompts to learn from.

    Args:
        learned: keys of the prompts to learn from; see ``EncodedDataset.prompt_keys``.
        held_out: keys of the held-out prompts.
        key: the setting that names the held-out prompts.
    """
    wanted = Counter(held_out)
    shared = sum(wanted.pop(prompt, 0) for prompt in learned) if wanted else 0
    if shared:
        log.warning(
            "%s: %d of %d prompts are prompts of data.sources too, so they do not show what the "
            "model does with new ones",
            key,
            shared,
            len(held_out),
        )


def unread_problem(path: str, columns: Mapping[str, int], *, rewards: bool) -> str:
    """Return the sentence about the columns of a source that nothing reads.

    Args:
        path: the source.
        columns: number of rows of each column.
        rewards: True if reward functions get the columns.
    """
    counts = (f"{name} ({count} row{'' if count == 1 else 's'})" for name, count in columns.items())
    named = f"{path}: the column{'' if len(columns) == 1 else 's'} {', '.join(counts)}"
    if rewards:
        return f"{named}: not part of any prompt, and left to reward functions"
    # Those inside records, as in ``responses[].rationale``, are no columns that a setting can name.
    can_name = not all("[]" in name for name in columns)
    way_out = "; if it matters, name it in data.columns or data.template" if can_name else ""
    return f"{named}: read by nothing{way_out}"


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
