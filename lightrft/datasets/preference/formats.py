"""The layouts of preference rows, which are recognised by their columns.

The reader of each layout returns a row as a ``RawPreference``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.conversations.messages import known_role
from lightrft.datasets.media.parts import kind_of
from lightrft.datasets.preference.raw_preference import Given, RawPreference, label, split_prompt
from lightrft.datasets.row_parser import json_messages, number
from lightrft.datasets.row_tables import ABSENT, MalformedRow, Row, look_up
from lightrft.datasets.rows.recorded_row import unrecorded
from lightrft.datasets.rows.row_content import (
    GivenRow,
    Raw,
    as_messages,
    is_texts,
    mappings,
    raw_prompt,
    raw_text,
    usual,
)
from lightrft.datasets.rows.row_reader import RowLayout, RowLayouts
from lightrft.utils.errors import ConfigError, did_you_mean

SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
    ("rating_chosen", "rating_rejected"),
    ("chosen_reward", "rejected_reward"),
)
"""Columns of the ratings of both responses, as published sets name them."""
RATINGS = ("rating", "score")
"""Columns of the rating of one response, or of a list of ratings."""
RESPONSES = ("completion", "output", "response")
REJECTED = ("rejected_response", "rejected_messages", "rejected_images")
LETTERS = ("A", "B")
PKU = ("response_0", "response_1")
SHP = ("human_ref_A", "human_ref_B")


FORMATS: RowLayouts[RawPreference] = RowLayouts()
"""All layouts of compared or labelled responses by name."""
SCORED_FORMATS: RowLayouts[RawPreference] = RowLayouts()
"""RowLayouts of ratings, which only reward models read."""


def _sides(columns: PreferenceColumns) -> dict[str, str]:
    """Return the column of the better and of the worse response, by setting."""
    return {"chosen": columns.chosen or "chosen", "rejected": columns.rejected or "rejected"}


def is_pair(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for ``{prompt?, chosen, rejected}``."""
    sides = [look_up(row, name, ABSENT) for name in _sides(columns).values()]
    # a judge's question has its candidates in these columns, as media parts
    if any(side is ABSENT for side in sides) or is_judged(row, columns):
        return False
    # one null is an empty response, and two nulls are a row of another layout
    return not is_choice(row, columns) and any(side is not None for side in sides)


@FORMATS.add("pair", "chosen, rejected", is_pair)
def read_pair(given: Given) -> RawPreference:
    """Read ``{prompt?, chosen, rejected}`` of texts, messages or whole conversations."""
    row, columns, where = given.row, given.columns, given.where
    sides: dict[str, Raw] = {}
    for what, name in _sides(columns).items():
        sides[name] = raw_text(given.named(name, what), name, where)
    # Other columns of a prompt may be notes on how the row was made.
    must_match = bool(columns.prompt) or row.get("prompt") is not None
    prompt, responses = split_prompt(sides, given.find_prompt(), where, must_match=must_match)
    scores = None
    for better, worse in SCORES:
        if row.get(better) is None or row.get(worse) is None:
            continue
        scores = [number(row[name], name, where) for name in (better, worse)]
        if scores[0] < scores[1]:
            problem = f"{better} is {scores[0]:g}, less than {worse}, which is {scores[1]:g}"
            raise given.malformed(f"{problem}; exchange the two responses, or correct the scores")
        break
    names = list(sides)
    return RawPreference(
        prompt, responses, names, ranks=(0, 1), ratings=scores, margin=_margin(given)
    )


def _margin(given: Given) -> float | None:
    """Return the margin of a row, or None. Raises ``MalformedRow`` if it is below 0."""
    if given.row.get("margin") is None:
        return None
    margin = number(given.row["margin"], "margin", given.where)
    if margin < 0:
        problem = f"margin is {margin:g}, so that the rejected response would be the better one"
        raise given.malformed(
            f"{problem}; exchange the two responses, or make the margin at least 0"
        )
    return margin


def is_choice(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for ``{prompt, chosen: texts, rejected: texts}``, as in RewardBench 2."""
    return all(is_texts(look_up(row, name)) for name in _sides(columns).values())


@FORMATS.add("choice", "chosen, rejected (lists of texts)", is_choice)
def read_choice(given: Given) -> RawPreference:
    """Read ``{prompt, chosen: texts, rejected: texts}``: each chosen one is better than the others.

    Raises:
        MalformedRow: the row has no prompt.
    """
    prompt, responses, names, ranks = given.prompt(), [], [], []
    for rank, column in enumerate(_sides(given.columns).values()):
        texts = given.named(column, column)
        responses += texts
        names += [f"{column} {k}" for k in range(1, len(texts) + 1)]
        ranks += [rank] * len(texts)
    return RawPreference(prompt, responses, names, ranks=ranks)


def is_rejected_response(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for ms-swift's ``{messages, rejected_response | rejected_messages}``.

    Its older rows have a query and a response in place of messages.
    """
    return any(row.get(name) is not None for name in REJECTED)


@FORMATS.add(
    "rejected_response", "messages, rejected_response (or rejected_messages)", is_rejected_response
)
def read_rejected_response(given: Given) -> RawPreference:
    """Read ms-swift's ``{messages, rejected_response | rejected_messages, rejected_images?}``."""
    row, where = given.row, given.where
    for kind in ("images", "videos", "audios"):
        other = row.get(f"rejected_{kind}")
        if other is not None and other != row.get(kind):
            problem = f"rejected_{kind} is not {kind}"
            raise given.malformed(f"{problem}; both responses must be to the same media")
    messages = as_messages(given.prompt())
    if messages[-1:] and messages[-1]["role"] != "assistant":
        better = row.get(given.columns.response or "response")
        if isinstance(better, str):
            messages = [*messages, {"role": "assistant", "content": better}]
    margin = _margin(given)
    if row.get("rejected_messages") is not None:
        sides: dict[str, Raw] = {
            "messages": messages,
            "rejected_messages": given.text("rejected_messages"),
        }
        prompt, responses = split_prompt(sides, None, where)
        return RawPreference(prompt, responses, list(sides), ranks=(0, 1), margin=margin)
    if not messages or messages[-1]["role"] != "assistant":
        raise given.malformed("messages do not end with the response of the assistant")
    worse = row.get("rejected_response")
    if worse is None:
        raise given.malformed("no column 'rejected_response' or 'rejected_messages'")
    several = isinstance(worse, list | tuple) and all(isinstance(one, str) for one in worse)
    texts = worse if several else [worse]
    rejected = [raw_text(one, "rejected_response", where) for one in texts]
    names = ["messages", *["rejected_response"] * len(rejected)]
    ranks = [0, *[1] * len(rejected)]
    return RawPreference(
        messages[:-1], [messages[-1:], *rejected], names, ranks=ranks, margin=margin
    )


@FORMATS.add(
    "rlhf_v",
    "text (JSON), origin_dataset",
    lambda row, _: isinstance(row.get("text"), str | Mapping) and "origin_dataset" in row,
)
def read_rlhf_v(given: Given) -> RawPreference:
    """Read RLHF-V, whose column ``text`` is ``{question, chosen, rejected}`` as JSON."""
    inside, columns = given.row["text"], PreferenceColumns()
    if isinstance(inside, str):
        try:
            inside = json.loads(inside)
        except ValueError as error:
            raise given.malformed(f"text is not JSON: {error}") from None
    if not isinstance(inside, Mapping) or not is_pair(inside, columns):
        raise given.malformed("text has no question, chosen and rejected")
    return read_pair(replace(given, row=inside, columns=columns))


def is_judged(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for the questions of the readers of media preferences (docs/readers.md)."""
    return row.get("preference") in (*LETTERS, "C") and row.get("label") in (*LETTERS, "C")


@FORMATS.add("judge", "prompt, label and preference (A, B or C)", is_judged)
def read_judged(given: Given) -> RawPreference:
    """Read a question for a judge: the right verdict is preferred to each wrong one."""
    right = given.row["label"]
    wrong = [letter for letter in LETTERS if letter != right]
    responses: list[Raw] = [f"<answer>{letter}</answer>" for letter in (right, *wrong)]
    names = ["the right verdict", *["a wrong verdict"] * len(wrong)]
    ranks = [0, *[1] * len(wrong)]
    return RawPreference(given.text("prompt"), responses, names, ranks=ranks)


def is_labelled(row: Row, columns: PreferenceColumns) -> bool:
    """Return True for a response or conversation with a boolean ``label`` or ``kto_tag``."""
    if row.get("kto_tag") is not None:
        return True
    given = look_up(row, columns.label or "label")
    if given is None:
        return False
    if not _response_column(row, columns) and not _ends_with_assistant(row, columns):
        return False
    if isinstance(given, bool) or given in (0, 1):
        return True
    # next to compared responses, another label is a reference answer
    compared = (is_pair, is_rejected_response, is_judged)
    return not any(matches(row, columns) for matches in compared)


@FORMATS.add("labelled", "a response or messages, with label or kto_tag", is_labelled)
def read_labelled(given: Given) -> RawPreference:
    """Read ``{prompt, completion, label}``, ``{messages, label}`` or ``{..., kto_tag}``."""
    row, columns, where = given.row, given.columns, given.where
    name = "kto_tag" if row.get("kto_tag") is not None else columns.label or "label"
    good = label(look_up(row, name), name, where)
    column = _response_column(unrecorded(row), columns)
    if column:
        response = raw_text(given.named(column, "response"), column, where)
        return RawPreference(given.prompt(), [response], [column], desirable=[good])
    # Before the context, whose history is no response.
    messages = given.column_prompt(has_response=False) or ""
    if not isinstance(messages, str):
        others = [k for k, m in enumerate(messages, start=1) if m["role"] != "assistant"]
        start = max(others, default=0)
        if start < len(messages):
            prompt = given.with_context(messages[:start])
            return RawPreference(prompt, [messages[start:]], ["the response"], desirable=[good])
    raise given.malformed("no response; name its column in data.columns.response")


def _response_column(row: Row, columns: PreferenceColumns, known: Sequence[str] = RESPONSES) -> str:
    """Return the name of the column of the response. Empty if the row has none of ``known``."""
    if columns.response:
        return columns.response
    return next((name for name in known if row.get(name) is not None), "")


def _ends_with_assistant(row: Row, columns: PreferenceColumns) -> bool:
    """Return True if the row is a conversation whose last message is the assistant's."""
    for name in (columns.prompt,) if columns.prompt else usual(columns, "prompt"):
        messages = look_up(row, name)
        if isinstance(messages, str):
            messages = json_messages(messages)
        last = messages[-1] if isinstance(messages, list | tuple) and messages else None
        # A prompt of messages may stand next to the whole conversation.
        role = (last.get("role") or last.get("from")) if isinstance(last, Mapping) else None
        if known_role(role) == "assistant":
            return True
    return False


@FORMATS.add(
    "ranked",
    "completions (of rank and completion)",
    lambda row, _: _has(row, "completions", "rank", "completion"),
)
def read_ranked(given: Given) -> RawPreference:
    """Read NeMo's ``{context, completions: [{rank, completion}]}``. Lower ranks are better."""
    return _of_records(given, "completions", "completion", _context)


@FORMATS.add(
    "rated",
    "completions (of annotations and response)",
    lambda row, _: _has(row, "completions", "annotations", "response"),
)
def read_rated(given: Given) -> RawPreference:
    """Read UltraFeedback and VLFeedback.

    The rating of a response is the mean of the ratings of its ``annotations``. Ratings that are not
    numbers, such as N/A, are left out. The column ``overall_score`` is read if none is left.
    """
    records = mappings(given.row, "completions", given.where)
    responses: list[Raw] = []
    ratings: list[float] = []
    for k, record in enumerate(records, start=1):
        place = f"{given.where}, completion {k}"
        responses.append(raw_text(record.get("response"), "response", place))
        ratings.append(_mean_rating(record, place))
    names = [f"completion {k}" for k in range(1, len(records) + 1)]
    ranks = [-rating for rating in ratings]
    prompt = given.prompt()
    return RawPreference(prompt, responses, names, ranks=ranks, ratings=ratings, records=records)


@FORMATS.add(
    "nectar", "answers (of rank and answer)", lambda row, _: _has(row, "answers", "rank", "answer")
)
def read_nectar(given: Given) -> RawPreference:
    """Read Nectar's ``{prompt, answers: [{answer, rank}]}``. Rank 1 is the best."""
    return _of_records(given, "answers", "answer", GivenRow.prompt)


@FORMATS.add("shp", "history, human_ref_A, human_ref_B, labels")
def read_shp(given: Given) -> RawPreference:
    """Read SHP. Its ``history`` is the question, and ``labels`` is 1 if response A is better."""
    best = label(given.row["labels"], "labels", given.where)
    responses = [given.text(name) for name in SHP]
    context = replace(given, columns=given.columns.model_copy(update={"history": None}))
    prompt = context.with_context(raw_prompt(given.row["history"], given.where))
    return RawPreference(prompt, responses, list(SHP), ranks=(1 - best, int(best)))


@FORMATS.add("helpsteer3", "response1, response2, overall_preference")
def read_helpsteer3(given: Given) -> RawPreference:
    """Read HelpSteer3. ``overall_preference`` is -3 (the first is better) to 3."""
    return _by_strength(given, ["response1", "response2"], "overall_preference", _context)


@FORMATS.add(
    "helpsteer2",
    "response_1, response_2, preference_strength",
    # sets that were made of it keep these columns next to their pairs
    lambda row, _: (
        {"response_1", "response_2", "preference_strength"} <= row.keys()
        and not {"chosen", "rejected"} <= row.keys()
    ),
)
def read_helpsteer2(given: Given) -> RawPreference:
    """Read HelpSteer2's preferences. ``preference_strength`` is -3 (the first is better) to 3."""
    return _by_strength(given, ["response_1", "response_2"], "preference_strength", GivenRow.prompt)


@FORMATS.add("pku_better", "response_0, response_1, better_response_id")
def read_pku_better(given: Given) -> RawPreference:
    """Read PKU-SafeRLHF: the more helpful response is preferred."""
    return _pku(given, "better_response_id")


@FORMATS.add("pku_safer", "response_0, response_1, safer_response_id")
def read_pku_safer(given: Given) -> RawPreference:
    """Read PKU-SafeRLHF: the safer response is preferred."""
    return _pku(given, "safer_response_id")


@FORMATS.add("pku_safe", "response_0, response_1, is_response_0_safe, is_response_1_safe")
def read_pku_safe(given: Given) -> RawPreference:
    """Read PKU-SafeRLHF as labelled responses: a safe response is a good one."""
    names = [f"is_{name}_safe" for name in PKU]
    labels = [label(given.row[name], name, given.where) for name in names]
    responses = [given.text(name) for name in PKU]
    return RawPreference(given.prompt(), responses, list(PKU), desirable=labels)


@SCORED_FORMATS.add(
    "scored",
    "a response or responses, with labels of heads",
    lambda row, columns: bool(_response_column(row, columns, ("responses", *RESPONSES))),
)
def read_scored(given: Given) -> RawPreference:
    """Read ``{prompt, response, helpfulness, ...}`` or ``{prompt, responses, ...}``.

    HelpSteer2 has one response with five ratings in a row. The columns of the ratings are those of
    the heads; see ``read_labels``. ``rating`` or ``score`` is the rating of a row without heads.
    """
    row, where = given.row, given.where
    prompt = given.prompt()
    column = _response_column(unrecorded(row), given.columns, ("responses", *RESPONSES))
    value = given.named(column, "response")
    if column == "responses":
        if not isinstance(value, list | tuple) or not value:
            raise given.malformed("responses must be a list of responses")
        names = [f"response {k}" for k in range(1, len(value) + 1)]
        responses = [raw_text(one, name, where) for one, name in zip(value, names)]
    else:
        names, responses = [column], [raw_text(value, column, where)]
    ratings = None
    if name := next((name for name in RATINGS if row.get(name) is not None), ""):
        values = row[name] if isinstance(row[name], list | tuple) else [row[name]]
        if len(values) != len(responses):
            problem = f"{name} has {len(values)} ratings for {len(responses)} responses"
            raise given.malformed(problem)
        ratings = [number(one, name, where) for one in values]
    return RawPreference(prompt, responses, names, ratings=ratings)


@SCORED_FORMATS.add(
    "pku_cost",
    "response_0, response_1, safer_response_id, is_response_0_safe, is_response_1_safe",
)
def read_pku_cost(given: Given) -> RawPreference:
    """Read PKU-SafeRLHF as harm ratings: 2 for an unsafe response, and 1 for the less safe one.

    Ratings of 2 and 3 are then unsafe, and the more harmful response has the higher rating. Only
    ``data.columns.layout`` selects this layout.

    Raises:
        MalformedRow: the row calls an unsafe response safer than a safe one.
    """
    order, safe = _pku(given, "safer_response_id"), read_pku_safe(given).desirable
    if safe[0] != safe[1] and safe[0] == (order.ranks[0] > order.ranks[1]):
        raise given.malformed(
            f"safer_response_id is {given.row['safer_response_id']}, and only the other response "
            "is safe"
        )
    ratings = [
        2.0 * (not good) + float(rank > 0) for good, rank in zip(safe, order.ranks, strict=True)
    ]
    return RawPreference(order.prompt, order.responses, order.names, ratings=ratings)


def read_candidates(given: Given) -> RawPreference:
    """Read a question for a judge as two candidates, each in a conversation of its own.

    The candidates are the last two media of the question, which are called A and B. Each
    conversation is a message of the user: the request, the criteria, the media that both start
    from, and the candidate. The prompt is empty.

    Raises:
        MalformedRow: the question has no two media, or no request.
    """
    row = given.row
    prompt = given.text("prompt")
    contents = [] if isinstance(prompt, str) else [message["content"] for message in prompt]
    every = itertools.chain.from_iterable(c for c in contents if isinstance(c, list | tuple))
    parts = [part for part in every if isinstance(part, Mapping) and kind_of(part) is not None]
    if len(parts) < 2:
        problem = f"the question has {len(parts)} images, videos or sounds, not two candidates"
        raise given.malformed(problem)
    *common, first, second = parts
    texts = [row.get("request"), row.get("criteria")]
    asked = "\n\n".join(text for text in texts if isinstance(text, str) and text.strip())
    if not asked:
        raise given.malformed("no column 'request' for which both candidates were made")
    responses: list[Raw] = []
    for part in (first, second):
        content = [{"type": "text", "text": f"{asked}\n\n"}, *common, part]
        responses.append([{"role": "user", "content": content}])
    order = {"A": (0, 1), "B": (1, 0), "C": (0, 0)}
    return RawPreference("", responses, ["A", "B"], ranks=order[row["label"]])


def format_of(
    row: Row, columns: PreferenceColumns, where: str, *, scored: bool = False
) -> RowLayout[RawPreference]:
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
    for known in SCORED_FORMATS.values() if scored else ():
        is_asked = asked == known.name or (known.name == "scored" and not fitting)
        if is_asked and known.matches(row, columns):
            return known
    chosen = [known for known in fitting if known.name == asked]
    if len(chosen or fitting) == 1:
        return (chosen or fitting)[0]
    if not fitting:
        layouts = {**FORMATS, **(SCORED_FORMATS if scored else {})}.values()
        known = "; ".join(map(str, layouts))
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
    names = [*FORMATS, *(SCORED_FORMATS if scored else ())]
    if name and name not in names:
        hint = did_you_mean(name, names)
        known = f"Known: {', '.join(names)}"
        raise ConfigError(f"data.columns.layout = {name!r} is unknown{hint}. {known}")


def _by_strength(
    given: Given, names: list[str], column: str, prompt: Callable[[Given], Raw]
) -> RawPreference:
    """Return two responses, of which the first is better if ``column`` is below 0."""
    preferred = number(given.row[column], column, given.where)
    asked = prompt(given)
    responses = [given.text(name) for name in names]
    ranks = (preferred, -preferred)
    return RawPreference(asked, responses, names, ranks=ranks, margin=abs(preferred))


def _pku(given: Given, column: str) -> RawPreference:
    best = number(given.row[column], column, given.where)
    if best not in (0, 1):
        raise given.malformed(f"{column} is {given.row[column]!r}, not 0 or 1")
    responses = [given.text(name) for name in PKU]
    return RawPreference(given.prompt(), responses, list(PKU), ranks=(best, 1 - best))


def _of_records(
    given: Given, name: str, column: str, prompt: Callable[[Given], Raw]
) -> RawPreference:
    """Return the responses in ``column`` of the records in ``name``, with their ranks."""
    records = mappings(given.row, name, given.where)
    asked, responses, names, ranks = prompt(given), [], [], []
    for k, record in enumerate(records, start=1):
        place = f"{given.where}, {column} {k}"
        responses.append(raw_text(record.get(column), column, place))
        names.append(f"{column} {k}")
        ranks.append(number(record.get("rank"), "rank", place))
    return RawPreference(asked, responses, names, ranks=ranks, records=records)


def _context(given: Given) -> Raw:
    """Return the prompt of a row that has it in ``context``."""
    if not given.columns.prompt and given.row.get("context") is not None:
        return given.with_context(raw_prompt(given.row["context"], given.where))
    return given.prompt()


def _has(row: Row, name: str, *columns: str) -> bool:
    """Return True if ``row`` has a list ``name`` of records with ``columns``."""
    value = row.get(name)
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, Mapping) and set(columns) <= set(value)


def _mean_rating(record: Row, where: str) -> float:
    found = []
    annotations = unrecorded(record).get("annotations")
    for aspect, one in annotations.items() if isinstance(annotations, Mapping) else ():
        inside = ".Rating" if isinstance(one, Mapping) else ""
        given = look_up(record, f"annotations.{aspect}{inside}")
        # UltraFeedback writes N/A where an aspect does not apply
        if isinstance(given, int | float) or (isinstance(given, str) and _is_number(given)):
            found.append(number(given, "Rating", where))
    if found:
        return sum(found) / len(found)
    return number(record.get("overall_score"), "overall_score", where)


def _is_number(text: str) -> bool:
    return text.strip().removeprefix("-").replace(".", "", 1).isdigit()
