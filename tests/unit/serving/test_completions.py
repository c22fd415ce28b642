"""Completions of texts and tokens, with log-probs of given tokens, against plain forward passes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.engines.native import GenerationBatch
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from tests.serving_helpers import model_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with model_server(folder, sampling={"max_new_tokens": 12}) as (url, _):
        yield url


def ask(url: str, path: str = "/v1/completions", **body: Any) -> Any:
    answer = httpx.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def logprobs_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """``[n, V]`` of the tokens after each of ``ids``, at temperature 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_the_tokens_of_greedy_completions_are_the_likeliest(url, folder):
    [choice] = ask(url, prompt="1+1=", temperature=0, return_token_ids=True)["choices"]
    asked, made = choice["prompt_token_ids"], choice["token_ids"]
    found = logprobs_of(folder, [*asked, *made])[len(asked) - 1 : -1]
    assert made == found.argmax(-1).tolist()
    assert choice["sampled_logprobs"] == pytest.approx(found.amax(-1).tolist(), abs=1e-5)
    assert choice["policy_version"] == 0
    assert ask(url, prompt=asked, temperature=0)["choices"][0]["text"] == choice["text"]


def test_sampled_logprobs_are_of_the_distribution_after_temperature_and_filters(url, folder):
    given = {"temperature": 0.5, "top_k": 3, "seed": 7, "return_token_ids": True}
    [choice] = ask(url, prompt="2+2=", **given)["choices"]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    logits = logprobs_of(folder, ids)[len(choice["prompt_token_ids"]) - 1 : -1] / 0.5
    kth = logits.topk(3).values[:, -1:]
    kept = logits.masked_fill(logits < kth, -torch.inf).log_softmax(-1)
    expected = kept.gather(-1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
    assert choice["sampled_logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("length", [0, 1])
def test_echoed_log_probs_are_those_of_the_given_tokens(length, url, folder):
    ids = AutoTokenizer.from_pretrained(folder)("3+4=7, 5+5=")["input_ids"]
    answer = ask(url, prompt=[ids], echo=True, logprobs=1, max_tokens=length, temperature=0)
    [choice] = answer["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(ids) + length
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    table = logprobs_of(folder, ids)
    expected = table[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    given = found["token_logprobs"][1 : len(ids)]
    assert given == pytest.approx(expected.tolist(), abs=1e-5)
    best = [max(row.values()) for row in found["top_logprobs"][1 : len(ids)]]
    assert best == pytest.approx(table[:-1].amax(-1).tolist(), abs=1e-5)
    assert answer["usage"]["completion_tokens"] == length


def test_several_prompts_get_their_answers_in_order(url):
    texts = ["1+1=", "22+3=", "4="]
    many = ask(url, prompt=texts, n=2, temperature=1, seed=5)["choices"]
    assert [choice["index"] for choice in many] == list(range(6))
    for k, text in enumerate(texts):
        alone = ask(url, prompt=text, n=1, temperature=0)["choices"][0]["text"]
        together = ask(url, prompt=texts, temperature=0)["choices"][k]["text"]
        assert together == alone


def test_the_pieces_of_a_streamed_completion_make_the_whole(url):
    given = {"prompt": ["1+1=", "7-2="], "temperature": 1, "seed": 3}
    expected = [choice["text"] for choice in ask(url, **given)["choices"]]
    texts, ends = ["", ""], {}
    with httpx.stream("POST", f"{url}/v1/completions", json={**given, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
                    ends[choice["index"]] = choice["finish_reason"]
    assert texts == expected
    assert set(ends.values()) <= {"stop", "length"} and len(ends) == 2


def test_requests_that_come_while_others_generate_get_the_same_answers(url):
    texts = [f"{k}+{k}=" for k in range(8)]
    settings = [{"temperature": 0.5 + k % 6 / 10, "seed": k} for k in range(8)]
    alone = [ask(url, prompt=t, **s)["choices"][0]["text"] for t, s in zip(texts, settings)]
    found: dict[int, str] = {}

    def one(k: int) -> None:
        found[k] = ask(url, prompt=texts[k], **settings[k])["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[k] for k in range(8)] == alone


def test_a_request_that_cannot_begin_fails_and_no_other_does(folder, monkeypatch):
    add = GenerationBatch.add

    def fail(self: GenerationBatch, requests: Any) -> None:
        if any(request.max_new_tokens == 3 for request in requests):
            raise RuntimeError("no room on the device")
        add(self, requests)

    monkeypatch.setattr(GenerationBatch, "add", fail)
    with model_server(folder) as (url, _):
        for temperature in (1.0, 0.5):
            body = {"prompt": "1+1=", "max_tokens": 3, "temperature": temperature}
            answer = httpx.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 500
            assert "no room on the device" in answer.json()["error"]["message"]
            assert ask(url, **{**body, "max_tokens": 2})["choices"]
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_server_whose_generation_has_ended_refuses_requests_and_says_so(folder, monkeypatch):
    def end(*args: Any) -> Any:
        raise SystemExit("the device is lost")

    monkeypatch.setattr(GenerationBatch, "advance", end)
    with model_server(folder) as (url, _):
        assert httpx.get(f"{url}/health").status_code == 200
        for _ in range(2):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "1"})
            assert answer.status_code == 503 and "the device is lost" in answer.text
        answer = httpx.get(f"{url}/health")
        assert answer.status_code == 503 and "restart it" in answer.text


def test_tokenize_and_detokenize_are_inverse(url):
    found = ask(url, "/tokenize", prompt="12+3=15")
    assert found["count"] == len(found["tokens"])
    assert ask(url, "/detokenize", tokens=found["tokens"])["prompt"] == "12+3=15"
    chat = ask(url, "/tokenize", messages=[{"role": "user", "content": "12+3"}])
    assert chat["count"] > len("12+3")


def test_tokenize_and_models_report_the_same_limit(folder):
    with model_server(folder, engine={"max_cache_tokens": 64}) as (url, _):
        model = httpx.get(url + "/v1/models").json()["data"][0]
        assert ask(url, "/tokenize", prompt="1")["max_model_len"] == model["max_model_len"] == 64


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {}, "prompt must be a text"),
        ("/v1/completions", {"prompt": [[10**6]]}, "token ids from 0"),
        ("/v1/completions", {"prompt": ["a"] * 1025}, "1024 at most"),
        ("/v1/completions", {"prompt": "a", "stream": True, "logprobs": 1}, "leave out stream"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens = 0: it should be"),
        ("/v1/completions", {"prompt": "a" * 100_000}, "leave no room"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, "stop.0 is an empty text"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [2**63]}, "stop_token_ids.0"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids.0"),
        ("/v1/completions", {"prompt": []}, "prompt must be a text"),
        ("/tokenize", {}, "give a text as prompt, or messages"),
    ],
)
def test_malformed_requests_are_refused_with_the_field(path, body, said, url):
    answer = httpx.post(url + path, json=body)
    assert answer.status_code == 400 and said in answer.text, answer.text


def test_every_row_of_the_model_is_a_token_id_and_not_only_those_of_the_tokenizer(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer) + 7
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=rows).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = [5, rows - 1, len(tokenizer)]
    with model_server(tmp_path, sampling={"max_new_tokens": 3}) as (url, _):
        body = {
            "prompt": ids,
            "temperature": 0,
            "return_token_ids": True,
            "stop_token_ids": [rows - 2],
        }
        answer = ask(url, **body, logprobs=2, echo=True)
        [choice] = answer["choices"]
        assert choice["prompt_token_ids"] == ids
        found = logprobs_of(tmp_path, [*ids, *choice["token_ids"]])
        expected = [float(found[k, id]) for k, id in enumerate([*ids, *choice["token_ids"]][1:])]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
        ask(url, "/detokenize", tokens=ids)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": [rows]})
        assert refused.status_code == 400 and f"from 0 to {rows - 1}" in refused.text
