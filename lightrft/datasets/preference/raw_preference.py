"""The common form of all layouts of preference rows, and readers of their columns.

Responses that contain their prompt are separated from it here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.row_parser import Message
from lightrft.datasets.row_tables import MalformedRow, Row
from lightrft.datasets.rows.row_content import (
    GivenRow,
    Raw,
    as_messages,
    is_transcript,
    stripped,
    transcript,
)

Given: TypeAlias = GivenRow[PreferenceColumns]
LABELS = {
    **dict.fromkeys(("true", "1", "1.0"), True),
    **dict.fromkeys(("false", "0", "0.0"), False),
}
"""Labels of responses as text."""


@dataclass(slots=True)
class RawPreference:
    """A preference row before its text and media are read.

    Either ``ranks`` or ``desirable`` has one entry per response. The other one is empty.

    Args:
        prompt: the prompt of all responses.
        responses: the responses.
        names: names of the responses, for messages.
        ranks: any numbers that are lower for better responses.
        desirable: labels of the responses: True for a good one.
        ratings: numbers that are higher for better responses. None if there are none.
        margin: how much better the best response is than the next one. None if the row has no such
            number.
        records: record of each response, for layouts that have one. Labels of heads are read from
            it.
    """

    prompt: Raw
    responses: list[Raw]
    names: list[str]
    ranks: Sequence[float] = ()
    desirable: Sequence[bool] = ()
    ratings: Sequence[float] | None = None
    margin: float | None = None
    records: Sequence[Row] = ()


def label(value: object, what: str, where: str) -> bool:
    """Return a column as a label of a response.

    Args:
        value: True, False, 1 or 0, or one of them as text, as CSV files have it.
        what: name of the column, for messages.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the value is not a boolean.
    """
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in LABELS:
        return LABELS[value.strip().lower()]
    raise MalformedRow(f"{where}: {what} is {value!r}, not a boolean; write true or false")


def check_distinct(
    names: Sequence[str], responses: Sequence[Raw], judged: Sequence[object], where: str
) -> None:
    """Raise ``MalformedRow`` if two responses of different ranks or labels are equal.

    Args:
        names: names of the responses, for messages.
        responses: the responses.
        judged: rank or labels of each response. Empty if nothing compares them.
        where: location of the row, for messages.
    """
    bare = [one.strip() if isinstance(one, str) else one for one in responses]
    known = list(zip(names, bare, judged))
    for (name, one, own), (other_name, other, theirs) in itertools.combinations(known, 2):
        if own != theirs and one == other:
            raise MalformedRow(f"{where}: {name} is equal to {other_name}, but one is better")


NAME_PROMPT = "name the column of the prompt in data.columns.prompt"


def split_prompt(
    sides: Mapping[str, Raw], asked: Raw | None, where: str, *, must_match: bool = True
) -> tuple[Raw, list[Raw]]:
    r"""Return the prompt and the responses of a row.

    Sides that begin with a message of another role than the assistant's are whole conversations.
    Texts of ``\n\nHuman:`` and ``\n\nAssistant:`` are conversations too.

    Args:
        sides: the responses, with or without the prompt, by column.
        asked: the prompt of the row. None if it has none.
        where: location of the row, for messages.
        must_match: if True, whole conversations must begin with ``asked``.

    Raises:
        MalformedRow: the sides are of different types, have different prompts, or do not begin with
            ``asked``.
    """
    texts = {name: side for name, side in sides.items() if isinstance(side, str)}
    if texts and len(texts) < len(sides):
        kinds = [f"{name} is {'text' if name in texts else 'a list of messages'}" for name in sides]
        raise MalformedRow(f"{where}: {', '.join(kinds)}; write all in one form")
    if not texts:
        messages = {name: as_messages(side) for name, side in sides.items()}
        return _of_messages(messages, asked, where, must_match)
    spoken = [name for name, text in texts.items() if is_transcript(text)]
    if spoken and len(spoken) < len(texts):
        problem = f"{spoken[0]} begins with 'Human:', and other responses do not"
        raise MalformedRow(f"{where}: {problem}; the prompt is not a prefix of all responses")
    if spoken:
        messages = {name: transcript(text) for name, text in texts.items()}
        return _of_messages(messages, asked, where, must_match)
    if asked is None:
        return _of_texts(texts, where)
    return asked, list(texts.values())


def _of_texts(texts: Mapping[str, str], where: str) -> tuple[Raw, list[Raw]]:
    """Return the words that all texts begin with, and the rests."""
    equal = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts.values()))
    common = "".join(letters[0] for letters in equal)
    # whole words: the last space goes to the response, as the policy would sample it
    words = common.rstrip()
    if words == common:
        last = max(common.rfind(space) for space in " \n\t")
        words = common[: max(last, 0)].rstrip()
    if not words.strip():
        problem = f"{' and '.join(texts)} have no common beginning, and the row has no prompt"
        raise MalformedRow(f"{where}: {problem}; {NAME_PROMPT}")
    return words, [text[len(words) :] for text in texts.values()]


def _of_messages(
    sides: Mapping[str, list[Message]], asked: Raw | None, where: str, must_match: bool
) -> tuple[Raw, list[Raw]]:
    for name, side in sides.items():
        if not side:
            raise MalformedRow(f"{where}: {name} is empty")
    whole = [name for name, side in sides.items() if side[0]["role"] != "assistant"]
    if not whole:
        if asked is None:
            raise MalformedRow(f"{where}: the row has no prompt; {NAME_PROMPT}")
        return asked, list(sides.values())
    if len(whole) < len(sides):
        other = next(name for name in sides if name not in whole)
        problem = f"{whole[0]} begins with the prompt, and {other} does not"
        raise MalformedRow(f"{where}: {problem}; the prompt is not a prefix of all responses")
    prompt, responses = _common_messages(sides, where)
    if asked is None or not must_match:
        return prompt, responses
    given = as_messages(asked)
    if _is_end(given, of=prompt):
        return prompt, responses
    # the prompt may have a system message that the responses do not repeat
    if _is_end(prompt, of=given):
        return asked, responses
    raise MalformedRow(f"{where}: the prompt is not a prefix of {' and '.join(sides)}")


def _common_messages(
    sides: Mapping[str, list[Message]], where: str
) -> tuple[list[Message], list[Raw]]:
    """Return the messages that all sides begin with, up to an assistant turn, and the rests."""
    shortest = min(map(len, sides.values()))
    first = next(iter(sides.values()))
    same = 0
    while same < shortest and all(side[same] == first[same] for side in sides.values()):
        same += 1
    # equal sides are reported with their location later
    if all(len(side) == same for side in sides.values()):
        same -= 1
    for name, side in sides.items():
        if len(side) <= same:
            raise MalformedRow(f"{where}: {name} is empty after the messages that all sides share")
        if side[same]["role"] != "assistant":
            problem = f"{' and '.join(sides)} have different prompts"
            raise MalformedRow(f"{where}: {problem}: message {same + 1} of {name} is not shared")
    # several assistant messages in a row are one turn of the policy
    while same and first[same - 1]["role"] == "assistant":
        same -= 1
    if not same:
        raise MalformedRow(f"{where}: the row has no prompt; {NAME_PROMPT}")
    return first[:same], [side[same:] for side in sides.values()]


def _is_end(last: list[Message], *, of: list[Message]) -> bool:
    """Return True if messages ``of`` end with ``last``, apart from white space."""
    ends = of[len(of) - len(last) :] if len(last) <= len(of) else []
    pairs = list(zip(last, ends))
    return bool(pairs) and all(stripped(one) == stripped(other) for one, other in pairs)
