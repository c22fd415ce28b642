"""What messages carry is in the rendered text, or named in an error or a warning."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.data import DataConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.row_parser import read_conversation
from lightrft.datasets.row_tables import MalformedRow
from tests.unit.datasets.published_templates import PUBLISHED

ENCODERS = {name: ChatEncoder(DataConfig(), p.tokenizer()) for name, p in PUBLISHED.items()}
CALL = {"name": "add", "arguments": {"a": 1}}


def shown(messages, name="qwen2.5"):
    """The rendered conversation, as a user wrote it."""
    encoder = ENCODERS[name]
    record = read_conversation(messages, "row 1")
    return encoder.unescape_special_tokens(encoder.render(encoder.conversation(record), "row 1"))


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize(
    ("role", "as_role"),
    [
        ("human", "user"),
        ("gpt", "assistant"),
        ("model", "assistant"),
        ("observation", "tool"),
        ("tool_response", "tool"),
        ("function", "tool"),
        ("developer", "developer"),
        ("User", "user"),
        ("ASSISTANT", "assistant"),
    ],
)
def test_roles_of_other_formats_are_mapped_in_messages(role, as_role):
    first = (
        [said("user", "Q"), said("assistant", "", tool_calls=[CALL])] if as_role == "tool" else []
    )
    last = [] if as_role == "tool" else [said("user", "more")]
    found = shown([*first, said(role, "SECRET"), *last])
    assert found == shown([*first, said(as_role, "SECRET"), *last])
    assert "SECRET" in found


def test_a_developer_is_the_system_of_templates_that_know_none():
    talk = [said("developer", "SECRET"), said("user", "Q")]
    for name in ("llama3", "gemma", "mistral_v7", "zephyr"):
        assert "SECRET" in shown(talk, name)
    assert shown(talk, "llama3") == shown([said("system", "SECRET"), *talk[1:]], "llama3")


@pytest.mark.parametrize("role", ["tool_call", "function_call"])
@pytest.mark.parametrize("content", [json.dumps(CALL), json.dumps([CALL])])
def test_a_call_in_a_message_of_its_own_is_a_call_of_the_assistant(role, content):
    plain = [said("user", "Q"), said("assistant", "", tool_calls=[CALL]), said("tool", "3")]
    assert shown([plain[0], said(role, content), said("tool_response", "3")]) == shown(plain)
    sharegpt = [{"from": "human", "value": "Q"}, {"from": role, "value": content}]
    assert shown([*sharegpt, {"from": "observation", "value": "3"}]) == shown(plain)


def test_calls_in_several_messages_are_calls_of_one_turn():
    other = {"name": "mul", "arguments": {"b": 2}}
    calls = [said("tool_call", json.dumps(one)) for one in (CALL, other)]
    together = said("assistant", "think", tool_calls=[CALL, other])
    expected = shown([said("user", "Q"), together])
    assert shown([said("user", "Q"), said("assistant", "think"), *calls]) == expected


def test_a_call_that_cannot_be_read_is_malformed():
    with pytest.raises(MalformedRow, match="content of 'tool_call' is no JSON"):
        shown([said("user", "Q"), said("tool_call", "add(1)")])
    with pytest.raises(MalformedRow, match="arguments of 'add' is no JSON"):
        call = {"function": {"name": "add", "arguments": "a=1"}}
        shown([said("user", "Q"), said("assistant", "", tool_calls=[call])])


def test_arguments_as_json_text_are_one_object():
    talk = [said("user", "Q")]
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    for calls in (
        [as_text],
        [json.dumps(CALL)],
        json.dumps([CALL]),
        [{**CALL, "arguments": '{"a": 1}'}],
    ):
        found = shown([*talk, said("assistant", "", tool_calls=calls)])
        assert '{"name": "add", "arguments": {"a": 1}}' in found
    twice = {"function": {"name": "add", "arguments": json.dumps('{"a": 1}')}}
    assert '"arguments": {"a": 1}' in shown([*talk, said("assistant", "", tool_calls=[twice])])
    none = {"function": {"name": "add", "arguments": ""}}
    assert '"arguments": {}' in shown([*talk, said("assistant", "", tool_calls=[none])])
    old = said("assistant", "", function_call={"name": "add", "arguments": '{"a": 1}'})
    assert '"arguments": {"a": 1}' in shown([*talk, old])


@pytest.mark.parametrize("name", ["parameters", "args", "input"])
def test_arguments_have_the_name_of_other_formats_too(name):
    for call in ({"name": "add", name: {"a": 1}}, {"function": {"name": "add", name: {"a": 1}}}):
        found = shown([said("user", "Q"), said("assistant", "", tool_calls=[call])])
        assert '{"name": "add", "arguments": {"a": 1}}' in found
    twice = [{**CALL, name: {"b": 2}}]
    with pytest.raises(MalformedRow, match=f"'arguments' and '{name}' name the arguments of one"):
        shown([said("user", "Q"), said("assistant", "", tool_calls=twice)])


def test_fields_of_calls_and_roles_that_no_format_has_are_told_once(caplog):
    calls = [{"note": "SECRET", "function": {**CALL, "strict": "SECRET"}}]
    talk = [said("asistant", "Q"), said("user", "Q"), said("assistant", "", tool_calls=calls)]
    encoder = ChatEncoder(DataConfig(), PUBLISHED["qwen2.5"].tokenizer())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            encoder.conversation(read_conversation(talk, "row 1"))
    role, *fields = caplog.messages
    assert role.startswith("row 1: the role 'asistant' has no known meaning")
    assert role.endswith("did you mean 'assistant'?")
    assert sorted(line.split("'")[1] for line in fields) == ["tool_calls.note", "tool_calls.strict"]
    # A template that writes the whole call loses nothing.
    whole = PUBLISHED["qwen2.5"].tokenizer()
    whole.chat_template = whole.chat_template.replace("f.arguments | tojson", "call | tojson")
    caplog.clear()
    encoder = ChatEncoder(DataConfig(), whole)
    encoder.conversation(read_conversation(talk[1:], "row 1"))
    assert not caplog.messages


@pytest.mark.parametrize("arguments", ["5", [1, 2], 0, False, '["a"]'])
def test_arguments_that_are_no_object_are_refused(arguments: object):
    call = {"function": {"name": "add", "arguments": arguments}}
    with pytest.raises(MalformedRow, match=r"arguments of 'add' are .*, not an object"):
        shown([said("user", "q"), said("assistant", "", tool_calls=[call])])


def test_a_template_that_joins_arguments_as_text_gets_text():
    template = PUBLISHED["qwen2.5"].template.replace(
        "{{ f.arguments | tojson }}", "{{ '' + f.arguments }}"
    )
    tokenizer = PUBLISHED["qwen2.5"].tokenizer()
    tokenizer.chat_template = template
    encoder = ChatEncoder(DataConfig(), tokenizer)
    record = read_conversation([said("user", "Q"), said("assistant", "", tool_calls=[CALL])], "row")
    found = encoder.render(encoder.conversation(record), "row")
    assert '"arguments": {"a": 1}' in encoder.unescape_special_tokens(found)


def test_results_follow_the_order_of_their_calls():
    calls = [{"id": i, "type": "function", "function": CALL} for i in "xyz"]
    talk = [said("user", "Q"), said("assistant", "", tool_calls=calls)]
    results = [said("tool", f"result {i}", tool_call_id=i) for i in "xyz"]
    for order in ([1, 0, 2], [2, 1, 0], [1, 0]):
        given_order = [results[k] for k in order]
        assert shown([*talk, *given_order]) == shown([*talk, *(results[k] for k in sorted(order))])
    # A result in its own place needs no id.
    nameless = said("tool", "result y")
    assert shown([*talk, results[0], nameless]) == shown([*talk, *results[:2]])
    numbered = [{**call, "id": k} for k, call in enumerate(calls)]
    by_text = [said("tool", f"result {i}", tool_call_id=str(k)) for k, i in enumerate("xyz")]
    found = shown([talk[0], said("assistant", "", tool_calls=numbered), *by_text[::-1]])
    assert found == shown([*talk, *results])


@pytest.mark.parametrize("ids", ["xw", "y", "yz", "xx", "-x", "w"])
def test_a_result_that_would_be_shown_as_that_of_another_call_is_refused(ids):
    calls = [{"id": i, "type": "function", "function": CALL} for i in "xyz"]
    talk = [said("user", "Q"), said("assistant", "", tool_calls=calls)]
    results = [said("tool", i, tool_call_id=None if i == "-" else i) for i in ids]
    given_ids = ", ".join(ids).replace("-", r"\(no id\)")
    problem = f"results of the calls {given_ids}, and the calls are x, y, z; write one result"
    with pytest.raises(MalformedRow, match=problem):
        shown([*talk, *results])


def test_results_without_ids_follow_the_names_of_tools_that_are_called_once():
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("add", "mul")]
    talk = [said("user", "Q"), said("assistant", "", tool_calls=calls)]
    results = [said("tool", "3", name="add"), said("tool", "2", name="mul")]
    assert shown([*talk, *results[::-1]]) == shown([*talk, *results])
    again = said("assistant", "", tool_calls=[calls[0]] * 2)
    kept = shown([talk[0], again, said("tool", "3", name="add"), said("tool", "4", name="add")])
    assert kept.index("3") < kept.index("4")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads_or_is_refused(field):
    talk = [said("user", "Q"), said("assistant", "A", **{field: "SECRET"})]
    for name in ("qwen3", "glm4.5", "harmony"):
        assert "SECRET" in shown(talk, name)
    with pytest.raises(
        MalformedRow, match=f"row 1: .* does not write '{field}' of role 'assistant'"
    ):
        shown(talk, "llama3")


def test_content_beside_calls_that_a_template_drops_is_refused():
    talk = [said("user", "Q"), said("assistant", "SECRET", tool_calls=[CALL])]
    assert "SECRET" in shown(talk, "qwen2.5")
    with pytest.raises(MalformedRow, match="'content' of role 'assistant' with tool_calls"):
        shown(talk, "llama3.1")
    with pytest.raises(MalformedRow, match="'tool_calls' of role 'assistant'"):
        shown([said("user", "Q"), said("assistant", "", tool_calls=[CALL])], "gemma")


def test_a_refusal_that_a_template_does_not_write_is_no_empty_response():
    talk = [said("user", "Q"), said("assistant", None, refusal="SECRET")]
    with pytest.raises(MalformedRow, match="does not write 'refusal' of role 'assistant'"):
        shown(talk, "qwen2.5")
    answered = [said("user", "Q"), said("assistant", "A", refusal=None)]
    assert "A" in shown(answered, "qwen2.5")


def test_other_fields_that_a_template_does_not_write_are_told_once(caplog):
    encoder = ChatEncoder(DataConfig(), PUBLISHED["qwen2.5"].tokenizer())
    record = read_conversation([said("user", "Q", name="SECRET")] * 2, "row 1")
    with caplog.at_level(logging.WARNING):
        encoder.conversation(record)
        encoder.conversation(record)
    (told,) = caplog.messages
    assert told.startswith("row 1: 'name' of messages of role 'user'")


@pytest.mark.parametrize("value", [0, False, 1, True])
def test_a_field_that_is_zero_or_false_is_told_too(caplog, value):
    encoder = ChatEncoder(DataConfig(), PUBLISHED["qwen2.5"].tokenizer())
    record = read_conversation([said("user", "Q"), said("assistant", "A", mask=value)], "row 1")
    with caplog.at_level(logging.WARNING):
        encoder.conversation(record)
    (told,) = caplog.messages
    assert told.startswith("row 1: 'mask' of messages of role 'assistant'")


TEXTS = st.text("abcdefgh ", min_size=1, max_size=8).map(lambda t: f"secret{t.strip()}x")
NAMES = st.sampled_from(["reasoning_content", "reasoning", "thinking", "name", "note"])
ASSISTANT = st.sampled_from(["assistant", "gpt", "model", "tool_call"])
RESULT = st.sampled_from(["tool", "observation", "function", "tool_response"])


@st.composite
def conversations(draw):
    """A conversation, and the texts that it carries."""
    texts, talk = [], []

    def text():
        texts.append(f"{draw(TEXTS)}{len(texts)}y")
        return texts[-1]

    if draw(st.booleans()):
        talk.append(said(draw(st.sampled_from(["system", "developer"])), text()))
    for _ in range(draw(st.integers(1, 3))):
        talk.append(said(draw(st.sampled_from(["user", "human"])), text()))
        role = draw(ASSISTANT)
        call = (
            {"name": text(), "arguments": {"a": text()}}
            if draw(st.booleans()) or role == "tool_call"
            else None
        )
        if role == "tool_call":
            talk.append(said(role, json.dumps(call)))
        else:
            answer = said(role, text() if call is None or draw(st.booleans()) else "")
            if call is not None:
                answer["tool_calls"] = [{"id": "abcdefghi", "type": "function", "function": call}]
            if draw(st.booleans()):
                answer[draw(NAMES)] = text()
            talk.append(answer)
        if call is not None:
            talk.append(said(draw(RESULT), text(), tool_call_id="abcdefghi"))
            talk.append(said("assistant", text()))
    return talk, texts


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=25, deadline=None)
@given(case=conversations())
def test_what_messages_carry_is_rendered_or_named(name, case):
    talk, texts = case
    encoder, told = ENCODERS[name], logging.getLogger("lightrft.datasets.conversations.messages")
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    encoder._fit._told.clear()
    encoder._fit._known.clear()
    told.addHandler(handler)
    try:
        record = read_conversation(talk, "row 1")
        found = encoder.render(encoder.conversation(record), "row 1")
    except MalformedRow as error:
        assert str(error).startswith("row 1")
        assert "role" in str(error)
        return
    finally:
        told.removeHandler(handler)
    unwritten = [
        m[k]
        for m in talk
        for k in ("name", "note")
        if any(f"{k!r} of" in w for w in warnings) and k in m
    ]
    for text in texts:
        assert text in found or text in unwritten or _is_earlier_reasoning(talk, text)


def _is_earlier_reasoning(talk, text):
    """True for reasoning of an earlier turn, which reasoning templates leave out."""
    return any(
        text == m.get(k) for m in talk[:-1] for k in ("thinking", "reasoning_content", "reasoning")
    )
