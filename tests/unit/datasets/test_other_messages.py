"""Messages and transcripts of other formats become messages with role and content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.data import PreferenceColumns, TrainingColumns
from lightrft.datasets.media import SupportedMedia
from lightrft.datasets.preference.preference_rows import read_preference
from lightrft.datasets.row_parser import ParsedRow, read_tools
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.rows.row_reader import read_record

SEES = SupportedMedia({"image": ("<image>",)})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def tool(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **fields}


def call(name: str, arguments: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**fields, "type": "function", "function": {"name": name, "arguments": arguments}}


def record(row: dict[str, Any]) -> ParsedRow:
    return read_record(row, TrainingColumns(), "rows.jsonl, line 7", SEES)


SUM = [user("2+3?"), said("5"), user("And 4+4?"), said("8")]
SYSTEM = {"role": "system", "content": "Be brief."}
MARKED = {"cache_control": {"type": "ephemeral"}}
ANTHROPIC = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", **MARKED}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Two cities.", "signature": "Eq=="},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "t2", "name": "look", "input": {}, **MARKED},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t2", "content": "Sun"},
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "Rain"}],
            },
            {"type": "text", "text": "So?"},
        ],
    },
    {"role": "assistant", "content": "Rain and sun."},
]
LOOKED = [
    user("Weather?"),
    said(
        "I look.",
        tool_calls=[call("look", {"city": "Oslo"}, id="t1"), call("look", {}, id="t2")],
        reasoning_content="Two cities.",
    ),
    tool("Rain", tool_call_id="t1"),
    tool("Sun", tool_call_id="t2"),
    user("So?"),
    said("Rain and sun."),
]
GEMINI = [
    {"role": "user", "parts": [{"text": "Weather "}, {"text": "in Oslo?"}]},
    {
        "role": "model",
        "parts": [
            {"text": "A city.", "thought": True},
            {"functionCall": {"name": "look", "args": {"city": "Oslo"}}, "thoughtSignature": "x"},
        ],
    },
    {"role": "user", "parts": [{"function_response": {"name": "look", "response": {"sky": "é"}}}]},
    {"role": "model", "parts": [{"text": "Clear."}]},
]
GEMINI_READ = [
    user("Weather in Oslo?"),
    said("", tool_calls=[call("look", {"city": "Oslo"})], reasoning_content="A city."),
    tool('{"sky": "é"}', name="look"),
    said("Clear."),
]
GLAIVE = (
    'USER: 5 USD in EUR?\n\n\nASSISTANT: Sure. <functioncall> {"name": "convert", "arguments": '
    '\'{"amount": 5}\'} <|endoftext|>\n\n\nFUNCTION RESPONSE: {"v": 4.2}\n\n\nASSISTANT: It is 4.2.'
    " <|endoftext|>\n\n\n"
)
GLAIVE_READ = [
    user("5 USD in EUR?"),
    said("Sure.", tool_calls=[call("convert", {"amount": 5})]),
    tool('{"v": 4.2}'),
    said("It is 4.2."),
]
ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "Capybara": (
        {"conversation": [{"input": "2+3?", "output": "5"}, {"input": "And 4+4?", "output": "8"}]},
        SUM,
    ),
    "Capybara, open": ({"conversation": [{"input": "2+3?", "output": None}]}, SUM[:1]),
    "Anthropic": (
        {"system": [{"type": "text", "text": "Be brief.", **MARKED}], "messages": ANTHROPIC},
        [SYSTEM, *LOOKED],
    ),
    "Gemini": (
        {"contents": GEMINI, "systemInstruction": {"parts": [{"text": "Be brief."}]}},
        [SYSTEM, *GEMINI_READ],
    ),
    "glaive": ({"chat": GLAIVE, "system": "SYSTEM: Be brief."}, [SYSTEM, *GLAIVE_READ]),
    "a system message that spells a speaker": (
        {"prompt": "2+3?", "response": "5", "system": "\nSYSTEM: Be brief."},
        [{"role": "system", "content": "\nSYSTEM: Be brief."}, *SUM[:2]],
    ),
    "HelpSteer2": (
        {
            "prompt": "2+3?\n<extra_id_1>Assistant\n5\n<extra_id_1>User\nAnd 4+4?",
            "response": "8",
            "helpfulness": 4,
        },
        SUM,
    ),
    "HelpSteer2, opened": (
        {
            "prompt": "2+3?\n<extra_id_1>Assistant\n5\n<extra_id_1>User\nAnd 4+4?\n"
            "<extra_id_1>Assistant\n",
            "response": "8",
        },
        SUM,
    ),
}


@pytest.mark.parametrize(("row", "messages"), ROWS.values(), ids=ROWS)
def test_a_conversation_of_another_format_is_read_as_messages(
    row: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    assert record(row).messages == messages


def test_an_image_of_gemini_stands_where_its_part_is() -> None:
    shown = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
    found = record({"contents": [{"role": "user", "parts": [{"text": "See "}, shown]}]})
    assert len(found.media) == 1 and found.messages[0]["content"].startswith("See ")


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}],
        [
            {
                "functionDeclarations": [
                    {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
                ]
            }
        ],
    ],
)
def test_tools_of_other_formats_have_the_form_of_chat_templates(tools: list[Any]) -> None:
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    assert read_tools({"tools": tools}, "", "row 1") == [{"type": "function", "function": function}]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a call of the user": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "look"}]}]},
        "message 1: .*'tool_use' in a message of 'user'; write it in one of assistant",
    ),
    "a result of the assistant": (
        {"messages": [user("a"), {"role": "assistant", "content": [{"type": "tool_result"}]}]},
        "message 2: .*'tool_result' in a message of 'assistant'; write it in one of user or tool",
    ),
    "text after a call": (
        {
            "messages": [
                user("a"),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "name": "look"},
                        {"type": "text", "text": "b"},
                    ],
                },
            ]
        },
        "message 2: .*'text' after text or calls; split the message",
    ),
    "code of Gemini": (
        {"contents": [user("a"), {"role": "model", "parts": [{"executableCode": {"code": "1"}}]}]},
        "message 2: a content part of type 'executableCode'",
    ),
    "a call of glaive that is no JSON": (
        {"chat": 'USER: a\n\nASSISTANT: <functioncall> {"name": }'},
        "message 2: tool_calls is no JSON",
    ),
    "a document": ({"title": "a", "contents": "b"}, "no column with a prompt"),
    "a chat that is no conversation": ({"chat": "hello"}, "no column with a prompt"),
}


@pytest.mark.parametrize(("row", "problem"), BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_refused_by_its_place(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(MalformedRow, match=rf"^rows\.jsonl, line 7.*{problem}"):
        record(row)


def test_documents_beside_a_prompt_are_no_conversation() -> None:
    row = {"query": "2+3?", "contents": ["a", "b"], "answer": "5"}
    assert record(row).messages == SUM[:2]


JUNK = st.sampled_from(
    (None, "", "x", 0, [], [None], ["a"], {}, {"type": "tool_use"}, {"parts": 3})
)


@settings(max_examples=200, deadline=None)
@given(row=st.sampled_from([row for row, _ in ROWS.values()]), data=st.data())
def test_a_damaged_message_is_read_or_refused_with_its_location(row: Any, data: Any) -> None:
    name = next(n for n in ("contents", "messages", "conversation", "chat", "prompt") if n in row)
    turns = row[name]
    if isinstance(turns, list):
        k = data.draw(st.integers(0, len(turns) - 1))
        key = data.draw(st.sampled_from([*turns[k], "parts", "content"]))
        value = turns[k].get(key)
        junk = data.draw(JUNK)
        inside = isinstance(value, list) and data.draw(st.booleans())
        turns = [*turns[:k], {**turns[k], key: [*value, junk] if inside else junk}, *turns[k + 1 :]]
    else:
        turns = turns[: data.draw(st.integers(0, len(turns)))]
    try:
        record({**row, name: turns})
    except MalformedRow as error:
        assert str(error).startswith("rows.jsonl, line 7")


def preferred(row: dict[str, Any]) -> tuple[Any, list[tuple[Any, float]]]:
    found = read_preference(row, PreferenceColumns(), "rows.jsonl, line 7", SEES)
    (prompt, *others) = [one.prompt for one in found.responses]
    assert all(other == prompt for other in others)
    return prompt, [(one.response, rank) for one, rank in zip(found.responses, found.ranks)]


@pytest.mark.parametrize(("label", "ranks"), [(1, (0, 1)), (0, (1, 0))])
def test_the_history_of_shp_is_the_question_and_its_label_names_the_better_response(
    label: int, ranks: tuple[int, int]
) -> None:
    row = {"history": "Why?", "human_ref_A": "So.", "human_ref_B": "No.", "labels": label}
    row |= {"domain": "askscience_train", "score_A": 3, "score_B": 9}
    assert preferred(row) == ("Why?", [("So.", ranks[0]), ("No.", ranks[1])])
    with pytest.raises(MalformedRow, match="line 7: labels is 2"):
        preferred({**row, "labels": 2})


def test_the_pairs_of_capybara_have_the_turns_that_both_begin_with_as_prompt() -> None:
    turns = [{"input": "2+3?", "output": "5"}, {"input": "And 4+4?", "output": "8"}]
    sides = {"chosen": SUM, "rejected": [*SUM[:3], said("9")]}
    row = {"source": "a", "conversation": turns, "original_response": "8", **sides}
    assert preferred(row) == (SUM[:3], [("8", 0), ("9", 1)])


def test_the_turns_that_helpsteer2_marks_are_turns_of_its_preferences() -> None:
    prompt = "2+3?\n<extra_id_1>Assistant\n5\n<extra_id_1>User\nAnd 4+4?"
    row = {"prompt": prompt, "response_1": "8", "response_2": "9", "preference_strength": -1}
    assert preferred(row) == (SUM[:3], [("8", 0), ("9", 1)])
