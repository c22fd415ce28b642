"""Parsing of a row of any layout into a ``ParsedRow`` with prompt, response and label.

An empty setting of ``Columns`` means the usual names, tried in the order of ``USUAL``. A column
that is null counts as absent. Every verb that reads a row reads its prompt here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeGuard, TypeVar

from lightrft.config.data import Columns, TrainingColumns
from lightrft.datasets.media import NOTHING, SupportedMedia
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
from lightrft.datasets.rows.recorded_row import is_raw, recorded, unrecorded
from lightrft.datasets.rows.row_content import (
    MEANINGS,
    USUAL,
    GivenRow,
    Raw,
    is_transcript,
    raw_prompt,
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
    given = GivenRow(recorded(row), columns, where, reads, root, prefill)
    row = given.row
    column = given.response_column()
    has_response = bool(column) and look_up(unrecorded(row), column) is not None
    prompt = given.find_prompt(has_response=has_response)
    response = None
    is_turn = ends_with_assistant(prompt)
    # Mistral and DeepSeek mark the beginning of a turn so.
    is_marked = prefill is not False and _is_marked(prompt)
    if is_marked:
        last = {name: value for name, value in prompt[-1].items() if name != "prefix"}
        prompt = [*prompt[:-1], last]
    is_begun = is_marked or (is_turn and _is_begun(given))
    if is_marked and not is_prompt and not has_response:
        raise given.malformed(
            "the messages end with the beginning of a turn (prefix: true), and no column "
            "has the rest of it; remove the mark if the turn is whole"
        )
    if is_begun and not is_prompt:
        # A label is not the rest of a turn.
        is_begun = has_response and (bool(columns.response) or column in CONTINUATIONS)
    if is_begun or not is_turn:
        response = _response(given, column)
    elif columns.response and has_response:
        raise given.malformed(
            f"the messages end with a response already, and {columns.response!r} "
            "(data.columns.response) holds another; leave one of them out, or set data.prefill: "
            "true if the second continues the first"
        )
    # A row has a prompt, or the media are the prompt.
    if prompt in (None, "") and not given.finder().has_columns(unrecorded(row)):
        if not row.keys().isdisjoint(set(USUAL["prompt"]).difference(CHATS)):
            raise given.malformed("the prompt is empty")
        raise no_prompt(row, where)
    return parsed_row(given, prompt, response, is_begun=is_begun)


def _is_marked(prompt: Raw | None) -> TypeGuard[list[Any]]:
    if not isinstance(prompt, list) or not ends_with_assistant(prompt):
        return False
    return prompt[-1].get("prefix") is True


def _is_begun(given: GivenRow) -> bool:
    """Return True if the assistant turn at the end of the prompt of a row is a beginning."""
    if given.prefill != "auto":
        return bool(given.prefill)
    here = given.unrecorded
    name = here.prompt_column()
    if name.rpartition(".")[2] in (*CONVERSATIONS, *CHATS):
        return False
    # Otherwise the turn is of another column, which holds the whole conversation.
    return ends_with_assistant(raw_prompt(look_up(here.row, name), given.where))


def parsed_row(
    given: GivenRow, prompt: Raw | None, response: str | list[Any] | None, *, is_begun: bool = False
) -> ParsedRow:
    """Return a row with its prompt and response as a ``ParsedRow``, with its media.

    Args:
        given: the row.
        prompt: the prompt, with the system message and the history of the row. None if the prompt
            is the media alone.
        response: the response. None if the row has none, or if ``prompt`` ends with it.
        is_begun: True if the response continues the last message of ``prompt``.

    Raises:
        MalformedRow: messages are malformed, places and media do not match, or a column of a known
            meaning is not read.
    """
    row, columns, where = recorded(given.row), given.columns, given.where
    finder, here = given.finder(), given.unrecorded
    has_media = finder.has_columns(here.row)
    shown = " " if has_media and prompt in (None, "") else prompt
    asked = read_prompt(shown, where, finder, blank=has_media)
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
            raise given.malformed(f"{problem}; add the tool's result, or leave the call out")
        if said and not isinstance(said, str) and said[0]["role"] != "assistant":
            raise given.malformed(
                "the prompt ends with the assistant's message, and the response begins "
                f"with one of {said[0]['role']!r}; a response continues the message"
            )
        # The weight of a continued message is that of its response.
        turn_weights = {k - (k >= len(asked)): w for k, w in turn_weights.items()}
    gold = given.gold()
    # A layout may have its prompt elsewhere, so the named column may be missing.
    is_missing = bool(columns.prompt) and look_up(here.row, columns.prompt) is None
    name = "" if is_missing else here.prompt_column()
    spelled = look_up(here.row, name) if name else None
    is_spelled = isinstance(spelled, str) and is_transcript(spelled) and not finder.items
    identifier_column, identifier = given.pick("id")
    source_column, _ = here.pick("data_source")
    # The column of the response stays, since rewards may compare with it.
    taken = {name, *gold.columns, identifier_column, source_column, *finder.taken(here.row)}
    given.refuse_unread(row, {f"{item.kind}s" for item in finder.items})
    possible: tuple[str, ...] = ()
    if not name:
        # Text or turns that no part of a record has.
        known = {*taken, *USUAL["response"], *WEIGHTS, *MEANINGS}
        possible = tuple(n for n in sorted(row.unread - known) if _may_be_prompt(row.peek(n)))
    return ParsedRow(
        prompt=asked,
        response=said,
        label=gold.label,
        reference=gold.reference,
        data_source=gold.data_source,
        id="" if identifier is None else str(identifier),
        columns={
            other: value
            for other, value in row.items()
            # A model of text alone has no use for media, but a reward may.
            if other not in taken and not (finder.reads.spellings and is_raw(value))
        },
        row=row,
        where=where,
        media=finder.items,
        turn_weights=turn_weights,
        front=places.front,
        words=places.words,
        gold=gold.columns,
        possible_prompts=possible,
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


def _may_be_prompt(value: object) -> bool:
    """Return True for text, and for records with text, which may be turns of a conversation."""
    if isinstance(value, list | tuple):
        first = value[0] if value else None
        return isinstance(first, Mapping) and any(isinstance(v, str) for v in first.values())
    return isinstance(value, str)


def _response(given: GivenRow, column: str) -> str | list[Any] | None:
    is_named = bool(given.columns.response)
    value = look_up(given.row, column) if column else None
    if isinstance(value, Mapping) and not {"role", "from"}.isdisjoint(value):
        value = [value]
    if isinstance(value, Mapping) and is_named:
        problem = f"response must be text or a list of messages, not {type(value).__name__}"
        raise given.malformed(f"{problem}; name another column in data.columns.response")
    # A table or a list of texts in a usual column, such as ``answer``, is for rewards.
    if value is None or isinstance(value, Mapping):
        return None
    if isinstance(value, list | tuple):
        is_spoken = is_named or any(isinstance(one, Mapping) for one in value)
        return list(value) if is_spoken else None
    return (json_messages(value) if isinstance(value, str) else None) or str(value)


R = TypeVar("R")
Matches = Callable[[Row, Any], bool]


@dataclass(frozen=True, slots=True)
class RowLayout(Generic[R]):
    """One layout.

    Args:
        name: the name, for settings and messages.
        columns: the columns that a row is recognised by, for messages.
        matches: returns True if a row has these columns, by the settings ``data.columns``.
        read: returns the content of a row. Raises ``MalformedRow``.
    """

    name: str
    columns: str
    matches: Matches
    read: Callable[..., R]

    def __str__(self) -> str:
        return f"{self.name}: {self.columns}"


class RowLayouts(dict[str, RowLayout[R]]):
    """RowLayouts by name, in the order in which they are tried."""

    def add(
        self, name: str, columns: str, matches: Matches | None = None
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Return the decorator of the reader of a layout.

        Args:
            name: see ``RowLayout``.
            columns: see ``RowLayout``.
            matches: see ``RowLayout``. None if a row must have each of ``columns``.
        """
        names = set(columns.split(", "))

        def keep(read: Callable[..., R]) -> Callable[..., R]:
            has = matches or (lambda row, _: names <= row.keys())
            self[name] = RowLayout(name, columns, has, read)
            return read

        return keep
