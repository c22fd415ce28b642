"""Parsing of a row of any layout into a ``ParsedRow`` with prompt, response and label.

An empty setting of ``Columns`` means the usual names, tried in the order of ``USUAL``. A column
that is null counts as absent. Every verb that reads a row reads its prompt here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard

from lightrft.config.data import Columns, TrainingColumns
from lightrft.datasets.media import NOTHING, MediaFinder, SupportedMedia
from lightrft.datasets.row_parser import (
    CHATS,
    CONVERSATIONS,
    Message,
    ParsedRow,
    ends_with_assistant,
    json_messages,
    no_prompt,
    number,
    place_media,
    pop_turn_weights,
    read_messages,
    read_prompt,
)
from lightrft.datasets.row_tables import MalformedRow, Row, look_up, named_column
from lightrft.datasets.rows.recorded_row import RecordedRow, is_raw, recorded, unrecorded
from lightrft.datasets.rows.row_content import (
    MEANINGS,
    USUAL,
    Raw,
    find_gold,
    find_prompt,
    is_transcript,
    pick,
    prompt_column,
    raw_prompt,
    refuse_unread,
    response_column,
)

WEIGHTS = ("example_weight", "sample_weight")
"""Usual columns of the weight of a row in the loss."""
CONTINUATIONS = ("response", "completion")
"""Columns of a response that may continue an assistant turn at the end of the prompt."""


def read_record(
    row: Row,
    columns: Columns,
    where: str,
    reads: SupportedMedia = NOTHING,
    root: Path = Path(),
    *,
    prefill: bool | Literal["auto"] = "auto",
    is_prompt: bool = False,
) -> ParsedRow:
    """Return ``row`` as a ``ParsedRow``.

    Args:
        row: the row. A ``RecordedRow`` records the columns that are read.
        columns: names of the columns. Empty names mean the usual names.
        where: location of the row, for messages.
        reads: media that the model reads.
        root: folder of relative media paths.
        prefill: the setting ``data.prefill``.
        is_prompt: True if the policy responds to the row, False if the row has the response.

    Raises:
        MalformedRow: the prompt is missing, empty or ambiguous, a named column is missing, or
            messages are malformed. Also raised if places and media do not match. The message names
            the row, the column and the existing columns.
    """
    row = recorded(row)
    finder = media_finder(columns, where, reads, root)
    column = response_column(row, columns, where)
    has_response = bool(column) and look_up(unrecorded(row), column) is not None
    prompt = find_prompt(row, columns, where, has_response=has_response)
    response = None
    is_turn = ends_with_assistant(prompt)
    # Mistral and DeepSeek mark the beginning of a turn so.
    is_marked = prefill is not False and _is_marked(prompt)
    if is_marked:
        last = {name: value for name, value in prompt[-1].items() if name != "prefix"}
        prompt = [*prompt[:-1], last]
    is_begun = is_marked or (is_turn and _is_begun(row, columns, where, prefill))
    if is_marked and not is_prompt and not has_response:
        raise MalformedRow(
            f"{where}: the messages end with the beginning of a turn (prefix: true), and no column "
            "has the rest of it; remove the mark if the turn is whole"
        )
    if is_begun and not is_prompt:
        # A label is not the rest of a turn.
        is_begun = has_response and (bool(columns.response) or column in CONTINUATIONS)
    if is_begun or not is_turn:
        response = _response(row, column, columns, where)
    elif columns.response and has_response:
        raise MalformedRow(
            f"{where}: the messages end with a response already, and {columns.response!r} "
            "(data.columns.response) holds another; leave one of them out, or set data.prefill: "
            "true if the second continues the first"
        )
    if prompt is None or prompt == "":
        _check_blank(row, finder, where)
    return parsed_row(row, prompt, response, columns, where, finder, is_begun=is_begun)


def _is_marked(prompt: Raw | None) -> TypeGuard[list[Any]]:
    if not isinstance(prompt, list) or not ends_with_assistant(prompt):
        return False
    return prompt[-1].get("prefix") is True


def _is_begun(row: RecordedRow, columns: Columns, where: str, prefill: object) -> bool:
    """Return True if the assistant turn at the end of the prompt of ``row`` is a beginning."""
    if prefill != "auto":
        return bool(prefill)
    name = prompt_column(unrecorded(row), columns, where)
    if name.rpartition(".")[2] in (*CONVERSATIONS, *CHATS):
        return False
    # Otherwise the turn is of another column, which holds the whole conversation.
    return ends_with_assistant(raw_prompt(look_up(unrecorded(row), name), where))


def check_begun(prompt: Raw, prefill: object, where: str) -> bool:
    """Return True if the response to ``prompt``, in another column, continues its last turn.

    Args:
        prompt: the prompt of a row with its response elsewhere.
        prefill: the setting ``data.prefill``.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the prompt ends with a turn of the assistant, and ``prefill`` is False.
    """
    is_begun = ends_with_assistant(prompt)
    if is_begun and prefill is False:
        raise MalformedRow(
            f"{where}: the prompt ends with the assistant's message; leave it out, or set "
            "data.prefill: true to have the response continue it"
        )
    return is_begun


def parsed_row(
    row: RecordedRow,
    prompt: Raw | None,
    response: str | list[Any] | None,
    columns: Columns,
    where: str,
    finder: MediaFinder,
    *,
    is_begun: bool = False,
) -> ParsedRow:
    """Return a row with its prompt and response as a ``ParsedRow``, with its media.

    Args:
        row: the row.
        prompt: the prompt, with the system message and the history of the row. None if the prompt
            is the media alone.
        response: the response. None if the row has none, or if ``prompt`` ends with it.
        columns: names of the columns.
        where: location of the row, for messages.
        finder: collects the media of the row.
        is_begun: True if the response continues the last message of ``prompt``.

    Raises:
        MalformedRow: messages are malformed, places and media do not match, or a column of a known
            meaning is not read.
    """
    has_media = finder.has_columns(unrecorded(row))
    given = " " if has_media and prompt in (None, "") else prompt
    asked = read_prompt(given, where, finder, blank=has_media)
    said: str | list[Message] | None = None
    if isinstance(response, str):
        said = finder.plain(response, f"{where}, response")
    elif response is not None:
        said = read_messages(response, f"{where}, response message", finder)
    asked, said, places = place_media(asked, said, finder, row)
    turn_weights = pop_turn_weights(asked, said, where)
    if is_begun and isinstance(asked, list):
        if asked[-1].get("tool_calls"):
            problem = "the prompt ends with a call of a tool, which no response can continue"
            raise MalformedRow(f"{where}: {problem}; add the tool's result, or leave the call out")
        if said and not isinstance(said, str) and said[0]["role"] != "assistant":
            raise MalformedRow(
                f"{where}: the prompt ends with the assistant's message, and the response begins "
                f"with one of {said[0]['role']!r}; a response continues the message"
            )
        # The weight of a continued message is that of its response.
        turn_weights = {k - (k >= len(asked)): w for k, w in turn_weights.items()}
    gold = find_gold(row, columns, where)
    here = unrecorded(row)
    # A layout may have its prompt elsewhere, so the named column may be missing.
    is_missing = bool(columns.prompt) and look_up(here, columns.prompt) is None
    name = "" if is_missing else prompt_column(here, columns, where)
    spelled = look_up(here, name) if name else None
    is_spelled = isinstance(spelled, str) and is_transcript(spelled) and not finder.items
    identifier_column, identifier = pick(row, "id", columns, where)
    source_column, _ = pick(here, "data_source", columns, where)
    # The column of the response stays, since rewards may compare with it.
    taken = {name, *gold.columns, identifier_column, source_column}
    taken |= finder.taken(here)
    refuse_unread(row, columns, {f"{item.kind}s" for item in finder.items}, where)
    return ParsedRow(
        prompt=asked,
        response=said,
        label=gold.label,
        reference=gold.reference,
        data_source=gold.data_source,
        id="" if identifier is None else str(identifier),
        columns=_other_columns(row, taken, reads=finder.reads),
        row=row,
        where=where,
        media=finder.items,
        turn_weights=turn_weights,
        front=places.front,
        words=places.words,
        gold=gold.columns,
        possible_prompts=() if name else _possible_prompts(row, taken),
        text=spelled if is_spelled and raw_prompt(spelled, where) == prompt else None,
        is_begun=is_begun,
    )


def row_weight(row: Row, columns: TrainingColumns, where: str) -> float:
    """Return the weight of a row in the loss: 1 if it has none.

    Args:
        row: the row.
        columns: names of the columns.
        where: location of the row, for messages.

    Raises:
        MalformedRow: the weight is no number above 0, or the named column is missing.
    """
    found: dict[str, object] = {name: row.get(name) for name in WEIGHTS}
    if columns.weight:
        found = {columns.weight: named_column(row, columns.weight, "weight", where)}
    for name, value in found.items():
        if value is None:
            continue
        weight = number(value, name, where)
        if weight <= 0:
            raise MalformedRow(f"{where}: {name} is {weight:g}, not above 0; leave the row out")
        return weight
    return 1.0


def media_finder(columns: Columns, where: str, reads: SupportedMedia, root: Path) -> MediaFinder:
    """Return a finder of the media of one row.

    Args:
        columns: names of the columns.
        where: location of the row, for messages.
        reads: media that the model reads.
        root: folder of relative media paths.
    """
    named = {"image": columns.images, "video": columns.videos, "audio": columns.audios}
    return MediaFinder(reads, where, root, named)


def _check_blank(row: RecordedRow, finder: MediaFinder, where: str) -> None:
    """Raise ``MalformedRow`` for a row that has neither a prompt nor media."""
    if finder.has_columns(unrecorded(row)):
        return
    if not row.keys().isdisjoint(set(USUAL["prompt"]).difference(CHATS)):
        raise MalformedRow(f"{where}: the prompt is empty")
    raise no_prompt(row, where)


def _possible_prompts(row: RecordedRow, taken: set[str]) -> tuple[str, ...]:
    """Return the columns of text or turns that no part of a record has, and may be a prompt."""
    known = {*taken, *USUAL["response"], *WEIGHTS, *MEANINGS}
    return tuple(n for n in sorted(row.unread - known) if _may_be_prompt(row.peek(n)))


def _may_be_prompt(value: object) -> bool:
    """Return True for text, and for records with text, which may be turns of a conversation."""
    if isinstance(value, list | tuple):
        first = value[0] if value else None
        return isinstance(first, Mapping) and any(isinstance(v, str) for v in first.values())
    return isinstance(value, str)


def _response(
    row: RecordedRow, column: str, columns: Columns, where: str
) -> str | list[Any] | None:
    value = look_up(row, column) if column else None
    if isinstance(value, Mapping) and not {"role", "from"}.isdisjoint(value):
        value = [value]
    if isinstance(value, Mapping) and columns.response:
        kind = type(value).__name__
        problem = f"{where}: response must be text or a list of messages, not {kind}"
        raise MalformedRow(f"{problem}; name another column in data.columns.response")
    # A table or a list of texts in a usual column, such as ``answer``, is for rewards.
    if value is None or isinstance(value, Mapping):
        return None
    if isinstance(value, list | tuple):
        is_spoken = bool(columns.response) or any(isinstance(one, Mapping) for one in value)
        return list(value) if is_spoken else None
    return (json_messages(value) if isinstance(value, str) else None) or str(value)


def _other_columns(row: Row, taken: set[str], reads: SupportedMedia) -> dict[str, object]:
    """Return the columns of ``row`` that are neither ``taken`` nor media."""
    kept = {}
    for name, value in row.items():
        if name in taken:
            continue
        # A model of text alone has no use for media, but a reward may.
        if reads.spellings and is_raw(value):
            continue
        kept[name] = value
    return kept
