import json

import pytest

from lightrft.config.data import Columns
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.rows.row_reader import read_record

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]


def record(row, **columns):
    return read_record(row, Columns(**columns), "rows.jsonl, line 7")


@pytest.mark.parametrize("name", ["prompt", "input", "question"])
def test_the_usual_prompt_columns_are_found(name):
    assert record({name: "1+1=?", "other": 3}).prompt == "1+1=?"


@pytest.mark.parametrize(
    ("row", "label", "reference"),
    [
        ({"label": "2", "answer": "3"}, "2", None),
        ({"answer": "3"}, "3", None),
        ({"label": None, "answer": "3"}, "3", None),
        ({"reward_model": {"ground_truth": "4"}}, "4", "4"),
        ({"extra_info": {"label": "5"}}, "5", None),
        ({"extra_info": {"label": "rule"}, "reward_model": {"ground_truth": "4"}}, "4", "4"),
        ({"label": 2, "reference": "because", "reward_model": {"ground_truth": "4"}}, 2, "because"),
    ],
)
def test_the_usual_label_and_reference_columns_are_found(row, label, reference):
    found = record({"prompt": "q", **row})
    assert (found.label, found.reference) == (label, reference)


def test_names_in_the_settings_win_and_dots_reach_inside():
    row = {
        "prompt": "no",
        "task": {"text": "yes"},
        "a.b": 1,
        "a": {"b": 2},
        "source": "mine",
        "key": 5,
    }
    found = record(row, prompt="task.text", label="a.b", data_source="source", id="key")
    assert (found.prompt, found.label, found.data_source, found.id) == ("yes", 1, "mine", "5")


def test_every_other_column_is_kept():
    row = {"question": "q", "answer": "a", "level": 3, "reward_model": {"ground_truth": "r"}}
    assert record(row).columns == {"level": 3, "reward_model": {"ground_truth": "r"}}


def test_a_missing_column_is_named_with_the_row_and_the_columns_that_exist():
    message = r"rows\.jsonl, line 7: no column 'questoin' \(data\.columns\.prompt\); the row has: question, answer; did you mean"
    with pytest.raises(MalformedRow, match=message):
        record({"question": "q", "answer": "a"}, prompt="questoin")
    with pytest.raises(
        MalformedRow,
        match=r"line 7: no column with a prompt .* the row has: words\. Name the column in data\.columns\.prompt",
    ):
        record({"words": "q"})
    with pytest.raises(MalformedRow, match="Split the text into the columns prompt and completion"):
        record({"text": "q"})
    with pytest.raises(MalformedRow, match=r"no column 'extra\.label' \(data\.columns\.label\)"):
        record({"prompt": "q", "extra": {"lable": 1}}, label="extra.label")


@pytest.mark.parametrize(
    "value", ["", "  \n", None, [], [{"role": "user", "content": ""}], [CHAT[0]]]
)
def test_an_empty_prompt_names_the_row(value):
    with pytest.raises(MalformedRow, match=r"line 7: the prompt is empty"):
        record({"prompt": value})


def test_messages_are_read_in_each_of_their_forms():
    sharegpt = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1+1=?"}]
    parts = [
        CHAT[0],
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1=?"}],
            "name": None,
        },
    ]
    mixed = [{"role": m["role"], "value": m["content"]} for m in CHAT]
    other = [{"from": m["role"], "content": m["content"]} for m in CHAT]
    for value in (CHAT, sharegpt, parts, mixed, other):
        assert record({"messages": value}).prompt == CHAT
        if value is not parts:
            assert record({"messages": json.dumps(value)}).prompt == CHAT


def test_messages_as_json_text_may_call_tools_without_content():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    result = {"role": "tool", "content": "2"}
    talk = [*CHAT, {"role": "assistant", "tool_calls": [call]}, result]
    assert record({"messages": json.dumps(talk)}).prompt == record({"messages": talk}).prompt
    assert record({"messages": talk}).prompt[2]["tool_calls"] == [call]


def test_a_response_may_be_one_message():
    said = {"role": "assistant", "content": "2"}
    assert record({"prompt": "1+1=?", "response": said}).response == [said]
    assert record({"prompt": "1+1=?", "told": said}, response="told").response == [said]


def test_json_that_is_no_conversation_stays_text():
    for text in ('["a", "b"]', "[1, 2", '[{"role": "user"}]', "[]"):
        assert record({"prompt": text}).prompt == text


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_in_the_spelling_of_python_are_refused(column: str):
    with pytest.raises(MalformedRow, match=r"messages in the spelling of Python; .* json\.dumps"):
        record({column: str(CHAT), "answer": "2"})


def test_a_list_of_texts_as_the_answer_is_for_rewards():
    found = record({"prompt": "Who?", "answer": ["Bob", "Bobby"]})
    assert (found.label, found.response) == (["Bob", "Bobby"], None)


@pytest.mark.parametrize("content", ["", None])
def test_a_conversation_whose_user_says_nothing_has_an_empty_prompt(content: str | None):
    with pytest.raises(MalformedRow, match="the prompt is empty"):
        record(
            {
                "messages": [
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": "2"},
                ]
            }
        )


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"from": "robot", "value": "x"}, r"message 2: 'from' is 'robot'; known: human"),
        (
            {"speaker": "user", "content": "x"},
            r"message 2: neither 'role' nor 'from'; it has: speaker, content",
        ),
        ("hello", r"message 2: a message must have a role"),
        (
            {"role": "user", "content": [{"type": "chart"}]},
            r"message 2: a content part of type 'chart'",
        ),
        ({"role": "user", "content": 3}, r"message 2: content must be text"),
        ({"role": "user", "content": {"text": "x"}}, r"message 2: content must be text"),
        (
            {"role": "user", "content": [{"type": "text", "text": 5}]},
            r"message 2: text of a content part is 5, not a text",
        ),
        (
            {"role": "user", "text": "x"},
            r"message 2: neither 'content' nor 'value'; it has: role, text",
        ),
        (
            {"role": "user", "content": ["x"]},
            r"message 2: a content part is the text 'x'; write {\"type\": \"text\"",
        ),
        (
            {"role": "assistant", "content": [{"type": "reasoning", "text": "x"}]},
            r"message 2: a content part of type 'reasoning'; write it as 'reasoning_content'",
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_call", "name": "x"}]},
            r"message 2: a content part of type 'tool_call'; write it as 'tool_calls'",
        ),
        ({"role": 5, "content": "x"}, r"message 2: role is 5, not a text such as 'user'"),
        ({"role": ["user"], "content": "x"}, r"message 2: role is \['user'\], not a text"),
        ({"from": ["human"], "value": "x"}, r"message 2: 'from' is \['human'\]; known: human"),
    ],
)
def test_a_malformed_message_names_row_and_message(message, what):
    with pytest.raises(MalformedRow, match=rf"line 7, {what}"):
        record({"messages": [CHAT[0], message]})


def test_a_prompt_of_another_type_is_refused():
    with pytest.raises(MalformedRow, match=r"must be text or a list of messages, not int"):
        record({"prompt": 3})


def test_a_response_that_is_a_table_is_refused_if_it_is_named_and_is_else_no_response():
    row = {"prompt": "q", "answer": {"value": "a"}}
    found = record(row)
    assert found.response is None and found.label == {"value": "a"}
    problem = r"line 7: response must be text or a list of messages, not dict; .*columns\.response"
    with pytest.raises(MalformedRow, match=problem):
        record(row, response="answer")
    assert record({"prompt": "q", "response": 5}).response == "5"


def test_two_column_instructions_are_read_without_a_reader():
    found = record({"instruction": "Add.", "input": "1 1", "output": "2"})
    assert (found.prompt, found.response) == ("Add.\n\n1 1", "2")
    assert record({"instruction": "Add.", "input": "", "output": "2"}).prompt == "Add."
    assert record({"instruction": "", "input": "1 1", "output": "2"}).prompt == "1 1"
    with pytest.raises(MalformedRow, match="line 7: input must be text, not list"):
        record({"instruction": "Add.", "input": ["1", "1"], "output": "2"})


def test_a_response_of_messages_continues_the_conversation():
    found = record({"prompt": CHAT, "completion": [{"role": "assistant", "content": "2"}]})
    assert found.messages == [*CHAT, {"role": "assistant", "content": "2"}]
    assert found.answer == "2"


def test_a_named_response_is_refused_where_the_messages_hold_another_one():
    row = {"messages": [*CHAT, {"role": "assistant", "content": "2"}], "better": "two"}
    assert record(row, prompt="messages").response is None
    with pytest.raises(MalformedRow, match=r"'better' \(data\.columns\.response\) holds another"):
        record(row, prompt="messages", response="better")
    row["better"] = None
    assert record(row, prompt="messages", response="better").response is None
