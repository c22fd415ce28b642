"""Fields of requests that are accepted, that are refused with their name, and that are unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from typing_extensions import is_typeddict

from lightrft.models.tiny.text import END, tiny_model, tiny_tokenizer
from lightrft.serving.chat.request_fields import CHAT, COMPLETIONS, MESSAGES
from tests.model_helpers import save_scripted_model
from tests.serving_helpers import judge_server, model_server, save_judge
from tests.unit.datasets.published_templates import PUBLISHED

ASK = [{"role": "user", "content": "1+1"}]
CHATS, TEXTS, OF_ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"
BODIES: dict[str, Any] = {
    CHATS: {"messages": ASK, "max_tokens": 2},
    TEXTS: {"prompt": "1+1=", "max_tokens": 2},
    OF_ANTHROPIC: {"messages": ASK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": ASK},
    "/tokenize": {"messages": ASK},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    with model_server(path, sampling={"max_new_tokens": 8}, name="tiny") as (url, _):
        yield url


def ask(url: str, path: str, fields: Any) -> httpx.Response:
    # infinity is no JSON, but Python's encoder writes it
    return httpx.post(url + path, content=json.dumps({**BODIES[path], **fields}))


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        (CHAT, chat_create_params.CompletionCreateParamsBase),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (MESSAGES, message_create_params.MessageCreateParamsBase),
    ],
    ids=["chat", "completions", "messages"],
)
def test_every_field_of_the_official_clients_is_known(fields, base):
    known = {*fields.read, *fields.unread, *fields.neutral}
    assert set(base.__annotations__) - known == set()
    assert len(known) == len(fields.read) + len(fields.unread) + len(fields.neutral)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHATS, {"logit_bias": {"5": 100}}),
        (CHATS, {"presence_penalty": 0.5}),
        (CHATS, {"frequency_penalty": -0.5}),
        (CHATS, {"ignore_eos": True}),
        (CHATS, {"chat_template": "{{ messages }}"}),
        (CHATS, {"first_token_temperature": 10.0}),
        (CHATS, {"reasoning_effort": "high"}),
        (CHATS, {"skip_special_tokens": False}),
        (CHATS, {"modalities": ["audio"]}),
        (CHATS, {"parallel_tool_calls": False}),
        (CHATS, {"guided_grammar": "x"}),
        (TEXTS, {"prompt_logprobs": 0}),
        (CHATS, {"thinking_token_budget": 0}),
        (TEXTS, {"best_of": 3}),
        (TEXTS, {"suffix": "="}),
        (TEXTS, {"logit_bias": {"5": 100}}),
        (TEXTS, {"add_special_tokens": False}),
        (OF_ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (OF_ANTHROPIC, {"mcp_servers": [{"name": "a"}]}),
        ("/v1/messages/count_tokens", {"thinking": {"type": "adaptive"}}),
        ("/tokenize", {"chat_template": "{{ messages }}"}),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(path, fields, url):
    (name,) = fields
    message = said(ask(url, path, fields))
    assert message.startswith(f"{name} = ") and "leave it out" in message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHATS, {"logit_bias": None, "presence_penalty": 0.0, "frequency_penalty": 0}),
        (CHATS, {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}),
        (CHATS, {"parallel_tool_calls": True, "cache_salt": "x", "request_id": "y"}),
        (CHATS, {"ignore_eos": False, "chat_template_kwargs": {}, "modalities": ["text"]}),
        (CHATS, {"add_generation_prompt": True, "skip_special_tokens": True}),
        (TEXTS, {"best_of": 1, "suffix": "", "logit_bias": {}, "n": 1, "stop": []}),
        (OF_ANTHROPIC, {"thinking": {"type": "disabled"}, "metadata": {"user_id": "1"}}),
        (OF_ANTHROPIC, {"stop_sequences": [], "output_config": {"effort": None}}),
        (OF_ANTHROPIC, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}),
        ("/tokenize", {"model": "tiny", "add_generation_prompt": True}),
        ("/detokenize", {"model": "tiny"}),
    ],
)
def test_fields_that_change_no_answer_are_accepted(path, fields, url):
    same = {"seed": 0} if path in (CHATS, TEXTS, OF_ANTHROPIC) else {}
    plain, full = ask(url, path, same), ask(url, path, {**same, **fields})
    assert full.status_code == 200, full.text
    for key in ("choices", "content", "tokens", "prompt"):
        assert plain.json().get(key) == full.json().get(key)


@pytest.mark.parametrize(
    ("path", "name", "near"),
    [
        (CHATS, "tempratur", "did you mean 'temperature'?"),
        (TEXTS, "stop_token_id", "did you mean 'stop_token_ids'?"),
        (OF_ANTHROPIC, "max_token", "did you mean 'max_tokens'?"),
        ("/v1/messages/count_tokens", "mesages", "did you mean 'messages'?"),
        ("/tokenize", "zzz", "leave it out"),
        ("/detokenize", "token", "did you mean 'tokens'?"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(path, name, near, url):
    message = said(ask(url, path, {name: 1}))
    assert message.startswith(f"unknown field {name!r}; ") and near in message


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHATS, {"max_tokens": 0}, "max_tokens = 0: it should be greater than or equal to 1"),
        (CHATS, {"temperature": -1}, "temperature = -1: it should be greater than or equal to 0"),
        (CHATS, {"temperature": float("inf")}, "temperature = inf: it should be a finite number"),
        (CHATS, {"temperature": float("nan")}, "temperature = nan: it should be"),
        (TEXTS, {"top_p": float("nan")}, "top_p = nan: it should be"),
        (TEXTS, {"min_p": float("nan")}, "min_p = nan: it should be"),
        (OF_ANTHROPIC, {"top_p": float("nan")}, "top_p = nan: it should be"),
        (CHATS, {"repetition_penalty": float("nan")}, "repetition_penalty = nan: it should be"),
        (CHATS, {"seed": float("nan")}, "seed = nan: it should be a whole number"),
        (CHATS, {"temperature": 10**400}, "temperature = 1000"),
        (CHATS, {"top_k": -2}, "top_k = -2: it should be greater than or equal to 0"),
        (CHATS, {"min_tokens": 9}, "min_tokens 9 is above max_tokens 2; raise the latter"),
        (CHATS, {"stop": ["a", ""]}, "stop.1 is an empty text"),
        (OF_ANTHROPIC, {"stop_sequences": [""]}, "stop_sequences.0 is an empty text"),
        (TEXTS, {"stop_token_ids": [10**6]}, "stop_token_ids has 1000000, and the largest"),
        (TEXTS, {"seeds": [1, 2], "n": 3}, "n = 3, and seeds has 2 numbers; leave out n"),
        (
            TEXTS,
            {"seeds": [1], "seed": 3},
            "seed = 3 has no effect next to seeds; send one of them",
        ),
        (
            CHATS,
            {"max_completion_tokens": 3},
            "max_tokens = 2 and max_completion_tokens = 3 are one setting; send one of them",
        ),
        (TEXTS, {"seed": 2**63}, "seed = 9223372036854775808 is no whole number from 0 to 92"),
        (TEXTS, {"response_tokens": 99}, "response_tokens = 99 is above the 4 tokens"),
        (CHATS, {"add_generation_prompt": False}, "add_generation_prompt = false needs"),
        (OF_ANTHROPIC, {"output_config": {"effort": "high"}}, "output_config.effort = 'high' is"),
        (OF_ANTHROPIC, {"output_format": {"type": "json_schema"}}, "output_config.format needs"),
        (
            OF_ANTHROPIC,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use = True is not supported",
        ),
        ("/tokenize", {"prompt": "1"}, "the request has a prompt and messages; give a prompt or"),
        ("/tokenize", {"add_special_tokens": True}, "add_special_tokens = True needs a prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens must be a list of token ids from 0 to"),
    ],
)
def test_a_wrong_value_is_refused_in_a_line_that_names_the_field(path, fields, expected, url):
    message = said(ask(url, path, fields))
    assert message.startswith(expected) and "\n" not in message and "pydantic" not in message


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHATS, {"stream": "yes"}, "stream = 'yes': it should be true or false or null"),
        (CHATS, {"stream": 1}, "stream = 1: it should be true or false or null"),
        (CHATS, {"n": "2"}, "n = '2': it should be a whole number or null"),
        (CHATS, {"n": True}, "n = True: it should be a whole number or null"),
        (CHATS, {"temperature": "0.5"}, "temperature = '0.5': it should be a number or null"),
        (CHATS, {"temperature": True}, "temperature = True: it should be a number or null"),
        (CHATS, {"max_tokens": 2.5}, "max_tokens = 2.5: it should be a whole number or null"),
        (CHATS, {"max_tokens": "2"}, "max_tokens = '2': it should be a whole number or null"),
        (CHATS, {"min_tokens": None}, "min_tokens = None: it should be a whole number"),
        (CHATS, {"logprobs": 1}, "logprobs = 1: it should be true or false or null"),
        (CHATS, {"stop": 5}, "stop = 5: it should be a text or a list or null"),
        (CHATS, {"stop": ["a", 5]}, "stop.1 = 5: it should be a text"),
        (CHATS, {"stop_token_ids": ["5"]}, "stop_token_ids.0 = '5': it should be a whole number"),
        (CHATS, {"stream_options": True}, "stream_options = True: it should be an object or null"),
        (CHATS, {"stream_options": {"include_usage": "no"}}, "stream_options.include_usage = 'no'"),
        (
            CHATS,
            {"stream_options": {"usage": True}},
            "unknown field 'usage' of stream_options; leave",
        ),
        (CHATS, {"chat_template_kwargs": []}, "chat_template_kwargs = []: it should be an object"),
        (CHATS, {"messages": "1+1"}, "messages = '1+1': it should be a list"),
        (CHATS, {"messages": [*ASK, "1+1"]}, "messages.1 = '1+1': it should be an object"),
        (CHATS, {"messages": [{**ASK[0], "tool_calls": 5}]}, "messages.0.tool_calls = 5: it"),
        (CHATS, {"messages": [{"role": 5, "content": "1"}]}, "messages, message 1: role is 5, not"),
        (
            CHATS,
            {"messages": [{"role": "user", "content": 5}]},
            "messages, message 1: content must",
        ),
        (
            "/tokenize",
            {"messages": [*ASK, {"role": True, "content": "1"}]},
            "messages, message 2: role is True, not a text",
        ),
        (CHATS, {"tools": {"type": "function"}}, "tools = {'type': 'function'}: it should be a"),
        (CHATS, {"add_generation_prompt": "no"}, "add_generation_prompt = 'no': it should be true"),
        (CHATS, {"continue_final_message": 1}, "continue_final_message = 1: it should be true or"),
        (CHATS, {"return_token_ids": "no"}, "return_token_ids = 'no': it should be true or false"),
        (CHATS, {"response_format": "json"}, "response_format = 'json': it should be an object or"),
        (
            CHATS,
            {"response_format": {"type": "json_object", "schema": {}}},
            "unknown field 'schema' of response_format; did you mean 'json_schema'?",
        ),
        (CHATS, {"structured_outputs": "json"}, "structured_outputs = 'json': it should be an"),
        (CHATS, {"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object = 1:"),
        (
            CHATS,
            {"structured_outputs": {"grammar": "x"}},
            "structured_outputs.grammar = 'x' is not",
        ),
        (CHATS, {"guided_choice": 3}, "guided_choice = 3: it should be a list or null"),
        (CHATS, {"best_of": True}, "best_of = True is not supported"),
        (TEXTS, {"prompt": 5}, "prompt = 5: it should be a text or a list"),
        (TEXTS, {"echo": "no"}, "echo = 'no': it should be true or false or null"),
        (TEXTS, {"logprobs": True}, "logprobs = True: it should be a whole number or null"),
        (TEXTS, {"seed": 1.5}, "seed = 1.5: it should be a whole number or null"),
        (TEXTS, {"seeds": [1, "2"]}, "seeds.1 = '2': it should be a whole number"),
        (TEXTS, {"seeds": 5}, "seeds = 5: it should be a list or null"),
        (TEXTS, {"media": {}}, "media = {}: it should be a text or null"),
        (OF_ANTHROPIC, {"stream": "yes"}, "stream = 'yes': it should be true or false"),
        (OF_ANTHROPIC, {"temperature": None}, "temperature = None: it should be a number"),
        (OF_ANTHROPIC, {"stop_sequences": "a"}, "stop_sequences = 'a': it should be a list"),
        (OF_ANTHROPIC, {"system": 5}, "system = 5: it should be a text or a list"),
        (OF_ANTHROPIC, {"tools": "add"}, "tools = 'add': it should be a list"),
        (OF_ANTHROPIC, {"tool_choice": "auto"}, "tool_choice = 'auto': it should be an object"),
        (OF_ANTHROPIC, {"output_config": "json"}, "output_config = 'json': it should be an object"),
        ("/tokenize", {"add_special_tokens": "no"}, "add_special_tokens = 'no': it should be true"),
        ("/detokenize", {"tokens": "a"}, "tokens = 'a': it should be a list"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_types_that_are_expected(
    path, fields, expected, url
):
    message = said(ask(url, path, fields))
    assert message.startswith(expected) and "\n" not in message


def test_a_whole_number_may_be_written_with_a_decimal_point(url):
    fields = {"max_tokens": 3.0, "n": 2.0, "seed": 4.0, "stop_token_ids": [7.0]}
    whole = {name: [7] if name == "stop_token_ids" else int(v) for name, v in fields.items()}
    answers = [ask(url, TEXTS, one).json()["choices"] for one in (fields, whole)]
    assert answers[0] == answers[1] and len(answers[0]) == 2
    seeds = [ask(url, TEXTS, {"seeds": one}).json()["choices"] for one in ([1.0, 2.0], [1, 2])]
    assert seeds[0] == seeds[1]


EXAMPLES: dict[Any, Any] = {str: "a", int: 1, float: 0.5, bool: True, None: None, type(None): None}


def examples_of(hint: Any) -> list[Any]:
    """A value of each type that ``hint`` of an official client allows."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [example for one in inside for example in examples_of(one)]
    if origin is Literal:
        return list(inside)
    if origin in (Required, NotRequired, Annotated):
        return examples_of(inside[0])
    if is_typeddict(hint) or origin is dict:
        return [{}]
    if hint in EXAMPLES:
        return [EXAMPLES[hint]]
    return [[], *([one] for one in examples_of(inside[0]))]


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        (CHAT, chat_create_params.CompletionCreateParamsBase),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase),
        (MESSAGES, message_create_params.MessageCreateParamsBase),
        (MESSAGES, message_count_tokens_params.MessageCountTokensParams),
    ],
    ids=["chat", "completions", "messages", "count_tokens"],
)
def test_every_type_that_the_official_clients_may_send_is_accepted(fields, base):
    checked = 0
    for name, hint in get_type_hints(base).items():
        for example in examples_of(hint) if name in fields.read else ():
            # null stands for the beginning of a document there
            if (name, example) != ("prompt", None):
                fields.check({name: example})
                checked += 1
    assert checked > len(fields.read) // 2


def test_every_address_that_takes_a_request_checks_its_fields(tmp_path):
    tokenizer = tiny_tokenizer()
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokens").write_text("trainer\n")
    with (
        model_server(tmp_path, weights_token_file=str(tmp_path / "tokens")) as (_, generating),
        judge_server(save_judge(tmp_path / "judge")) as (_, scoring),
    ):
        endpoints = [*generating.service.endpoints(), *scoring.service.endpoints()]
    taking = [endpoint for endpoint in endpoints if endpoint.method == "POST"]
    assert len(taking) == 14
    assert [endpoint.paths for endpoint in taking if endpoint.fields is None] == []


TOOL = {"name": "add", "input_schema": {"type": "object"}}
TOOL_OF = {OF_ANTHROPIC: TOOL, CHATS: {"function": {"name": "sub", "strict": False}}}


@pytest.mark.parametrize(
    ("path", "tool", "expected"),
    [
        (
            OF_ANTHROPIC,
            {"type": "web_search_20250305", "name": "web_search"},
            "tools.1.type = 'web",
        ),
        (OF_ANTHROPIC, {**TOOL, "strict": True}, "tools.1.strict = True is not supported"),
        (OF_ANTHROPIC, {**TOOL, "input_schema": "{}"}, "tools.1.input_schema = '{}': it should be"),
        (
            CHATS,
            {"type": "function", "function": {"name": "add", "strict": True}},
            "tools.1.function.strict = True is not supported",
        ),
    ],
)
def test_a_tool_that_asks_for_more_than_calls_in_the_text_is_refused(path, tool, expected, url):
    assert said(ask(url, path, {"tools": [TOOL_OF[path], tool]})).startswith(expected)


def test_messages_that_end_with_the_assistant_are_continued_as_anthropic_does_it(url):
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    body = {"messages": begun, "return_token_ids": True, "temperature": 0.0}
    found = ask(url, OF_ANTHROPIC, body).json()
    continued = ask(url, CHATS, {**body, "continue_final_message": True}).json()
    assert found["token_ids"] == continued["choices"][0]["token_ids"]
    counted = ask(url, "/v1/messages/count_tokens", {"messages": begun}).json()["input_tokens"]
    asked_again = ask(url, CHATS, body).json()["usage"]["prompt_tokens"]
    assert counted == continued["usage"]["prompt_tokens"] < asked_again


def test_a_call_of_a_tool_cannot_be_continued(url):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    begun = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    refused = said(ask(url, CHATS, {"messages": begun, "continue_final_message": True}))
    assert "cannot be continued" in refused
    of_anthropic = [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "name": "add"}]}]
    assert "cannot be continued" in said(ask(url, OF_ANTHROPIC, {"messages": of_anthropic}))


def test_two_names_of_one_setting_may_have_one_value(url):
    assert ask(url, CHATS, {"max_completion_tokens": 2, "seed": None}).status_code == 200


def test_as_many_seeds_as_answers_are_accepted(url):
    assert len(ask(url, TEXTS, {"seeds": [1, 2], "n": 2}).json()["choices"]) == 2


@pytest.mark.parametrize("path", [CHATS, TEXTS, OF_ANTHROPIC])
def test_requests_without_a_seed_differ_and_each_answer_has_the_seed_that_repeats_it(path, url):
    def shown(answer: Any) -> Any:
        tree = answer.json()
        return [tree.get("choices"), tree.get("content")]

    first, second = (ask(url, path, {"max_tokens": 8, "temperature": 1.0}) for _ in range(2))
    assert first.json()["seed"] != second.json()["seed"] and shown(first) != shown(second)
    again = {"max_tokens": 8, "temperature": 1.0, "seed": first.json()["seed"]}
    assert shown(ask(url, path, again)) == shown(first)


@pytest.mark.parametrize("path", [CHATS, TEXTS, OF_ANTHROPIC])
def test_minus_one_keeps_all_tokens_as_in_vllm(path, url):
    found = [ask(url, path, {"seed": 3, "top_k": k}).json() for k in (-1, 0)]
    assert found[0].get("choices") == found[1].get("choices")
    assert found[0].get("content") == found[1].get("content")


@pytest.fixture(scope="module")
def plain_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model that writes ``<|im_end|>`` after ``ok``, which its chat template ends no turn with."""
    tokenizer = PUBLISHED["alpaca"].tokenizer()
    script = {"=": "o", "\n": "o", "o": "k", "k": END}
    folder = save_scripted_model(tmp_path_factory.mktemp("plain"), script, tokenizer)
    with model_server(folder, sampling={"max_new_tokens": 8}) as (url, _):
        yield url


@pytest.mark.parametrize("path", [CHATS, TEXTS, OF_ANTHROPIC])
def test_a_special_token_as_a_stop_string_ends_the_answer(path, plain_url):
    stop = "stop_sequences" if path == OF_ANTHROPIC else "stop"
    fields = {"max_tokens": 8, "temperature": 0.0, "return_token_ids": True}

    def answer(**more: Any) -> tuple[str, int, Any]:
        found = ask(plain_url, path, {**fields, **more}).json()
        if path == OF_ANTHROPIC:
            end = found["stop_reason"], found["stop_sequence"]
            return found["content"][0]["text"], len(found["token_ids"]), end
        [choice] = found["choices"]
        text = choice["text"] if path == TEXTS else choice["message"]["content"]
        return text, len(choice["token_ids"]), choice["finish_reason"]

    by_length, by_stop = "length", "stop"
    if path == OF_ANTHROPIC:
        by_length, by_stop = ("max_tokens", None), ("stop_sequence", END)
    assert answer() == ("ok.....", 8, by_length)
    assert answer(**{stop: ["none", END]}) == ("ok", 3, by_stop)
