"""Endpoints of a served reward model: their answers equal a local forward pass."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.serving.reward_service import RewardService, batch_of_samples
from tests.serving_helpers import judge_server, local_scores, save_judge, wait_for_gauge
from tests.unit.datasets.media_files import picture

ASK = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
CONVERSATIONS: dict[str, Any] = {
    "conversations": [ASK[:1]],
    "answers": [{"text": "2", "cut": False}],
    "prompt_of": [0],
}
TOKENS: dict[str, Any] = {
    "prompts": {"input_ids": [[5]]},
    "responses": {"input_ids": [[6]]},
    "prompt_of": [0],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with judge_server(folder, batching={"wait_ms": 0}) as (url, _):
        yield url


def ids(folder: Path, text: str) -> list[int]:
    return load_tokenizer(ModelConfig(path=str(folder)))(text, add_special_tokens=False)[
        "input_ids"
    ]


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(url: str, path: str, **body: Any) -> str:
    answer = httpx.post(f"{url}{path}", json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def test_get_reward_scores_rendered_texts_as_openrlhf_asks(folder, url):
    eos = load_tokenizer(ModelConfig(path=str(folder))).eos_token
    answer = post(
        url,
        "/get_reward",
        query=["1+1=2", f"3+1=4{eos}"],
        prompts=["1+1=", "3+1="],
        labels=["2", "4"],
    )
    pairs = [(ids(folder, a), ids(folder, b + eos)) for a, b in (("1+1=", "2"), ("3+1=", "4"))]
    expected = local_scores(folder, pairs).tolist()
    assert answer["rewards"] == pytest.approx(expected, abs=1e-6)
    assert answer["scores"] == answer["rewards"] == answer["extra_logs"]["good"]
    assert set(answer["extra_logs"]) == {"good", "short"}
    whole = post(url, "/get_reward", query="1+1=2")  # one text, without its prompt
    assert whole["rewards"] == pytest.approx(expected[:1], abs=1e-6)


def test_score_classify_and_pooling_answer_in_the_form_of_vllm(folder, url):
    scored = post(url, "/v1/score", text_1="1+1=", text_2=["2", "3"])
    assert scored["object"] == "list" and scored["id"].startswith("score-")
    assert [row["index"] for row in scored["data"]] == [0, 1]
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    pooled = post(url, "/pooling", messages=messages)["data"][0]
    assert pooled["object"] == "pooling"
    assert pooled["data"][0] == pytest.approx(scored["data"][0]["score"], abs=1e-6)
    coded = post(url, "/v1/pooling", messages=messages, encoding_format="base64")["data"][0]
    values = np.frombuffer(base64.b64decode(coded["data"]), np.float32)
    assert values.tolist() == pytest.approx(pooled["data"], abs=1e-6)
    given = [5, 6, 7]
    expected = float(local_scores(folder, [(given[:-1], given[-1:])])[0])
    row = post(url, "/classify", input=given)["data"][0]
    assert row["probs"] == pytest.approx([1 / (1 + math.exp(-expected))], abs=1e-6)
    assert (row["label"], row["num_classes"]) == ("LABEL_0", 1)
    plain = post(url, "/v1/classify", input=[given, "abc"], use_activation=False)
    assert plain["data"][0]["probs"] == pytest.approx([expected], abs=1e-6)
    assert plain["usage"]["prompt_tokens"] == 3 + len(ids(folder, "abc"))
    short = post(url, "/score", text_1="1+1=", text_2="2", head="short")["data"][0]["score"]
    assert short == pytest.approx(pooled["data"][1], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "as many"),
        ("/score", {"text_1": "a"}, "no 'text_2' or 'documents'"),
        ("/score", {"text_1": "a", "text_2": "b", "head": "truth"}, "good, short"),
        ("/classify", {"input": [[5, 10**6]]}, "the vocabulary"),
        ("/classify", {"input": []}, "is empty"),
        ("/classify", {"input": [3, "a"]}, "token ids"),
        ("/pooling", {"input": "abc", "encoding_format": "hex"}, "float or base64"),
        ("/pooling", {"input": [[5] * 5000]}, "context"),
        ("/pooling", {"input": "a", "messages": [{}]}, "has 'input' and 'messages'; send one of"),
        (
            "/score",
            {"text_1": "a", "queries": ["b"], "text_2": "c"},
            "'text_1' and 'queries'; send",
        ),
        ("/pooling", {"messages": [{"role": "user", "content": "a"}]}, "end with the assistant's"),
        ("/pooling", {"messages": [{**ASK[0], "role": 5}, ASK[1]]}, "message 1: role is 5, not a"),
        ("/get_reward", {"query": ["a"], "prompts": ["b"]}, "does not begin"),
        ("/get_reward", {"query": ["ab"], "prompts": [5]}, "prompts.0 is 5, not a text"),
        (
            "/score",
            {"text_1": {"text": "a"}, "text_2": "b"},
            "pair 0: an object without content; i",
        ),
        ("/get_reward", {"query": ["a"], "head": "truth"}, "good, short"),
        ("/get_reward", {"query": [7]}, "must be a text"),
        ("/v1/rewards", {"prompts": {"input_ids": [[5]]}}, "responses"),
        (
            "/v1/rewards",
            {**CONVERSATIONS, "prompts": {"input_ids": [[5]]}},
            "the request has 'conversations' and 'prompts'; send one of them",
        ),
        (
            "/v1/rewards",
            {**TOKENS, "answers": CONVERSATIONS["answers"]},
            "the request has 'prompts' and 'answers'; send 'responses' with 'prompts'",
        ),
        (
            "/v1/rewards",
            {**CONVERSATIONS, "responses": TOKENS["responses"]},
            "the request has 'conversations' and 'responses'; send 'answers' with 'conversations'",
        ),
        ("/v1/rewards", {"prompt_of": [0]}, "the request has no 'conversations' or 'prompts'"),
        (
            "/v1/rewards",
            {**TOKENS, "prompt_of": [1]},
            "prompt_of",
        ),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(url, path, body, said):
    assert said in refused(url, path, **body)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/get_reward", {"query": ["a"], "prompt": ["a"]}, "unknown field 'prompt'; did you mean"),
        ("/get_reward", {"query": 5}, "query = 5: it should be a text or a list"),
        ("/get_reward", {"query": "ab", "prompts": "a"}, "prompts = 'a': it should be a list or"),
        ("/score", {"text_1": "a", "text_3": "b"}, "unknown field 'text_3'; did you mean 'text_"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "hed": "short"}, "did you mean 'head'?"),
        ("/score", {"text_1": "a", "text_2": "b", "head": 1}, "head = 1: it should be a text or"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation = True"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 4}, "is not supported"),
        ("/classify", {"input": "abc", "use_activaton": False}, "did you mean 'use_activation'?"),
        ("/classify", {"input": "abc", "use_activation": 0}, "use_activation = 0: it should be"),
        ("/v1/classify", {"input": "abc", "add_special_tokens": False}, "add_special_tokens = Fal"),
        ("/classify", {"messages": "abc"}, "messages = 'abc': it should be a list"),
        ("/pooling", {"input": "abc", "dimensions": 1}, "dimensions = 1 is not supported"),
        ("/pooling", {"input": "abc", "encoding": "float"}, "did you mean 'encoding_format'?"),
        ("/pooling", {"messages": [], "chat_template_kwargs": {"a": 1}}, "is not supported"),
        ("/v1/rewards", {"conversation": []}, "did you mean 'conversations'?"),
        ("/v1/rewards", {"prompts": {"input_id": [[5]]}}, "unknown field 'input_id' of prompts"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused_by_each_address(url, path, body, said):
    assert said in refused(url, path, **body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/get_reward", {"query": ["1+1=2"]}),
        ("/get_reward", {"query": ["1+1=2"], "prompts": ["1+1="], "labels": [None]}),
        ("/score", {"model": "x", "text_1": "1+1=", "text_2": "2", "user": "me", "priority": 0}),
        ("/score", {"queries": "1+1=", "documents": ["2"], "truncate_prompt_tokens": None}),
        ("/score", {"queries": "1+1=", "items": ["2"], "use_activation": None}),
        ("/score", {"data_1": "1+1=", "data_2": {"content": "2"}, "mm_processor_kwargs": None}),
        ("/classify", {"model": "x", "input": ["1+1=2"], "add_special_tokens": True}),
        ("/classify", {"messages": ASK, "add_generation_prompt": False, "activation": True}),
        ("/pooling", {"model": "x", "input": "1+1=2", "task": "classify", "dimensions": None}),
        ("/pooling", {"messages": ASK, "encoding_format": "float", "embed_dtype": "float32"}),
    ],
)
def test_the_fields_that_clients_of_openrlhf_and_vllm_send_are_accepted(url, path, body):
    assert post(url, path, **body)


def test_scores_that_are_not_finite_are_null_and_counted(folder):
    with judge_server(folder) as (url, server):
        service = server.service
        assert isinstance(service, RewardService)
        with torch.no_grad():
            service.model.heads["good"].layers.weight.fill_(math.nan)  # ty: ignore[unresolved-attribute]
        answer = post(url, "/get_reward", query=["abc"])
        assert answer["rewards"] == [None] and answer["extra_logs"]["short"][0] is not None
        assert "nonfinite_scores_total 1" in httpx.get(f"{url}/metrics").text


def test_requests_that_wait_for_scores_end_at_once_when_the_thread_ends_and_health_says_so(folder):
    gate, computing = threading.Event(), threading.Event()

    def end(works: Any) -> Any:
        computing.set()
        gate.wait(300)
        raise SystemExit("the device is lost")

    with judge_server(folder, batching={"wait_ms": 0}) as (url, server):
        service = server.service
        assert isinstance(service, RewardService)
        service.batcher.compute = end

        def ask(_: int) -> httpx.Response:
            return httpx.post(f"{url}/get_reward", json={"query": ["abc"]})

        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(ask, 0)]
            # the others must not share its batch
            assert computing.wait(300)
            asked += [threads.submit(ask, k) for k in (1, 2)]
            wait_for_gauge(url, "queued_requests", 2)
            gate.set()
            answers = [one.result() for one in asked]
        for answer in (*answers, ask(3), httpx.get(f"{url}/health")):
            assert answer.status_code == 503 and "the device is lost" in answer.text


def test_a_gate_needs_the_prompt(tmp_path):
    with judge_server(save_judge(tmp_path, gate=True)) as (url, _):
        for given in ({}, {"prompts": [None]}, {"prompts": [""]}):
            assert "send prompts too" in refused(url, "/get_reward", query=["abc"], **given)
        some = {"query": ["abc", "abd"], "prompts": ["a", None]}
        assert "send prompts too" in refused(url, "/get_reward", **some)
        answer = post(url, "/get_reward", query=["abc"], prompts=["a"])
        assert set(answer["extra_logs"]) == {"good", "short", "mixture"}
        assert answer["rewards"] == answer["extra_logs"]["mixture"]


def save_media_judge(folder: Path) -> Path:
    """Save a tiny reward model that reads pictures, with the head ``good``."""
    save_tiny_media("qwen2_5_vl", folder / "vl")
    config = ModelConfig(path=str(folder / "vl"), dtype="float32")
    tokenizer = load_tokenizer(config)
    heads = RewardModelConfig(heads=[{"name": "good"}])  # type: ignore[arg-type]
    model = RewardModel.load(config, heads, seed=3)
    model.save(tokenizer, folder / "rm", load_processor(config, tokenizer))
    return folder / "rm"


def test_pictures_of_a_request_are_read_by_the_rules_of_data(tmp_path):
    save_media_judge(tmp_path)
    file = tmp_path / "a.png"
    picture(file, 32, 40)
    data = base64.b64encode(file.read_bytes()).decode()

    def asked(image: str) -> list[dict[str, Any]]:
        part = {"type": "image_url", "image_url": {"url": image}}
        content = [part, {"type": "text", "text": "what?"}]
        return [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "this"},
        ]

    address = f"data:image/png;base64,{data}"
    with judge_server(tmp_path / "rm") as (url, server):
        score = post(url, "/pooling", messages=asked(address))["data"][0]["data"][0]
        picture(file, 32, 40, seed=5)
        other = base64.b64encode(file.read_bytes()).decode()
        address = f"data:image/png;base64,{other}"
        assert post(url, "/pooling", messages=asked(address))["data"][0]["data"][0] != score
        assert "allow.roots" in refused(url, "/pooling", messages=asked(str(file)))
        assert "private address" in refused(
            url, "/pooling", messages=asked("http://127.0.0.1:1/a.png")
        )
        cut = f"data:image/png;base64,{data[: len(data) // 2]}"
        assert "item 0" in refused(url, "/pooling", messages=asked(cut))
        service = server.service
        assert isinstance(service, RewardService)
        # the same pictures in one batch with others
        sample = service.encoder.sample(asked(f"data:image/png;base64,{data}"), "x")
        with torch.no_grad():
            local = service.model.score(batch_of_samples([sample]))["good"].scores[0]
        assert float(local) == pytest.approx(score, abs=1e-6)


def test_lightrft_asks_with_queries_references_and_no_images(folder, url):
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    eos, pad = tokenizer.eos_token, tokenizer.pad_token
    asked = {"prompts": ["1+1=", "3+1="], "references": ["2", None], "images": [None, []]}
    answer = post(url, "/get_reward", queries=["1+1=2", f"3+1=4{eos}"], **asked)
    other = post(url, "/get_reward", query=["1+1=2", f"3+1=4{eos}"], prompts=asked["prompts"])
    assert answer == other
    # the trainer decodes rows of a padded batch
    padded = [f"{pad}{pad}1+1=2{eos}{pad}", f"3+1=4{eos}"]
    assert post(url, "/get_reward", queries=padded, prompts=asked["prompts"]) == other
    assert "'query' and 'queries'" in refused(url, "/get_reward", query=["a"], queries=["a"])
    message = refused(url, "/get_reward", queries=["ab"], images=[["aGk="]])
    assert "the model reads none" in message


@pytest.mark.parametrize("form", ["written", "expanded", "of another size"])
def test_images_of_lightrft_are_read_as_those_of_a_conversation(tmp_path, form):
    folder = save_media_judge(tmp_path)
    file = tmp_path / "a.png"
    picture(file, 32, 40)
    image = base64.b64encode(file.read_bytes()).decode()
    url_of = f"data:image/png;base64,{image}"
    said = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of}}]},
        {"role": "assistant", "content": "2"},
    ]
    config = ModelConfig(path=str(folder))
    tokenizer = load_tokenizer(config)
    with judge_server(folder, batching={"wait_ms": 0}) as (url, _):
        expected = post(url, "/pooling", messages=said)["data"][0]["data"][0]
        shown = [{"role": "user", "content": [{"type": "image"}]}, said[1]]
        text = str(tokenizer.apply_chat_template(shown, tokenize=False)).rstrip()
        prompt = str(
            tokenizer.apply_chat_template(shown[:1], tokenize=False, add_generation_prompt=True)
        )
        part = load_processor(config, tokenizer).parts["image"]
        more = {"written": 1, "expanded": 5, "of another size": 7}[form]
        text = text.replace(part.written, part.written * more)
        for asked in ({}, {"prompts": [prompt]}):
            found = post(url, "/get_reward", queries=[text], images=[[image]], **asked)
            assert found["rewards"] == pytest.approx([expected], abs=1e-5)
        message = refused(url, "/get_reward", queries=[text], images=[[image, image]])
        assert "fewer placeholders" in message
        message = refused(url, "/get_reward", queries=[text], images=[[5]])
        assert "images.0" in message and "base64" in message
