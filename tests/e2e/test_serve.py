"""``lightrft serve`` under the official clients, from the command line, with wrong settings and wrong requests."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightrft.cli.main import main
from lightrft.models.tiny.text import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.serving_helpers import free_port, model_server, serve_process, wait_for

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASK: Any = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + CHAT_TEMPLATE
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with model_server(folder, sampling={"max_new_tokens": 12}, name="tiny") as (url, _):
        yield url


def test_the_client_of_openai_reads_every_kind_of_answer(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("path/of/another")
    given: Any = {"model": "tiny", "messages": ASK, "seed": 4, "temperature": 0.7}
    whole = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0
    chunks = list(
        client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    )
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    # all but the last token of the prompt were computed for the first request
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    extra = client.chat.completions.create(**given, extra_body={"return_token_ids": True})
    choice: Any = extra.choices[0]
    assert len(choice.token_ids) == len(choice.sampled_logprobs) == whole.usage.completion_tokens
    text = client.completions.create(model="tiny", prompt="1+1=", max_tokens=4, logprobs=1)
    assert len(text.choices[0].logprobs.token_logprobs) == text.usage.completion_tokens
    client.chat.completions.create(**given, tools=[TOOL])
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**given, tools=[TOOL], tool_choice="required")


def test_the_client_of_anthropic_reads_every_kind_of_answer(url):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    given: Any = {
        "model": "tiny",
        "messages": ASK,
        "max_tokens": 8,
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**given, system="short")
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**given, system="short") as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        last = stream.get_final_message()
    assert (last.content[0].text, last.usage.output_tokens) == (
        whole.content[0].text,
        whole.usage.output_tokens,
    )
    tokens = client.messages.count_tokens(model="tiny", messages=ASK, system="short").input_tokens
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == tokens
    # all but the last token of the prompt were computed for the first request
    assert (last.usage.input_tokens, last.usage.cache_read_input_tokens) == (1, tokens - 1)
    word = whole.content[0].text[1:3]
    cut: Any = {**given, "system": "short", "stop_sequences": ["none", word]}
    ended = client.messages.create(**cut)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", word)
    assert word not in ended.content[0].text
    with client.messages.stream(**cut) as stream:
        assert stream.get_final_message().stop_sequence == word
    tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    with client.messages.stream(**given, tools=tools) as stream:
        assert stream.get_final_message().stop_reason is not None
    assert client.messages.count_tokens(model="tiny", messages=ASK).input_tokens > 3
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.effort") as refused:
        client.messages.create(**given, output_config={"effort": "high"})
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_a_called_tool_reaches_the_clients_as_a_call(url, monkeypatch):
    from lightrft.types import Rollout

    text = "Yes. " + json.dumps({"name": "add", "arguments": {"a": 1}}).join(
        ["<tool_call>", "</tool_call>"]
    )
    monkeypatch.setattr(
        Rollout, "text", property(lambda self: text, lambda self, value: None), raising=False
    )
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    given: Any = {"model": "tiny", "messages": ASK, "tools": [TOOL]}
    choice = client.chat.completions.create(**given).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Yes.")
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    chunks = list(client.chat.completions.create(**given, stream=True))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert [c.function.name for c in calls] == ["add"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    other = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    with other.messages.stream(model="tiny", messages=ASK, max_tokens=8, tools=tools) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    assert (message.content[0].text, message.content[1].input) == ("Yes.", {"a": 1})


def test_a_token_of_either_header_is_needed(folder, tmp_path):
    (tmp_path / "tokens").write_text("secret\n")
    with model_server(folder, http={"token_file": str(tmp_path / "tokens")}) as (url, _):
        body = {"model": "x", "messages": ASK, "max_tokens": 2}
        assert httpx.post(f"{url}/v1/messages", json=body).status_code == 401
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            assert httpx.post(f"{url}/v1/messages", json=body, headers=headers).status_code == 200
        wrong = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "other"})
        assert wrong.status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_stopped_server_finishes_what_it_has_accepted(folder, started):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = serve_process(folder, port, "http.drain_seconds=300", verb="serve")
    started.append(process)
    wait_for(url)
    body = {"prompt": "1+1=", "max_tokens": 200, "min_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(300) == 0


def test_wrong_settings_are_refused_before_the_server_listens(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, said in (
            ([str(folder), f"http.port={port}", "device=cpu"], f"http.port = {port}"),
            ([str(folder), "engine.kind=vllm"], "engine.kind = vllm"),
            (["no/such/folder"], "no/such/folder"),
        ):
            assert main(["serve", *words]) == 2
            assert said in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "serve-rm"])
def test_a_port_in_use_is_refused_before_the_model_is_read(verb, tmp_path, capsys):
    tiny_tokenizer().save_pretrained(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # the folder holds no model, which is not noticed
        assert main([verb, str(tmp_path), f"http.port={port}", "device=cpu"]) == 2
    assert f"http.port = {port}" in capsys.readouterr().err
