"""Fields of requests that are accepted, that are refused with their name, and that are unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.serving.chat.request_fields import CHAT, COMPLETIONS, MESSAGES
from tests.serving_helpers import model_server

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
    return httpx.post(url + path, content=json.dumps({**BODIES[path], **fields}), timeout=60)


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
        (CHATS, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHATS, {"first_token_temperature": 10.0}),
        (CHATS, {"reasoning_effort": "high"}),
        (CHATS, {"skip_special_tokens": False}),
        (CHATS, {"modalities": ["audio"]}),
        (CHATS, {"guided_grammar": "x"}),
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
        (CHATS, {"parallel_tool_calls": False, "cache_salt": "x", "request_id": "y"}),
        (CHATS, {"ignore_eos": False, "chat_template_kwargs": {}, "modalities": ["text"]}),
        (CHATS, {"add_generation_prompt": True, "skip_special_tokens": True}),
        (TEXTS, {"best_of": 1, "suffix": "", "logit_bias": {}, "n": 1, "stop": []}),
        (OF_ANTHROPIC, {"thinking": {"type": "disabled"}, "metadata": {"user_id": "1"}}),
        (OF_ANTHROPIC, {"stop_sequences": [], "output_config": {"effort": None}}),
        ("/tokenize", {"model": "tiny", "add_generation_prompt": True}),
        ("/detokenize", {"model": "tiny"}),
    ],
)
def test_fields_that_change_no_answer_are_accepted(path, fields, url):
    plain, full = ask(url, path, {}), ask(url, path, fields)
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
        (CHATS, {"max_completion_tokens": "x"}, "max_completion_tokens = 'x': it should be"),
        (CHATS, {"temperature": -1}, "temperature = -1: it should be greater than or equal to 0"),
        (CHATS, {"temperature": True}, "temperature = True is no number"),
        (CHATS, {"temperature": float("inf")}, "temperature = inf: it should be a finite number"),
        (CHATS, {"min_tokens": 9}, "min_tokens 9 is above max_tokens 2; raise the latter"),
        (CHATS, {"stop": ["a", ""]}, "stop.1 is an empty text"),
        (CHATS, {"stop": [5]}, "stop.0 = 5: it should be a valid string"),
        (OF_ANTHROPIC, {"stop_sequences": [""]}, "stop_sequences.0 is an empty text"),
        (TEXTS, {"stop_token_ids": [10**6]}, "stop_token_ids has 1000000, and the largest"),
        (TEXTS, {"seeds": [1, 2], "n": 3}, "n = 3, and seeds has 2 numbers; leave out n"),
        (TEXTS, {"seed": 2**63}, "seed = 9223372036854775808 is no whole number from 0 to 92"),
        (TEXTS, {"seed": 1.5}, "seed = 1.5 is no whole number from 0 to 9223372036854775807"),
        (TEXTS, {"response_tokens": 99}, "response_tokens = 99 is above the 4 tokens"),
        (CHATS, {"add_generation_prompt": False}, "add_generation_prompt = false needs"),
        (OF_ANTHROPIC, {"output_config": {"effort": "high"}}, "output_config.effort is not"),
        (OF_ANTHROPIC, {"output_format": {"type": "json_schema"}}, "output_config.format needs"),
        ("/detokenize", {"tokens": [10**6]}, "tokens must be a list of token ids from 0 to"),
        ("/detokenize", {"tokens": "a"}, "tokens must be a list of token ids from 0 to"),
    ],
)
def test_a_wrong_value_is_refused_in_a_line_that_names_the_field(path, fields, expected, url):
    message = said(ask(url, path, fields))
    assert message.startswith(expected) and "\n" not in message and "pydantic" not in message


def test_as_many_seeds_as_answers_are_accepted(url):
    assert len(ask(url, TEXTS, {"seeds": [1, 2], "n": 2}).json()["choices"]) == 2
