"""Arguments of the chat template in requests: followed, and refused with their name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lightrft.models.tiny.text import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from lightrft.utils.chat_template import names_read
from tests.serving_helpers import model_server

TEMPLATE = (
    CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{{ mood }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if bos_token %}{{ bos_token }}{% endif %}{% if strftime_now is defined %}{% endif %}"
)
ASK: Any = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def url(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    with model_server(path, sampling={"max_new_tokens": 8}, name="tiny") as (url, _):
        yield url


def tokens(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/tokenize", json={"messages": ASK, **body})


@pytest.mark.parametrize("given", [{}, {"enable_thinking": False}, {"mood": "calm"}])
def test_every_address_that_takes_messages_gives_the_arguments_to_the_template(
    given, url, tokenizer
):
    text = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True, **given)
    expected = tokenizer(text)["input_ids"]
    extra = {"chat_template_kwargs": given}
    assert tokens(url, **extra).json()["tokens"] == expected
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer: Any = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=1, extra_body={**extra, "return_token_ids": True}
    )
    assert answer.prompt_token_ids == expected
    for path, key in (("/count_tokens", "input_tokens"), ("", "usage")):
        body = {"messages": ASK, "max_tokens": 1, **extra}
        found = httpx.post(f"{url}/v1/messages{path}", json=body).json()[key]
        if key == "usage":
            found = found["input_tokens"] + found["cache_read_input_tokens"]
        assert found == len(expected)


def test_a_special_token_that_an_argument_spells_is_text(url, tokenizer):
    end = tokenizer.eos_token_id
    plain = tokens(url).json()["tokens"]
    found = tokens(url, chat_template_kwargs={"mood": "a<|im_end|>b"}).json()["tokens"]
    assert found.count(end) == plain.count(end)
    assert len(found) == len(plain) + len("a<|im_end|>b")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"enable_thinkin": False},
            "'enable_thinkin'; it reads enable_thinking, mood; did you mean 'enable_thinking'?",
        ),
        (
            {"zzz": 1},
            "chat_template_kwargs: the chat template does not read 'zzz'; it reads enable_thinking, mood",
        ),
        ({"zzz": None}, "chat_template_kwargs: the chat template does not read 'zzz'"),
        ({"messages": []}, "chat_template_kwargs.messages is set by lightrft"),
        ({"tools": []}, "chat_template_kwargs.tools is set by lightrft"),
        ({"tokenize": False}, "chat_template_kwargs.tokenize is set by lightrft"),
        ({"return_tensors": "pt"}, "chat_template_kwargs.return_tensors is set by lightrft"),
        ({"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt is set"),
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template is set by lightrft"),
        ({"bos_token": "x"}, "chat_template_kwargs.bos_token is set by lightrft"),
        ({"strftime_now": "x"}, "chat_template_kwargs.strftime_now is set by lightrft"),
    ],
)
def test_an_argument_that_would_be_ignored_or_that_the_server_sets_is_refused(given, said, url):
    answer = tokens(url, chat_template_kwargs=given)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_an_argument_of_a_wrong_type_for_the_template_is_refused(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE + "{{ mood + 'x' if mood }}")
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with model_server(tmp_path) as (url, _):
        assert tokens(url, chat_template_kwargs={"mood": "calm"}).status_code == 200
        answer = tokens(url, chat_template_kwargs={"mood": 5})
        assert answer.status_code == 400 and "chat template" in answer.text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, {"messages", "add_generation_prompt"}),
        ("{% set x = x if x is defined else 1 %}{{ x }}", {"x"}),
        ("{% set y = 1 %}{{ y }}{% for z in a %}{{ z }}{% break %}{% endfor %}", {"a"}),
        ("{%- generation -%}{{ b }}{%- endgeneration %}", {"b"}),
        ("{% macro m(c) %}{{ c }}{{ d | default('') }}{% endmacro %}{{ m(1) }}", {"d"}),
        ("{% set n = namespace(k=e) %}{{ n.k }}", {"e"}),
    ],
)
def test_the_names_that_a_template_reads_are_those_that_it_does_not_set(template, expected):
    assert names_read(template) == expected
