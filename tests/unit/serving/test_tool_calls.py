"""The calls of tools in responses, and tools in requests."""

from __future__ import annotations

import json

import pytest

from lightrft.serving.chat.messages import as_chat
from lightrft.serving.chat.tool_calls import find_calls, read_tools, with_parsed_arguments
from lightrft.serving.problems import HTTPProblem
from tests.unit.rewards.test_linear_time import grows_faster_than_the_text

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"Well. <tool_call>\n{json.dumps(ADD)}\n</tool_call>", "Well."),
        (f"<tool_call>{json.dumps(ADD)}", ""),
        (json.dumps({"name": "add", "parameters": {"a": 1, "b": 2}}), ""),
        (json.dumps([ADD]), ""),
    ],
    ids=["hermes", "unclosed", "llama", "mistral"],
)
def test_a_call_is_found_in_each_format(text, left):
    found, (call,) = find_calls(text, TOOLS)
    assert (found, call.name, call.arguments) == (left, "add", {"a": 1, "b": 2})
    assert json.loads(call.shown()["function"]["arguments"]) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "text",
    [
        "The sum is 3.",
        '<tool_call>{"name": "add", "arguments": </tool_call>',
        '<tool_call>{"name": "delete", "arguments": {}}</tool_call>',
        '{"name": "add", "arguments": "1"}',
        '[{"name": "add", "arguments": {}}, 3]',
        "[" * 100_000,
    ],
    ids=["text", "cut", "unknown", "no object", "mixed", "deep"],
)
def test_text_that_is_no_call_of_a_known_tool_stays_text(text):
    assert find_calls(text, TOOLS) == (text, [])


def test_two_calls_have_two_ids():
    text = "".join(f"<tool_call>{json.dumps(ADD)}</tool_call>" for _ in range(2))
    _, calls = find_calls(text, TOOLS)
    assert len({call.id for call in calls}) == 2


def test_tools_are_read_refused_or_left_out():
    assert read_tools({"tools": TOOLS}) == TOOLS
    assert read_tools({"tools": TOOLS, "tool_choice": "none"}) == []
    assert read_tools({}) == []
    for body in ({"tools": [{"name": "add"}]}, {"tools": TOOLS, "tool_choice": "required"}):
        with pytest.raises(HTTPProblem):
            read_tools(body)


def test_arguments_of_earlier_calls_become_objects():
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    [message] = with_parsed_arguments([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    call["function"]["arguments"] = "{"
    with pytest.raises(HTTPProblem, match="not JSON"):
        with_parsed_arguments([{"role": "assistant", "tool_calls": [call]}])


def test_a_request_for_messages_becomes_one_for_a_chat_completion():
    blocks = [
        {"type": "text", "text": "see"},
        {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}},
    ]
    found = as_chat(
        {
            "system": [{"type": "text", "text": "short"}],
            "messages": [
                {"role": "user", "content": "1+2"},
                {"role": "assistant", "content": blocks},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3"}],
                },
            ],
            "tools": [{"name": "add", "input_schema": {"type": "object"}}],
            "stop_sequences": ["."],
            "max_tokens": 5,
        }
    )
    assert [message["role"] for message in found["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert found["messages"][2]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": {"a": 1},
    }
    assert found["messages"][3] == {"role": "tool", "content": "3", "tool_call_id": "t"}
    assert found["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert (found["stop_sequences"], found["max_tokens"], found["tool_choice"]) == (
        ["."],
        5,
        "auto",
    )


@pytest.mark.parametrize("text", ["", " ", "{}"])
def test_a_call_without_arguments_has_none(text):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": text}}
    [message] = with_parsed_arguments([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("blank", [" ", "\n", "\t", "\u00a0"])
def test_a_long_run_of_blanks_in_a_call_takes_linear_time(blank: str) -> None:
    """A response of 20,000 characters took 5 s of the server."""
    long, short = (f"<tool_call>a{blank * size}b" for size in (20_000, 5_000))
    assert not grows_faster_than_the_text(lambda text: find_calls(text, TOOLS), long, short)
