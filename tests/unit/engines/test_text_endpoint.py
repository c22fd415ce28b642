"""Endpoints of text alone: an answer that is no response is an error, and prompts arrive as they are."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from transformers import PreTrainedTokenizerBase

from lightrft.config.base import build
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import ChatConfig, EvaluateConfig, GenerateConfig
from lightrft.engines.served.start_checks import open_client
from lightrft.engines.text_endpoint import TextEndpoint
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.serving.http_server import Endpoint, EventStream
from lightrft.serving.problems import HTTPCall
from lightrft.trainer.inference import Chat, run_eval
from lightrft.trainer.pipelines.generate import run_generate
from lightrft.types import Prompt, Request
from lightrft.utils.errors import ConfigError, DataError, ModelError, RewardError
from lightrft.utils.http_client import server_client
from tests.serving_helpers import answering

Answer = Callable[[dict[str, Any]], dict[str, Any]]
GOOD = {"choices": [{"index": 0, "text": "4", "finish_reason": "stop"}]}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.01)


def in_parts(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of an answer: each letter of its text, then its end, then its usage."""
    if not answer.get("choices"):
        return [answer]
    [choice] = answer["choices"]
    if not isinstance(choice.get("text"), str):
        return [answer]
    events = [{"choices": [{**choice, "text": t, "finish_reason": None}]} for t in choice["text"]]
    return [*events, {"choices": [{**choice, "text": ""}]}, {"choices": [], "usage": {}}]


@contextmanager
def endpoint(answer: Answer, *, streams: bool = True) -> Generator[str]:
    """Serve completions of text. ``answer`` gets each body but that of the first check."""

    async def listed(call: HTTPCall) -> object:
        return {"data": [{"id": "other"}]}

    async def complete(call: HTTPCall) -> object:
        body = dict(call.body)
        if not isinstance(body["prompt"], str):
            found = GOOD
        else:
            found = await anyio.to_thread.run_sync(answer, body)
            if not (streams and body.get("stream")):
                return found

        async def events() -> AsyncIterator[object]:
            for event in in_parts(found):
                yield event

        return EventStream(events(), lambda: None)

    routes = [
        Endpoint(("/v1/models",), listed, "GET"),
        Endpoint(("/v1/completions",), complete),
    ]
    with answering(*routes) as (url, _):
        yield url


def opened(
    url: str, tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any
) -> TextEndpoint:
    config = EngineConfig(kind="http", url=url, **settings)
    return TextEndpoint(open_client(config), tokenizer or tiny_tokenizer(), config, "other")


def asked(tokenizer: PreTrainedTokenizerBase | None = None) -> list[Request]:
    return [Request(Prompt("p", (tokenizer or tiny_tokenizer())("1+1=")["input_ids"]), 1)]


LIMITS = SamplingConfig(max_new_tokens=8)
NO_RESPONSES = {
    "no choice": ({"choices": []}, ModelError, "with no text"),
    "an error": ({"error": {"message": "quota exceeded"}}, ConfigError, "quota exceeded"),
    "a named error": (
        {"error": {"code": "insufficient_quota", "message": "quota exceeded"}},
        ConfigError,
        "quota exceeded",
    ),
    "a bare error": ({"error": "quota exceeded"}, ConfigError, "quota exceeded"),
    "no text": (
        {"choices": [{"text": None, "finish_reason": "stop"}]},
        ModelError,
        r"prompt 'p' with no text, as an endpoint of completions",
    ),
    "a chat": (
        {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]},
        ModelError,
        r"with no text, .*'message'",
    ),
    "another end": (
        {"choices": [{"text": "4", "finish_reason": "tool_calls"}]},
        ModelError,
        r"with finish_reason 'tool_calls', and not stop or length",
    ),
    "no end": ({"choices": [{"text": "4"}]}, ModelError, "with finish_reason None"),
    "several": (
        {"choices": [GOOD["choices"][0], {**GOOD["choices"][0], "index": 1}]},
        ModelError,
        "with several choices",
    ),
}


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("answer", "error", "says"), NO_RESPONSES.values(), ids=NO_RESPONSES)
def test_an_answer_that_is_no_response_is_an_error_and_no_empty_text(
    answer: dict[str, Any], error: type[Exception], says: str, streams: bool
) -> None:
    if streams and len(answer.get("choices", ())) > 1:
        return
    asks = {"n": 0}

    def found(body: dict[str, Any]) -> dict[str, Any]:
        if not body.get("stream"):
            return GOOD
        asks["n"] += 1
        return answer

    with endpoint(found, streams=streams) as url, pytest.raises(error, match=says):
        list(opened(url).generate(asked(), LIMITS))
    assert asks["n"] == 1


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_response_has_the_text_and_the_end_that_the_endpoint_sends(
    reason: str, streams: bool
) -> None:
    answer = {"choices": [{"index": 0, "text": "12 = 12", "finish_reason": reason}]}
    with endpoint(lambda body: answer, streams=streams) as url:
        [found] = opened(url).generate(asked(), LIMITS)
    assert (found.text, found.finish_reason, found.failed) == ("12 = 12", reason, "")


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """An evaluation of two prompts, 1+1= and 2+2=."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "2+2=", "label": "4"}\n')
    return {
        "model": {"path": str(tmp_path / "model")},
        "engine": {"kind": "http", "check_logprobs": False},
        "run": {"dir": str(tmp_path), "name": "run"},
    }


def withheld(body: dict[str, Any]) -> dict[str, Any]:
    """4 for the second prompt. The first one is withheld."""
    if "2+2=" in body["prompt"]:
        return GOOD
    return {"choices": [{"index": 0, "text": "", "finish_reason": "content_filter"}]}


def test_a_response_that_the_endpoint_withholds_counts_as_failed_in_an_evaluation(
    tree: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated = {"data": {"sources": [str(tmp_path / "rows.jsonl")]}, "samples": 2}
    tree |= {"reward": {"terms": ["math"]}, "eval": evaluated}
    with endpoint(withheld) as url:
        tree["engine"]["url"] = url
        found = run_eval(build(EvaluateConfig, tree)).metrics
        assert (found["eval/failed"], found["eval/accuracy"], found["eval/reward"]) == (2, 0.5, 1)
        assert "content_filter" in caplog.text
        (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
        tree["run"]["name"] = "all"
        with pytest.raises(RewardError, match="content_filter"):
            run_eval(build(EvaluateConfig, tree))


def test_a_response_that_the_endpoint_withholds_is_marked_in_generated_rows(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    data = {"sources": [str(tmp_path / "rows.jsonl")]}
    tree |= {"reward": {"terms": ["math"]}, "data": data, "output": str(tmp_path / "out.jsonl")}
    del tree["run"]
    with endpoint(withheld) as url:
        tree["engine"]["url"] = url
        run_generate(build(GenerateConfig, tree))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ["content_filter" in line["failed"] for line in lines] == [True, False]
    assert [line["reward"] for line in lines] == [None, 1.0]


def test_a_response_that_the_endpoint_withholds_leaves_a_conversation_as_it_was(
    tree: dict[str, Any],
) -> None:
    is_good: list[bool] = []
    with endpoint(lambda body: GOOD if is_good else withheld({"prompt": ""})) as url:
        tree["engine"]["url"] = url
        chat = Chat(build(ChatConfig, tree))
        with pytest.raises(DataError, match="content_filter"):
            chat.say("1+1=")
        assert chat.messages == [] and chat.turn == 0
        is_good.append(True)
        assert chat.say("2+2=").text == "4"


def test_a_response_that_stalls_is_asked_for_again_after_the_timeout() -> None:
    over, stalls = threading.Event(), [True]

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if body["max_tokens"] > 1 and stalls and stalls.pop():
            over.wait(900)  # for no longer than a fault, which the test would wait for
        return GOOD

    with endpoint(answer) as url:
        try:
            start = time.monotonic()
            [found] = opened(url, timeout=2).generate(asked(), LIMITS)
            assert found.text == "4" and time.monotonic() - start < 300
        finally:
            over.set()


def with_bos() -> PreTrainedTokenizerBase:
    """A tokenizer whose prompts begin with a token of its own, as most with SentencePiece do."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    return tokenizer


@pytest.mark.parametrize("adds", [True, False, None], ids=["adds it", "adds none", "tells nothing"])
def test_the_first_token_of_a_prompt_is_sent_once_whether_the_endpoint_adds_it_or_not(
    adds: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = with_bos()
    ids = [tokenizer.bos_token_id, *tokenizer("1+1=")["input_ids"]]
    sent: list[str] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("stream"):
            sent.append(body["prompt"])
        read = len(tokenizer(body["prompt"])["input_ids"]) + bool(adds)
        return GOOD if adds is None else {**GOOD, "usage": {"prompt_tokens": read}}

    with endpoint(answer) as url:
        requests = [Request(Prompt(str(k), ids), k) for k in range(2)]
        list(opened(url, tokenizer).generate(requests, LIMITS))
    assert sent == ["<s>1+1=" if adds is False else "1+1="] * 2
    assert ("prompts are sent without '<s>'" in caplog.text) == (adds is None)
    assert "reads prompt" not in caplog.text


def test_an_endpoint_that_reads_another_number_of_tokens_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with endpoint(lambda body: {**GOOD, "usage": {"prompt_tokens": 9}}) as url:
        engine = opened(url)
        for _ in range(2):
            list(engine.generate(asked(), LIMITS))
    assert (
        caplog.text.count("reads prompt 'p' as 9 tokens, and the tokenizer of model.path as") == 1
    )
