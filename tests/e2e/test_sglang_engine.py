"""Runs that sample from a server with the protocol of SGLang: wrong servers are refused, and wrong weights end the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.config.base import build, deep_merge
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import RLConfig
from lightrft.engines.sglang import SGLangEngine
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError, ModelError, ResourceError
from lightrft.utils.http_client import server_client
from tests.serving_helpers import answering
from tests.sglang_server import SGLangServer, sglang_server

Served = tuple[str, SGLangServer]
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)


@pytest.fixture
def served(model_folder: Path) -> Iterator[Served]:
    with sglang_server(model_folder) as found:
        yield found


def opened(url: str, **settings: Any) -> SGLangEngine:
    config = EngineConfig(kind="sglang", url=url, **settings)
    tokenizer = tiny_tokenizer()
    assert tokenizer.eos_token_id is not None
    return SGLangEngine.connect(config, tokenizer, [tokenizer.eos_token_id])


def answers(engine: SGLangEngine, **sampling: Any) -> dict[int, Rollout]:
    prompt = Prompt("p", tiny_tokenizer()("1+1=")["input_ids"])
    requests = [Request(prompt, 10 + k, k) for k in range(4)]
    settings = SamplingConfig(**{"max_new_tokens": 9, **sampling})
    return {r.seed: r for r in engine.generate(requests, settings)}


def on(tree: dict[str, Any], url: str, tmp_path: Path, **over: Any) -> dict[str, Any]:
    engine = {"kind": "sglang", "url": url, "weights_dir": str(tmp_path / "w")}
    # rewards that differ, so that the first step changes the weights
    varied = tree["reward"]["terms"][0].replace(":ones", ":varied")
    return deep_merge({**tree, "engine": engine, "reward": {"terms": [varied]}}, over)


def test_events_with_new_tokens_alone_are_read_as_those_with_all(served: Served) -> None:
    url, server = served
    expected = answers(opened(url))
    server.deltas = True
    found = answers(opened(url))
    for seed, rollout in found.items():
        assert rollout.token_ids == expected[seed].token_ids
        assert rollout.logprobs == pytest.approx(expected[seed].logprobs, abs=1e-5)


def test_an_end_token_at_the_limit_ends_a_response_by_stop(served: Served) -> None:
    engine = opened(served[0])
    greedy = next(iter(answers(engine, temperature=0.0).values())).token_ids
    limit = max(greedy.index(token) for token in greedy) + 1
    end = greedy[limit - 1]
    found = answers(engine, max_new_tokens=limit, temperature=0.0, stop_token_ids=(end,))
    assert {(r.finish_reason, len(r)) for r in found.values()} == {("stop", limit)}


def test_log_probs_before_temperature_are_refused_at_the_start(served: Served) -> None:
    served[1].raw = True
    with pytest.raises(ConfigError, match=r"without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        opened(served[0])


def test_a_server_whose_seeds_have_no_effect_is_named(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sglang_server(model_folder, deterministic=False) as (url, _):
        opened(url)
    assert "--enable-deterministic-inference" in caplog.text


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0, "repetition_penalty": 1.1}]
)
def test_settings_that_log_probs_leave_out_are_refused(
    sampling: dict[str, float], served: Served
) -> None:
    name = list(sampling)[-1]
    with pytest.raises(ConfigError, match=f"{name} = {sampling[name]:g}: the log-probs of SGLang"):
        answers(opened(served[0]), **sampling)


def test_sleep_releases_memory_and_wake_resumes_it(served: Served) -> None:
    url, server = served
    engine = opened(url)
    engine.sleep(1)
    assert server.released == {"kv_cache"}
    engine.wake()
    assert not server.released and len(answers(engine)) == 4
    engine.sleep(2)
    assert server.released == {"kv_cache", "weights"}
    engine.wake()
    assert server.calls.count("/resume_memory_occupation") == 2


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_run_trains_on_the_weights_that_it_sent_and_leaves_no_copy(
    lora: dict[str, Any] | None, rl_tree: dict[str, Any], served: Served, tmp_path: Path
) -> None:
    url, server = served
    tree = on(rl_tree, url, tmp_path)
    run_rl(build(RLConfig, {**tree, "model": {**tree["model"], "lora": lora}}))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["policy/rollout_logprob_diff"] for row in rows) < 1e-5
    assert server.calls.count("/update_weights_from_disk") >= 4
    assert not list((tmp_path / "w").glob("*"))


def test_a_restarted_server_gets_the_weights_again(
    rl_tree: dict[str, Any], served: Served, tmp_path: Path
) -> None:
    _, server = served
    begun = dict(server.generator.engine.decoder.parameters())
    first = {name: tensor.detach().clone() for name, tensor in begun.items()}
    update, updates = server.update, []

    async def counted(call: Any) -> object:
        answer = await update(call)
        updates.append(call.body["weight_version"])
        if len(updates) == 3:
            # as if it had been killed and started on the folder of the model
            server.generator.engine.decoder.load(first.items())
            server.version = "default"
        return answer

    server.update = counted  # ty: ignore[invalid-assignment]
    with answering(*server.endpoints()) as (own, _):
        run_rl(build(RLConfig, on(rl_tree, own, tmp_path)))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert sum(row.get("engine/weights_resent", 0) for row in rows) == 1
    assert updates[2] == updates[3]
    assert max(row["policy/rollout_logprob_diff"] for row in rows) < 1e-5


def skipped(weights: Weights) -> Weights:
    return {}


def half_done(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if "layers.1." not in name}


def of_the_wrong_layer(weights: Weights) -> Weights:
    swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    found = {}
    for name, tensor in weights.items():
        layer = next((part for part in swap if part in name), "")
        found[name.replace(layer, swap[layer]) if layer else name] = tensor
    return found


def with_swapped_shards(weights: Weights) -> Weights:
    return {
        name: torch.cat(tensor.chunk(2)[::-1]) if "down_proj" in name else tensor
        for name, tensor in weights.items()
    }


FAULTS = [skipped, half_done, of_the_wrong_layer, with_swapped_shards]


def assert_fault_stops(
    fault: Callable[[Weights], Weights], server: SGLangServer, tree: dict[str, Any], run: Path
) -> None:
    """Assert that a run ends at its first batch after an update that goes wrong."""
    updates: list[int] = []

    def broken(weights: Weights) -> Weights:
        updates.append(1)
        # the first update sends the weights that the run starts with
        return weights if len(updates) == 1 else fault(weights)

    server.broken = broken
    with pytest.raises(ModelError, match="Cause: "):
        run_rl(build(RLConfig, tree))
    assert len(read_rows(run / "metrics.jsonl")) <= 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_weight_update_that_goes_wrong_stops_the_run_at_its_first_batch(
    fault: Callable[[Weights], Weights], rl_tree: dict[str, Any], served: Served, tmp_path: Path
) -> None:
    url, server = served
    assert_fault_stops(fault, server, on(rl_tree, url, tmp_path), tmp_path / "run")


def test_weights_that_another_run_replaces_end_the_run(served: Served, tmp_path: Path) -> None:
    url, server = served
    engine = opened(url, weights_dir=str(tmp_path / "w"))
    weights = dict(server.generator.engine.decoder.parameters())
    engine.load_weights(weights.items(), 1)
    server.version = "other-7"
    with pytest.raises(ModelError, match=r"'other-7'.*another run has updated this server"):
        answers(engine)


def test_a_request_that_the_server_aborts_is_asked_for_again_until_the_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = served
    engine = opened(url, deadline=1.0)
    about = server.about
    monkeypatch.setattr(server, "about", lambda rows, reason: about(rows, "abort"))
    with pytest.raises(ResourceError, match="SGLang aborted the request"):
        answers(engine)
