"""Token ids that the policy does not know: no engine over a server lets them through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.growing_response import GrowingResponse
from lightrft.engines.http import HTTPEngine
from lightrft.engines.served.served_engine import ServedEngine
from lightrft.engines.served.vllm_server import VLLMServerEngine
from lightrft.engines.sglang import SGLangEngine
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request
from lightrft.utils.errors import ModelError
from lightrft.workers.local_served import banning, connect_http
from tests.serving_helpers import model_server

ROWS = 104
"""Rows of the embedding: more than the tokenizer has tokens."""


class Server:
    """Answers each stream by one event."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        self.event = event

    def stream(self, path: str, body: Callable[[], Any], take: Any, *_: Any) -> None:
        body()
        take(self.event)


def http(token: object) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": [token], "sampled_logprobs": [-0.5]}
    return {"choices": [{**choice, "finish_reason": "length"}]}


def vllm(token: object) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": [token], "logprobs": {"content": [{"logprob": -0.5}]}}
    return {"choices": [{**choice, "finish_reason": "length"}]}


def sglang(token: object) -> dict[str, Any]:
    rows = [[-0.5, token, None]]
    return {"meta_info": {"output_token_logprobs": rows, "finish_reason": {"type": "length"}}}


@pytest.mark.parametrize("token", [ROWS - 1, ROWS, -1, 5.5, True])
@pytest.mark.parametrize(
    ("kind", "event"), [(HTTPEngine, http), (VLLMServerEngine, vllm), (SGLangEngine, sglang)]
)
def test_every_server_may_sample_a_padded_token_and_no_other_that_the_tokenizer_lacks(
    kind: type[ServedEngine], event: Callable[[object], dict[str, Any]], token: object
) -> None:
    config = EngineConfig(kind="http", url="http://127.0.0.1:1")
    engine = kind(Server(event(token)), tiny_tokenizer(), config, [1])  # type: ignore[arg-type]
    engine.vocabulary = ROWS
    asked = [Request(Prompt("p", [5, 6]), 1)]
    if token == ROWS - 1:
        [found] = engine.generate(asked, SamplingConfig(max_new_tokens=1))
        assert list(found.token_ids) == [token]
        return
    with pytest.raises(ModelError, match=rf"returned token id {token!r}, .*vocabulary of {ROWS};"):
        list(engine.generate(asked, SamplingConfig(max_new_tokens=1)))


def test_the_vocabulary_of_a_run_is_that_of_the_model_and_not_of_its_tokenizer(
    tmp_path: Path,
) -> None:
    tokenizer = tiny_tokenizer()
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=ROWS).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    with model_server(tmp_path) as (url, _):
        config = EngineConfig(kind="http", url=url)
        engine = connect_http(model, config, tokenizer, [1], torch.device("cpu"), trains=False)
    assert isinstance(engine, HTTPEngine)
    assert engine.vocabulary == ROWS > len(tokenizer)
    assert VLLMServerEngine.over(engine).vocabulary == ROWS


@pytest.mark.parametrize("family", ["qwen2_5_omni_thinker", "qwen2"])
def test_requests_to_servers_ban_what_the_model_reads_as_media(tmp_path: Path, family: str) -> None:
    if family == "qwen2":
        tiny_model(family, seed=1, hidden_size=32, vocab_size=ROWS).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    else:
        save_tiny_media(family, tmp_path)
    model = ModelConfig(path=str(tmp_path))
    vocabulary = load_tokenizer(model).get_vocab()
    media = ("IMAGE", "VIDEO", "AUDIO", "vision_bos", "audio_bos")
    expected = {vocabulary[f"<|{name}|>"] for name in media} if family != "qwen2" else set()
    config = EngineConfig(kind="http", url="http://127.0.0.1:1")
    lowest = {HTTPEngine: -100, VLLMServerEngine: -1e9, SGLangEngine: -1e9}
    for kind, bias in lowest.items():
        engine = banning(kind({}, tiny_tokenizer(), config, [1]), model)  # type: ignore[arg-type]
        response = GrowingResponse.of(Request(Prompt("p", [5]), 1), SamplingConfig(), None)
        body = engine.body([response])
        found = body.get("sampling_params", body).get("logit_bias") or {}
        assert found == dict.fromkeys(expected, bias)
