"""``lightrft serve-rm`` as a process of its own, under ``rl`` and under signals."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import RewardError
from lightrft.utils.http_client import server_client
from tests.e2e.command import assert_refused, command
from tests.serving_helpers import (
    free_port,
    judge_server,
    killing_server,
    save_judge,
    serve_process,
    wait_for,
    wait_for_gauge,
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge"))


def rewards_of(tree: dict[str, Any], **over: Any) -> list[dict[str, Any]]:
    """Run ``rl`` and return its metrics, without times."""
    config = build(RLConfig, deep_merge(tree, over))
    run_rl(config)
    rows = read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")
    names = ("reward", "loss", "grad", "tokens/", "kl", "entropy", "step")
    return [{k: v for k, v in row.items() if k.startswith(names)} for row in rows]


def test_rl_gets_the_same_numbers_from_a_served_model_as_from_a_local_one(rl_tree, judge):
    term = {"weight": 0.5, "max_tokens_per_micro_batch": 64}
    local = rewards_of(
        rl_tree, run={"name": "local"}, reward={"models": [{"path": str(judge), **term}]}
    )
    with judge_server(judge) as (url, server):
        served = rewards_of(
            rl_tree, run={"name": "served"}, reward={"models": [{"url": url, **term}]}
        )
        assert served == local and any("good" in name for name in served[0])
        assert "scored_samples_total 48" in server.http.metrics.text()


def test_a_run_stops_with_the_reason_when_the_server_is_gone_for_good(rl_tree, judge):
    with judge_server(judge) as (url, server):
        compute = server.service.batcher.compute  # ty: ignore[unresolved-attribute]
        calls = 0

        def once(works: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError("the device is lost")
            return compute(works)

        server.service.batcher.compute = once  # ty: ignore[invalid-assignment, unresolved-attribute]
        with pytest.raises(RewardError, match=r"good.*deadline = 1 s.*the device is lost"):
            rewards_of(rl_tree, reward={"models": [{"url": url, "deadline": 1.0}]})
    assert calls > 2


@pytest.mark.slow
def test_a_server_that_is_killed_and_restarted_under_a_run_changes_no_number(
    rl_tree, judge, started, monkeypatch
):
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    models = {"models": [{"url": url, "max_tokens_per_micro_batch": 30}]}
    tree = deep_merge(rl_tree, {"reward": models, "train": {"steps": 4}})
    started.append(serve_process(judge, port))
    wait_for(url)
    undisturbed = rewards_of(tree, run={"name": "undisturbed"})
    with killing_server(judge, port, started, 2, 0.4) as kills:
        disturbed = rewards_of(tree, run={"name": "disturbed"})
    assert kills
    assert disturbed == undisturbed


def test_a_stopped_server_finishes_what_it_has_accepted_and_ends_with_0(judge, started):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # the requests wait for others to share their batch until the signal comes
    process = serve_process(
        judge, port, "batching.wait_ms=900000", "http.drain_seconds=300", "name=judge"
    )
    started.append(process)
    wait_for(url)
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{url}/get_reward", json={"query": ["1+1=2"]})
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_for_gauge(url, "queued_requests", 3)
    process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 3
    assert process.wait(300) == 0
    assert "judge (good, short; sha256:" in process.said(1) and url in process.said(1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_generative_model_answers_chat_and_says_so(tmp_path):
    tokenizer = tiny_tokenizer()
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with judge_server(tmp_path, sampling={"max_new_tokens": 6}) as (url, _):

        def ask(**body: Any) -> httpx.Response:
            messages = [{"role": "user", "content": "1+1"}]
            tree = {"messages": messages, **body}
            return httpx.post(f"{url}/v1/chat/completions", json=tree)

        first = ask().json()
        assert first["object"] == "chat.completion"
        assert first["choices"][0]["message"]["role"] == "assistant"
        assert first["usage"]["completion_tokens"] <= 6
        assert ask().json()["choices"] == first["choices"]  # greedy
        several = ask(n=3, temperature=1.0, seed=4).json()["choices"]
        assert len({choice["message"]["content"] for choice in several}) > 1
        assert ask(n=3, temperature=1.0, seed=4).json()["choices"] == several
        assert ask(max_tokens=2).json()["usage"]["completion_tokens"] <= 2
        for wrong, said in (
            ({"stream": True, "logprobs": True}, "leave out stream"),
            ({"top_logprobs": 2}, "logprobs = true"),
            ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
            ({"continue_final_message": True}, "text of the assistant"),
            ({"messages": []}, "a list of messages"),
            ({"temperature": -1}, "temperature"),
            ({"max_tokens": 10**9, "min_tokens": 10**8}, "no room"),
            ({"n": 1000}, "from 1 to 64"),
        ):
            answer = ask(**wrong)
            assert answer.status_code == 400 and said in answer.text, answer.text
        assert httpx.post(f"{url}/get_reward", json={}).status_code == 404
        about = httpx.get(f"{url}/v1/models").json()["data"][0]
        assert about["heads"] == [] and about["digest"].startswith("sha256:")


def test_wrong_settings_are_refused_before_the_model_is_served(capsys, judge, tmp_path):
    assert_refused(command(capsys, "serve-rm"), "model.path is empty")
    assert_refused(command(capsys, "serve-rm", judge, "http.prot=1"), "http.port")
    missing = f"http.token_file={tmp_path / 'none'}"
    assert_refused(command(capsys, "serve-rm", judge, missing), "http.token_file")
    with judge_server(judge) as (url, _):
        port = url.rpartition(":")[2]
        outcome = command(capsys, "serve-rm", judge, f"http.port={port}", "device=cpu")
        assert_refused(outcome, "http.port", "another port")
    assert_refused(command(capsys, "serve_rm"), "did you mean 'serve-rm'")
