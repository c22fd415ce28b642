"""The table of the layouts of preference rows, which are recognised by their columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.preference import (
    labelled_formats,
    pair_formats,
    ranked_formats,
    scored_formats,
)
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
        "choice",
        "chosen, rejected (lists of texts)",
        pair_formats.is_choice,
        pair_formats.read_choice,
    ),
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
        "shp",
        "history, human_ref_A, human_ref_B, labels",
        ranked_formats.is_shp,
        ranked_formats.read_shp,
    ),
    PreferenceFormat(
        "helpsteer3",
        "response1, response2, overall_preference",
        ranked_formats.is_helpsteer3,
        ranked_formats.read_helpsteer3,
    ),
    PreferenceFormat(
        "helpsteer2",
        "response_1, response_2, preference_strength",
        ranked_formats.is_helpsteer2,
        ranked_formats.read_helpsteer2,
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
"""All layouts of compared or labelled responses by name."""

SCORED = PreferenceFormat(
    "scored",
    "a response or responses, with labels of heads",
    scored_formats.is_scored,
    scored_formats.read_scored,
)
"""Layout of responses with ratings, which only reward models read."""

COST = PreferenceFormat(
    "pku_cost",
    "response_0, response_1, safer_response_id, is_response_0_safe, is_response_1_safe",
    ranked_formats.is_pku_cost,
    ranked_formats.read_pku_cost,
)
"""Layout of harm ratings for a cost model, which only ``data.columns.layout`` selects."""


def format_of(
    row: Row, columns: PreferenceColumns, where: str, *, scored: bool = False
) -> PreferenceFormat:
    """Return the layout of a row.

    ``data.columns.layout`` decides between several that fit.

    Args:
        row: the row.
        columns: names of the columns.
        where: location of the row, for messages.
        scored: if True, a row that fits no other layout may have responses with ratings.

    Raises:
        MalformedRow: no layout fits, or several.
    """
    asked = columns.layout
    fitting = [known for known in FORMATS.values() if known.matches(row, columns)]
    if scored and (not fitting or asked == SCORED.name) and SCORED.matches(row, columns):
        return SCORED
    if scored and asked == COST.name and COST.matches(row, columns):
        return COST
    chosen = [known for known in fitting if known.name == asked]
    if len(chosen or fitting) == 1:
        return (chosen or fitting)[0]
    if not fitting:
        layouts = [*FORMATS.values(), SCORED, COST] if scored else FORMATS.values()
        known = "; ".join(f"{one.name}: {one.columns}" for one in layouts)
        names = (name if value is not None else f"{name} (empty)" for name, value in row.items())
        have = ", ".join(names) or "nothing"
        verb = "lightrft sft" if "messages" in row else "lightrft rl"
        raise MalformedRow(
            f"{where}: no preference in the row, which has: {have}. Name the columns of "
            "the two responses in data.columns.chosen and data.columns.rejected, or train on "
            f"other rows by another verb, such as {verb}. Known without that: {known}"
        )
    names = [known.name for known in fitting]
    way_out = f"set data.columns.layout: {names[0]} (or another of them)"
    raise MalformedRow(f"{where}: the row fits {' and '.join(names)}; {way_out}")


def check_format(columns: PreferenceColumns, *, scored: bool = False) -> None:
    """Raise ``ConfigError`` if ``data.columns.layout`` is not a known layout.

    Args:
        columns: names of the columns.
        scored: if True, rows may have responses with ratings.
    """
    name = columns.layout
    names = [*FORMATS, SCORED.name, COST.name] if scored else list(FORMATS)
    if name and name not in names:
        hint = did_you_mean(name, names)
        known = f"Known: {', '.join(names)}"
        raise ConfigError(f"data.columns.layout = {name!r} is unknown{hint}. {known}")
