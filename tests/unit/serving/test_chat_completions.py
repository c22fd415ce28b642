"""Chat completions of a tiny model: streams, log-probs and begun answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lightrft.engines.native import GenerationBatch
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.serving.chat.token_logprobs import TokenTexts
from lightrft.serving.generation_server import GenerationService, ModelServer
from tests.model_helpers import byte_pairs
from tests.serving_helpers import judge_server

ASK = {"messages": [{"role": "user", "content": "1+1"}], "seed": 3}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    model.config.max_position_embeddings = 8192
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, ModelServer]]:
    with judge_server(folder, sampling={"max_new_tokens": 24}) as found:
        yield found


def whole(url: str, **body: Any) -> Any:
    answer = httpx.post(url + PATH, json={**ASK, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(url: str, **body: Any) -> list[Any]:
    """Return the events of a stream; the last one is a text."""
    with httpx.stream("POST", url + PATH, json={**ASK, "stream": True, **body}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [float(line.split()[-1]) for line in lines if line.startswith(f"lightrft_{name}")]
    return sum(found)


@pytest.mark.parametrize("stop", [None, ["9", "g*"]])
def test_the_pieces_of_a_stream_make_the_whole_answer(served, stop):
    url, _ = served
    body = {"n": 3, "temperature": 1.0, **({"stop": stop} if stop else {})}
    answer = whole(url, **body)
    *events, usage, done = events_of(url, **body, stream_options={"include_usage": True})
    assert done == "[DONE]"
    # the prompt of the second request is known from the first
    asked = usage["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert asked == usage["usage"]["prompt_tokens"] - 1
    del answer["usage"]["prompt_tokens_details"]
    assert usage["choices"] == [] and usage["usage"] == answer["usage"]
    texts, reasons, roles = [""] * 3, [None] * 3, [0] * 3
    for event in events:
        assert event["object"] == "chat.completion.chunk" and event["usage"] is None
        assert event["id"] == usage["id"]
        (piece,) = event["choices"]
        k = piece["index"]
        assert reasons[k] is None  # nothing follows the last piece
        texts[k] += piece["delta"].get("content", "")
        roles[k] += piece["delta"].get("role") == "assistant"
        reasons[k] = piece["finish_reason"]
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]
    assert reasons == [choice["finish_reason"] for choice in answer["choices"]]
    assert roles == [1, 1, 1]
    assert "usage" not in events_of(url)[0]


def test_a_client_that_leaves_ends_its_generation_and_no_other(served, monkeypatch):
    url, server = served
    service = server.service
    assert isinstance(service, GenerationService)
    made: list[Any] = []
    end = service.generator.loop._end

    def seen(opened: Any) -> None:
        made.extend(opened.found.values())
        end(opened)

    monkeypatch.setattr(service.generator.loop, "_end", seen)
    long = {**ASK, "stream": True, "max_tokens": 8_000, "min_tokens": 8_000, "temperature": 1.0}
    with httpx.stream("POST", url + PATH, json=long) as answer:
        next(answer.iter_lines())
    assert len(whole(url, max_tokens=2)["choices"]) == 1
    until = time.monotonic() + 300
    while not any(r.finish_reason == "abort" for r in made):
        assert time.monotonic() < until
        time.sleep(0.01)
    (left,) = [rollout for rollout in made if rollout.finish_reason == "abort"]
    assert len(left) < 8_000
    assert metric(url, "broken_streams_total") == 1
    assert metric(url, "open_requests") == 1  # this one


def test_a_stream_that_fails_ends_with_the_reason(served, monkeypatch):
    url, _ = served

    def fail(*args: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(GenerationBatch, "advance", fail)
    (failure,) = events_of(url)
    assert "the device is lost" in failure["error"]["message"]


def test_log_probs_equal_a_plain_forward_pass_of_transformers(served, folder):
    url, _ = served
    answer = whole(url, max_tokens=5, temperature=0.5, logprobs=True, top_logprobs=4)
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    tokenizer = tiny_tokenizer()
    text = tokenizer.apply_chat_template(
        ASK["messages"], tokenize=False, add_generation_prompt=True
    )
    asked = tokenizer(text)["input_ids"]
    made = tokenizer(choice["message"]["content"])["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logprobs = plain(torch.tensor([[*asked, *made]])).logits[0].log_softmax(-1)
    for k, entry in enumerate(entries):
        row = logprobs[len(asked) + k - 1]
        # before the temperature
        assert entry["logprob"] == pytest.approx(float(row[made[k]]), abs=1e-5)
        best = row.topk(4)
        assert [one["token"] for one in entry["top_logprobs"]] == [
            tokenizer.decode([id]) for id in best.indices.tolist()
        ]
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert values == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_bytes_of_tokens_make_the_bytes_of_the_text(tmp_path):
    tokenizer = byte_pairs(["the sea, é and 漢"], 280)
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    parts = 0
    with judge_server(tmp_path, sampling={"max_new_tokens": 24}) as (url, _):
        for seed in range(4):
            body = {"temperature": 1.0, "seed": seed, "logprobs": True, "return_token_ids": True}
            [choice] = whole(url, **body)["choices"]
            entries = choice["logprobs"]["content"]
            joined = b"".join(bytes(entry["bytes"]) for entry in entries)
            special = set(tokenizer.all_special_ids) & set(choice["token_ids"][: len(entries)])
            assert special or joined.decode(errors="replace") == choice["message"]["content"]
            parts += sum(len(one["bytes"]) == 1 and one["bytes"][0] > 127 for one in entries)
    assert parts > 0  # bytes of characters that have several


@pytest.mark.parametrize("text", ["é hi  hi", "hi 漢", "<0xE2>"])
def test_byte_tokens_of_sentencepiece_have_their_byte_and_words_their_space(text):
    words = ["<unk>", "▁", "h", "i", *(f"<0x{byte:02X}>" for byte in range(256))]
    names = {name: k for k, name in enumerate(words)}
    backend = Tokenizer(models.BPE(names, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    ids, texts = tokenizer(text)["input_ids"], TokenTexts(tokenizer)
    assert len(ids) > 3 and tokenizer.decode(ids) == text
    assert b"".join(texts.encoded(id, is_first=k == 0) for k, id in enumerate(ids)) == text.encode()


def test_a_begun_answer_is_continued(served):
    url, _ = served
    text = whole(url, temperature=0.0, max_tokens=8)["choices"][0]["message"]["content"]
    messages = [*ASK["messages"], {"role": "assistant", "content": text[:3]}]
    body = {"messages": messages, "continue_final_message": True, "temperature": 0.0}
    rest = whole(url, max_tokens=5, **body)["choices"][0]["message"]["content"]
    assert text[:3] + rest == text


def test_the_client_of_openai_reads_answers_streams_and_log_probs(served):
    openai = pytest.importorskip("openai")
    url, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    name = client.models.list().data[0].id
    body = {"model": name, **ASK, "max_tokens": 8, "temperature": 1.0}
    answer = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.system_fingerprint.startswith("sha256:")
    events = list(
        client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == answer.choices[0].message.content
    assert events[-1].usage == answer.usage
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**{**body, "temperature": -1})


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(folder):
    first = {"messages": [{"role": "user", "content": "tell me of the sea"}], "max_tokens": 12}
    with judge_server(folder, sampling={"max_new_tokens": 24}) as (url, _):
        answer = whole(url, **first)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        said = answer["choices"][0]["message"]["content"]
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": "and more"}]
        second = {**first, "messages": [*first["messages"], *more]}
        known = whole(url, **second)
        cached = known["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert answer["usage"]["prompt_tokens"] - 1 <= cached < known["usage"]["prompt_tokens"]
        assert metric(url, "reused_prompt_tokens") == cached
    with judge_server(folder, sampling={"max_new_tokens": 24}) as (url, _):
        fresh = whole(url, **second)
    assert fresh["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert known["choices"][0]["message"] == fresh["choices"][0]["message"]


def test_conversations_share_the_keys_of_their_system_prompt(folder):
    system = {"role": "system", "content": "answer in short words and never in long ones"}
    with judge_server(folder, sampling={"max_new_tokens": 8}) as (url, _):
        whole(url, messages=[system, {"role": "user", "content": "xyz"}])
        other = whole(url, messages=[system, {"role": "user", "content": "123"}])
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(system["content"]) // 2
