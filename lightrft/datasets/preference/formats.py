"""The table of the layouts of preference rows, which are recognised by their columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.preference import labelled_formats, pair_formats, ranked_formats
from lightrft.datasets.preference.raw_preference import GivenRow, RawPreference
from lightrft.datasets.row_tables import MalformedRow, Row
from lightrft.utils.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class PreferenceFormat:
    """One layout of preference rows.

    Args:
        name: the name, for ``data.columns.layout``.
        columns: the columns that a row is recognised by, for messages.
        matches: returns True if a row has these columns.
        read: returns the content of a row. Raises ``MalformedRow``.
    """

    name: str
    columns: str
    matches: Callable[[Row, PreferenceColumns], bool]
    read: Callable[[GivenRow], RawPreference]


_KNOWN = (
    PreferenceFormat("pair", "chosen, rejected", pair_formats.is_pair, pair_formats.read_pair),
    PreferenceFormat(
        "rejected_response",
        "messages, rejected_response (or rejected_messages)",
        pair_formats.is_rejected_response,
        pair_formats.read_rejected_response,
    ),
    PreferenceFormat(
        "rlhf_v", "text (JSON), origin_dataset", pair_formats.is_rlhf_v, pair_formats.read_rlhf_v
    ),
    PreferenceFormat(
        "judge",
        "prompt, label and preference (A, B or C)",
        pair_formats.is_judged,
        pair_formats.read_judged,
    ),
    PreferenceFormat(
        "labelled",
        "a response or messages, with label or kto_tag",
        labelled_formats.is_labelled,
        labelled_formats.read_labelled,
    ),
    PreferenceFormat(
        "ranked",
        "completions (of rank and completion)",
        ranked_formats.is_ranked,
        ranked_formats.read_ranked,
    ),
    PreferenceFormat(
        "rated",
        "completions (of annotations and response)",
        ranked_formats.is_rated,
        ranked_formats.read_rated,
    ),
    PreferenceFormat(
        "nectar",
        "answers (of rank and answer)",
        ranked_formats.is_nectar,
        ranked_formats.read_nectar,
    ),
    PreferenceFormat(
        "helpsteer3",
        "response1, response2, overall_preference",
        ranked_formats.is_helpsteer3,
        ranked_formats.read_helpsteer3,
    ),
    PreferenceFormat(
        "pku_better",
        "response_0, response_1, better_response_id",
        ranked_formats.is_pku_better,
        ranked_formats.read_pku_better,
    ),
    PreferenceFormat(
        "pku_safer",
        "response_0, response_1, safer_response_id",
        ranked_formats.is_pku_safer,
        ranked_formats.read_pku_safer,
    ),
    PreferenceFormat(
        "pku_safe",
        "response_0, response_1, is_response_0_safe, is_response_1_safe",
        ranked_formats.is_pku_safe,
        ranked_formats.read_pku_safe,
    ),
)
FORMATS = {known.name: known for known in _KNOWN}
"""All layouts by name."""


def format_of(row: Row, columns: PreferenceColumns, where: str) -> PreferenceFormat:
    """Return the layout of a row.

    ``data.columns.layout`` decides between several that fit.

    Args:
        row: the row.
        columns: names of the columns.
        where: location of the row, for messages.

    Raises:
        MalformedRow: no layout fits, or several.
    """
    asked = columns.layout
    fitting = [known for known in FORMATS.values() if known.matches(row, columns)]
    chosen = [known for known in fitting if known.name == asked]
    if len(chosen or fitting) == 1:
        return (chosen or fitting)[0]
    if not fitting:
        known = "; ".join(f"{one.name}: {one.columns}" for one in FORMATS.values())
        have = ", ".join(row) or "nothing"
        raise MalformedRow(f"{where}: no preference in the row, which has: {have}. Known: {known}")
    names = [known.name for known in fitting]
    way_out = f"set data.columns.layout: {names[0]} (or another of them)"
    raise MalformedRow(f"{where}: the row fits {' and '.join(names)}; {way_out}")


def check_format(columns: PreferenceColumns) -> None:
    """Raise ``ConfigError`` if ``data.columns.layout`` is not a known layout."""
    name = columns.layout
    if name and name not in FORMATS:
        hint = did_you_mean(name, FORMATS)
        known = f"Known: {', '.join(FORMATS)}"
        raise ConfigError(f"data.columns.layout = {name!r} is unknown{hint}. {known}")
