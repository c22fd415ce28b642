"""The form that a request asks its response to have, in the fields of OpenAI, Anthropic and vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.serving.chat.response_format import read_constraint
from lightrft.serving.problems import HTTPProblem
from lightrft.utils.errors import ConfigError
from tests.serving_helpers import model_server

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
ASK: Any = [{"role": "user", "content": "1+1"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CLOSED}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("model"), tiny_tokenizer()
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with model_server(folder, sampling={"max_new_tokens": 200}, name="tiny") as (url, _):
        yield url


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"json": None}}, None),
        ({"guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": FORMAT}, {"json_schema": CLOSED}),
        ({"structured_outputs": {"json": CLOSED}}, {"json_schema": CLOSED}),
        ({"structured_outputs": {"json": json.dumps(CLOSED)}}, {"json_schema": CLOSED}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choices": ("a", "b")}),
        ({"guided_json": CLOSED}, {"json_schema": CLOSED}),
    ],
)
def test_every_field_gives_its_constraint(body: Any, expected: Any) -> None:
    found = read_constraint(body)
    assert (None if found is None else found.constraint.model_dump(exclude_none=True)) == expected


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": {"type": "yaml"}}, "use text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "with a schema"),
        ({"response_format": {**FORMAT, "type": "json_object"}}, "json_schema needs type = json_s"),
        ({"guided_regex": "a", "response_format": FORMAT}, "two fields"),
        ({"guided_choice": []}, "allows no response"),
        ({"guided_json": "{"}, "guided_json = '{': json_schema is not JSON"),
        ({"output_config.format": {"type": "json_schema"}}, "output_config.format needs a schema"),
    ],
)
def test_a_form_that_is_malformed_or_unknown_is_named(body: Any, said: str) -> None:
    with pytest.raises(HTTPProblem, match=said):
        read_constraint(body)


def test_clients_of_every_api_get_the_form_that_they_ask_for(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    given: Any = {"model": "tiny", "messages": ASK, "temperature": 1.0}
    for seed in range(4):
        answer = client.chat.completions.create(**given, seed=seed, response_format=FORMAT)
        assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
    extra = {"structured_outputs": {"choice": ["left", "right"]}, "return_token_ids": True}
    answer = client.chat.completions.create(**given, n=6, extra_body=extra)
    assert {choice.message.content for choice in answer.choices} <= {"left", "right"}
    text = client.completions.create(
        model="tiny", prompt="1+1=", extra_body={"guided_regex": "[0-9]{3}"}
    )
    assert re.fullmatch("[0-9]{3}", text.choices[0].text)
    chunks = client.chat.completions.create(
        **given, stream=True, extra_body={"guided_regex": "[xyz]{5}"}
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert re.fullmatch("[xyz]{5}", streamed)
    body = {
        "max_tokens": 200,
        "messages": ASK,
        "output_config": {"format": {"type": "json_schema", "schema": CLOSED}},
    }
    message = httpx.post(f"{url}/v1/messages", json=body).json()
    assert set(json.loads(message["content"][0]["text"])) == {"ok"}


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        {"guided_whitespace_pattern": " "},
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_with_its_field(url: str, fields: Any) -> None:
    body = {"messages": ASK, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    (field,) = fields
    said = answer.json()["error"]["message"]
    assert said.startswith(field) and "not supported" in said


@pytest.mark.parametrize(
    ("constraint", "said"),
    [({"column": "form"}, "no request has columns"), ({"regex": "("}, "regex is not supported")],
)
def test_a_server_whose_own_form_cannot_be_followed_does_not_start(
    folder: Path, constraint: Any, said: str
) -> None:
    with (
        pytest.raises(ConfigError, match=said),
        model_server(folder, sampling={"constraint": constraint}, name="tiny"),
    ):
        pass
