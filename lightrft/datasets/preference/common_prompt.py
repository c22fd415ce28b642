"""Separation of the prompt from responses that contain it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from lightrft.datasets.row_parser import Message
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.rows.row_content import Raw, as_messages, is_transcript, stripped, transcript

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
