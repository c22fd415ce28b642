"""Rewards of servers in the protocols of OpenRLHF and LightRFT, which run in processes of their own."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig, ScoringModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.rewards.base import NullScorer
from lightrft.types import Prompt, Ragged, Rollout
from lightrft.utils.errors import ConfigError, ResourceError
from lightrft.workers.scoring.model_scorer import ModelScorer, scoring_models
from lightrft.workers.scoring.reward_endpoint import logged_numbers, scores_of
from tests.serving_helpers import free_port, judge_server, local_scores, save_judge
from tests.unit.datasets.media_files import picture

CPU = torch.device("cpu")
SERVER = Path(__file__).parent / "reward_servers.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


@contextmanager
def reward_server(kind: str, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server of ``reward_servers.py`` and yield its address and process."""
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, kind, str(port), log])
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            try:
                httpx.get(url)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield f"{url}/get_reward", process
    finally:
        process.kill()
        process.wait()


def endpoint(folder: Path, **tree: Any) -> Any:
    term = build(ScoringModelConfig, {"protocol": "openrlhf", **tree})
    config = ModelConfig(path=str(folder), dtype="float32")
    return scoring_models([term], config, load_tokenizer(config), CPU)[0]


def rollouts(folder: Path, count: int = 4, **prompt: Any) -> list[Rollout]:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    prompts = []
    for k in range(2):
        ids = tokenizer.encode(f"{k}+1=", add_special_tokens=False)
        prompts.append(Prompt(str(k), ids, f"{k}+1=", label=str(2 - k), **prompt))
    found = []
    for k in range(count):
        ids = [*tokenizer.encode(str(k), add_special_tokens=False), tokenizer.eos_token_id]
        found.append(
            Rollout(prompts[k % 2], ids, [True] * len(ids), [0.0] * len(ids), [0] * len(ids),
                    "stop", seed=0, text=str(k))
        )  # fmt: skip
    return found


def scored(model: Any, own: list[Rollout]) -> ModelScorer:
    scorer = ModelScorer(NullScorer(0.0), [model], CPU)
    for one in own:
        scorer.submit(one)
    assert len(list(scorer.results(wait=True))) == len(own)
    return scorer


def requests_in(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_server_as_openrlhf_documents_it_scores_texts_with_prompts_and_labels(folder, tmp_path):
    with reward_server("openrlhf", tmp_path / "log") as (url, _):
        own = rollouts(folder)
        scored(endpoint(folder, url=url), own)
    eos = load_tokenizer(ModelConfig(path=str(folder))).eos_token
    assert [one.reward for one in own] == [0.0, 1.0, 1.0, 0.0]
    first, *rest = requests_in(tmp_path / "log")
    assert first["query"] == ["1+1=2"] and first["labels"] == ["2"]
    (body,) = rest
    assert sorted(body) == ["labels", "prompts", "query"]
    assert sorted(body["query"]) == [f"0+1=0{eos}", f"0+1=2{eos}", f"1+1=1{eos}", f"1+1=3{eos}"]
    assert all(q.startswith(p) for q, p in zip(body["query"], body["prompts"], strict=True))
    assert {(p, label) for p, label in zip(body["prompts"], body["labels"], strict=True)} == {
        ("0+1=", "2"),
        ("1+1=", "1"),
    }
    # extra_logs are metrics: a list is one number for each response, a number holds for all
    assert [one.terms["remote/length"] for one in own] == [5.0 + len(eos)] * 4
    assert {one.terms["remote/accuracy"] for one in own} == {0.5}
    assert all(one.weights == {"remote": 1.0} for one in own)


def test_the_verifier_of_lmm_r1_adds_rewards_by_name(folder, tmp_path):
    with reward_server("verifier", tmp_path / "log") as (url, _):
        own = rollouts(folder)
        scored(endpoint(folder, url=url, name="rule", weight=2.0), own)
    assert [one.reward for one in own] == [1.0, 1.0, 1.0, 1.0]
    assert own[0].terms == {"rule": 0.5, "rule/format_rewards": 0.5, "rule/acc_rewards": 0.0}


def test_lightrft_gets_queries_references_and_images_as_base64(folder, tmp_path):
    file = tmp_path / "a.png"
    picture(file, 9, 7)
    media = {"pixel_values": Ragged(torch.zeros(1, 2), torch.tensor([1]))}
    request = [{"role": "user", "content": [{"type": "image", "image": str(file)}]}]
    with reward_server("lightrft", tmp_path / "log") as (url, _):
        own = rollouts(folder, 2, reference="two", media=media, request=request)
        scored(endpoint(folder, url=url, protocol="lightrft"), own)
    body = requests_in(tmp_path / "log")[-1]
    assert sorted(body) == ["images", "labels", "prompts", "queries", "references"]
    assert body["references"] == ["two", "two"]
    (image,) = body["images"][0]
    assert Image.open(io.BytesIO(base64.b64decode(image))).size == (7, 9)
    # width times height of the picture, as the server has read it
    assert [one.reward for one in own] == [63.0, 63.0]


def test_our_own_server_answers_the_client_in_both_dialects(folder, tmp_path):
    ids = [([*r.prompt.token_ids], [*r.token_ids]) for r in rollouts(folder)]
    expected = local_scores(folder, ids).tolist()
    with judge_server(folder, batching={"wait_ms": 0}) as (url, _):
        for protocol in ("openrlhf", "lightrft"):
            own = rollouts(folder)
            scored(endpoint(folder, url=f"{url}/get_reward", protocol=protocol), own)
            assert [one.reward for one in own] == pytest.approx(expected, abs=1e-6)
            assert {"remote/good", "remote/short"} < set(own[0].terms)


def test_requests_are_spread_over_servers_and_a_dead_one_is_left_out(folder, tmp_path, caplog):
    logs = [tmp_path / "0", tmp_path / "1"]
    with (
        reward_server("openrlhf", logs[0]) as (first, process),
        reward_server("openrlhf", logs[1]) as (second, _),
    ):
        urls = f"{first},{second}"
        model = endpoint(folder, url=urls, max_tokens_per_micro_batch=1, max_in_flight=1)
        assert len(model.client.clients) == 2
        scored(model, rollouts(folder, 8))
        sizes = [len(requests_in(log)) for log in logs]
        # each server has had the query of the start too
        assert sum(sizes) == 10 and min(sizes) > 2
        process.kill()
        process.wait()
        with caplog.at_level(logging.WARNING):
            own = rollouts(folder, 8)
            scorer = scored(model, own)
        assert all(one.reward is not None for one in own)
        assert scorer.counts["unanswered"] == 0
        assert model.client.counts["retries"] > 0
        assert sum("other servers get its requests" in one for one in caplog.messages) == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("short", r"sent 1 rewards for 2 responses: \{.*rewards"),
        ("words", "the score '(good|bad)', a str and not a number"),
        ("nested", r"the score \[0.5\], a list and not a number"),
        ("null", "its score is nan"),
        ("infinite", r"a score beyond \+-"),
        ("error", r"no rewards and no scores: .*out of memory"),
    ],
)
def test_a_wrong_answer_fails_its_responses_in_the_words_of_the_server(
    folder, tmp_path, kind, said
):
    with reward_server(f"later-{kind}", tmp_path / "log") as (url, _):
        own = rollouts(folder, 2)
        scorer = scored(endpoint(folder, url=url), own)
    for one in own:
        assert one.reward is None
        assert re.search(said, one.failed)
    assert scorer.counts["unanswered"] + scorer.counts["nonfinite"] == 2


def test_a_server_that_cannot_give_rewards_is_refused_at_start_by_its_address(folder, tmp_path):
    root = r"'http://127.0.0.1:\d+'.*status 404.*whole address"
    with judge_server(folder) as (url, _), pytest.raises(ConfigError, match=root):
        endpoint(folder, url=url)
    with reward_server("error", tmp_path / "log") as (url, _):
        with pytest.raises(ConfigError, match=rf"models\.0\.url = '{url}': .*out of memory"):
            endpoint(folder, url=url)
        wrong = url.replace("get_reward", "rewards")
        with pytest.raises(ConfigError, match=rf"'{wrong}'.*404.*whole address.*get_reward"):
            endpoint(folder, url=wrong)
        with pytest.raises(ConfigError, match=r"no reward model with heads.*protocol to openrlhf"):
            endpoint(folder, url=url, protocol="serve-rm")
    silent = f"http://127.0.0.1:{free_port()}/get_reward"
    with pytest.raises(ResourceError, match=rf"'{silent}'.*start the server first"):
        endpoint(folder, url=silent, deadline=0.2)


def test_a_rule_that_reads_rows_alone_may_refuse_the_query_of_the_start(folder, tmp_path, caplog):
    with reward_server("strict", tmp_path / "log") as (url, _):
        own = rollouts(folder, 2)
        for one in own:
            one.prompt.label = json.dumps({"answer": one.prompt.label})
        scored(endpoint(folder, url=url), own)
    assert [one.reward for one in own] == [1.0, 1.0]
    assert any("could not score a query without a row" in one for one in caplog.messages)


def test_a_server_that_hangs_fails_its_responses_after_the_time_limit(folder, tmp_path):
    with reward_server("later-hang", tmp_path / "log") as (url, _):
        own = rollouts(folder, 2)
        hung = endpoint(folder, url=url)
        for client in hung.client.clients:
            client.deadline = 0.5
        scorer = scored(hung, own)
    assert all("deadline = 0.5 s" in one.failed for one in own)
    assert scorer.counts["unanswered"] == 2


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"url": "http://a", "head": "good"}, "head: the protocol 'openrlhf' has no such field"),
        ({"url": ["http://a", "b:5000"]}, "must begin with http"),
        ({"path": "a"}, "protocol: settings of a served model"),
    ],
)
def test_settings_that_the_protocol_does_not_have_are_refused(tree, said):
    with pytest.raises(ConfigError, match=said):
        build(ScoringModelConfig, {"protocol": "openrlhf", **tree})


def test_several_addresses_are_a_list_or_a_text_with_commas():
    config = build(RewardConfig, {"models": [{"url": "http://a, http://b"}]})
    assert config.models[0].urls == ("http://a", "http://b")
    config = build(RewardConfig, {"models": [{"url": ["http://a", "http://b"]}]})
    assert config.models[0].urls == ("http://a", "http://b")


def test_scores_stand_in_for_rewards_and_are_reported_where_they_differ():
    assert scores_of({"scores": [1, 2.5]}, 2) == [1.0, 2.5]
    assert scores_of({"rewards": 0.5}, 1) == [0.5]
    both = {"rewards": [0.5], "scores": [1.0], "extra_logs": {"a": "text", "b": [2]}}
    unread: list[str] = []
    assert logged_numbers(both, 1, unread.append) == {"scores": [1.0], "b": [2.0]}
    assert unread == ["a"]
