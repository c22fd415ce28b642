"""Runs that train on a running vLLM server: their numbers are those of vLLM in the process, and wrong weights end them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.engines.fingerprint import checksums
from lightrft.engines.sending import vllm_weights
from lightrft.engines.sending.vllm_weights import AdapterToVLLM, BroadcastToVLLM, VLLMGroup
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ModelError
from tests.e2e.vllm.runs import check_equal, train
from tests.model_helpers import vllm_model
from tests.vllm_server import ADAPTERS, TRAINS, VLLMServer, vllm_server

LORA = {"model": {"lora": {"rank": 3, "alpha": 12.0}}, "optimizer": {"lr": 0.05}}
AHEAD = {"rollout": {"staleness": 1}, "algorithm": {"importance_sampling": ["tis"]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    folder = tmp_path_factory.mktemp("model")
    # as in ``tree``
    vllm_model(folder)
    with vllm_server(folder, *TRAINS, *ADAPTERS) as found:
        yield found


def numbers(tree: dict[str, Any]) -> list[dict[str, Any]]:
    run_rl(build(RLConfig, tree))
    [file] = Path(tree["run"]["dir"]).rglob("metrics.jsonl")
    return read_rows(file)


def on(tree: dict[str, Any], server: VLLMServer, tmp_path: Path, **over: Any) -> dict[str, Any]:
    engine = {"kind": "http", "url": server.url, "deadline": 400.0}
    folder = {"dir": str(tmp_path / "served")}
    return deep_merge({**tree, "engine": engine}, {"run": folder, **over})


def adapted(tree: dict[str, Any], server: VLLMServer, tmp_path: Path) -> dict[str, Any]:
    folder = {"weights_dir": str(tmp_path / "adapters")}
    return deep_merge(on(tree, server, tmp_path, engine=folder), LORA)


def assert_stops(tree: dict[str, Any], cause: str) -> None:
    """The run ends at the first batch after its first update."""
    with pytest.raises(ModelError, match=cause):
        run_rl(build(RLConfig, tree))
    [file] = Path(tree["run"]["dir"]).rglob("metrics.jsonl")
    assert len(read_rows(file)) <= 1


# Adapters come first: the server must still hold the weights of its folder.


def test_an_adapter_is_served_by_the_name_of_its_version_with_the_numbers_of_vllm(
    tree: dict[str, Any], server: VLLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    sizes: list[int] = []
    load = AdapterToVLLM.load

    def noted(self: Any, weights: Any, version: str) -> Any:
        names.append(version)
        weights = list(weights)
        found = load(self, weights, version)
        assert found and all(".lora_" in name for name in found)
        sizes.append(sum(tensor.nbytes for name, tensor in weights if name in found))
        served = [entry["id"] for entry in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert served[1:] == [version]
        assert [path.name for path in (tmp_path / "adapters").iterdir()] == [version]
        return found

    monkeypatch.setattr(AdapterToVLLM, "load", noted)
    expected = numbers(deep_merge(tree, LORA))
    found = numbers(adapted(tree, server, tmp_path))
    check_equal(found, expected)
    # the weights that the run starts with came twice
    assert [row["engine/update_bytes"] for row in found] == [sum(sizes[:3]), *sizes[3:]]
    # of the weights that the run starts with, twice, and after each step
    assert [name.rpartition("-")[2] for name in names] == ["v0", "v0", "v1", "v2", "v3"]
    ahead = deep_merge(adapted(tree, server, tmp_path), AHEAD)
    two = train(ahead, tmp_path / "two", "launch.processes=2")
    folder = {"run": {"dir": str(tmp_path / "ahead")}}
    check_equal(two, numbers(deep_merge(deep_merge(deep_merge(tree, LORA), AHEAD), folder)))
    assert not list((tmp_path / "adapters").iterdir())


def never_loaded(monkeypatch: pytest.MonkeyPatch, sender: AdapterToVLLM) -> None:
    ask = sender.client.ask

    def lost(method: str, path: str, *given: Any, **more: Any) -> Any:
        return {} if path == "/v1/load_lora_adapter" else ask(method, path, *given, **more)

    monkeypatch.setattr(sender.client, "ask", lost)


def of_the_old_adapter(monkeypatch: pytest.MonkeyPatch, sender: AdapterToVLLM) -> None:
    ask, old = sender.client.ask, sender._root / sender._versions[-1]

    def stale(method: str, path: str, body: Any = None, **more: Any) -> Any:
        if path == "/v1/load_lora_adapter":
            body = {**body, "lora_path": str(old)}
        return ask(method, path, body, **more)

    monkeypatch.setattr(sender.client, "ask", stale)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(never_loaded, "was not transferred"), (of_the_old_adapter, "Cause: the engine computes")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_stale_adapter_stops_the_run_at_its_first_batch(
    fault: Callable[..., None],
    cause: str,
    tree: dict[str, Any],
    server: VLLMServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = AdapterToVLLM.load

    def loads(self: AdapterToVLLM, weights: Any, version: str) -> Any:
        if version.endswith("v1"):
            fault(monkeypatch, self)
        return load(self, weights, version)

    monkeypatch.setattr(AdapterToVLLM, "load", loads)
    assert_stops(adapted(tree, server, tmp_path), cause)


def test_an_adapter_that_the_server_cannot_serve_is_refused_at_the_start(
    tree: dict[str, Any], server: VLLMServer, tmp_path: Path
) -> None:
    given = adapted(tree, server, tmp_path)
    with pytest.raises(ConfigError, match=r"no DoRA; leave it out, and whole weights are sent"):
        run_rl(build(RLConfig, deep_merge(given, {"model": {"lora": {"dora": True}}})))
    with pytest.raises(ConfigError, match=r"(?s)rank.*--max-lora-rank 64"):
        run_rl(build(RLConfig, deep_merge(given, {"model": {"lora": {"rank": 40}}})))
    with pytest.raises(ConfigError, match=r"load_in_4bit = true.*leave out engine\.weights_dir"):
        run_rl(build(RLConfig, deep_merge(given, {"model": {"load_in_4bit": True}})))


def test_a_run_has_the_numbers_of_vllm_in_its_process_and_leaves_its_weights(
    tree: dict[str, Any], server: VLLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several buckets, and tensors that are larger than one
    monkeypatch.setattr(vllm_weights, "BUCKET", 2**14)
    expected = numbers(tree)
    found = numbers(on(tree, server, tmp_path))
    check_equal(found, expected)
    assert max(row["policy/rollout_logprob_diff"] for row in found) < 1e-5
    assert all(row["engine/update_bytes"] > 0 < row["engine/update_seconds"] for row in found)
    name = httpx.get(f"{server.url}/weight_info").json()["weight_version"]
    assert name.endswith("-v3")
    with pytest.raises(ConfigError, match=r"of another run.*restart it, or leave out"):
        run_rl(build(RLConfig, adapted(tree, server, tmp_path / "other")))


def test_adapters_are_merged_without_a_folder_and_give_the_numbers_of_vllm_in_the_process(
    tree: dict[str, Any], server: VLLMServer, tmp_path: Path
) -> None:
    lora = deep_merge(LORA, {"model": {"lora": {"targets": ["q_proj"]}}})
    given = deep_merge(deep_merge(tree, lora), AHEAD)
    # a part of a fused layer changes, and the frozen ones of its layer must come with it
    expected, served = numbers(given), on(given, server, tmp_path)
    check_equal(numbers(served), expected)
    check_equal(train(served, tmp_path / "two", "launch.processes=2"), expected)


@pytest.mark.parametrize("kind", ["tied", "qwen3_moe"])
def test_layers_that_keep_copies_for_their_kernels_follow_each_update(
    kind: str, tree: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An output layer that is the embeddings, and experts: log-probs stay as near as in the first step."""
    folder = tmp_path / "model"
    vllm_model(folder, tied=kind == "tied", kind="qwen2" if kind == "tied" else kind)
    with vllm_server(folder, *TRAINS) as own:
        found = numbers(on(tree, own, tmp_path))
    assert max(row["policy/rollout_logprob_diff"] for row in found) < 1e-5
    assert found[-1]["policy/grad_norm"] > 0
    said = sum("tensors under other names" in one for one in caplog.messages)
    assert said == (kind != "tied")


def skipped(update: Any, group: VLLMGroup, weights: Any, name: str) -> Any:
    return update(group, [], name)


def skipped_and_reported(update: Any, group: VLLMGroup, weights: Any, name: str) -> Any:
    return [checksums(weights)]


def half_done(update: Any, group: VLLMGroup, weights: Any, name: str) -> Any:
    return update(group, [(n, w) for n, w in weights if "layers.1." not in n], name)


def of_the_wrong_layer(update: Any, group: VLLMGroup, weights: Any, name: str) -> Any:
    swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    renamed = []
    for n, w in weights:
        layer = next((part for part in swap if part in n), "")
        renamed.append((n.replace(layer, swap[layer]) if layer else n, w))
    return update(group, renamed, name)


def with_swapped_rows(update: Any, group: VLLMGroup, weights: Any, name: str) -> Any:
    swapped = [(n, torch.cat(w.chunk(2)[::-1]) if "down_proj" in n else w) for n, w in weights]
    return update(group, swapped, name)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (skipped, "were not transferred"),
        (skipped_and_reported, "Cause: the engine computes"),
        (half_done, "were not transferred"),
        (of_the_wrong_layer, "were not transferred"),
        (with_swapped_rows, "were not transferred"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_update_that_goes_wrong_stops_the_run_at_its_first_batch(
    fault: Callable[..., Any],
    cause: str,
    tree: dict[str, Any],
    server: VLLMServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    update, load, versions = VLLMGroup.update, BroadcastToVLLM.load, []

    def noted(self: Any, weights: Any, version: str) -> Any:
        versions.append(version)
        return load(self, weights, version)

    def faulty(self: VLLMGroup, weights: Any, name: str) -> Any:
        if versions[-1].endswith("v1"):
            return fault(update, self, list(weights), name)
        return update(self, weights, name)

    monkeypatch.setattr(BroadcastToVLLM, "load", noted)
    monkeypatch.setattr(VLLMGroup, "update", faulty)
    assert_stops(on(tree, server, tmp_path), cause)


def test_weights_that_another_run_sends_meanwhile_end_the_run(
    tree: dict[str, Any], server: VLLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = BroadcastToVLLM.load

    def replaced(self: Any, weights: Any, version: str) -> Any:
        found = load(self, weights, version)
        if version.endswith("v1"):
            body = {"new_version": "another-9"}
            httpx.post(f"{server.url}/update_weight_version", json=body)
        return found

    monkeypatch.setattr(BroadcastToVLLM, "load", replaced)
    with pytest.raises(ModelError, match=r"holds the weights 'another-9' in place of"):
        run_rl(build(RLConfig, on(tree, server, tmp_path)))


def test_a_server_that_a_run_left_in_its_update_answers_nobody_until_the_next_run_sends_all_weights(
    tree: dict[str, Any], server: VLLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = numbers(on(tree, server, tmp_path / "whole"))
    send, sent = VLLMGroup._send, []

    def ends(self: VLLMGroup, slot: int, layout: Any) -> Any:
        sent.append(slot)
        if len(sent) == 8:
            raise KeyboardInterrupt
        return send(self, slot, layout)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_weights, "BUCKET", 2**14)
        patch.setattr(VLLMGroup, "_send", ends)
        with pytest.raises(KeyboardInterrupt):
            run_rl(build(RLConfig, on(tree, server, tmp_path / "ended")))
    assert httpx.get(f"{server.url}/is_paused").json()["is_paused"]
    with pytest.raises(ConfigError, match=r"is paused: a run updates its weights, or ended"):
        run_rl(build(RLConfig, adapted(tree, server, tmp_path / "adapters")))
    check_equal(numbers(on(tree, server, tmp_path / "next")), expected)


def test_a_server_killed_while_it_generates_and_during_an_update_changes_no_number(
    tree: dict[str, Any], server: VLLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = deep_merge(tree, {"sampling": {"max_new_tokens": 40}})
    expected = numbers(on(given, server, tmp_path / "whole"))
    send, kills = VLLMGroup._send, []

    def restart() -> None:
        server.kill()
        kills.append(time.monotonic())
        server.start()

    def sends(self: VLLMGroup, slot: int, layout: Any) -> Any:
        found = send(self, slot, layout)
        updates.append(1)
        if len(updates) == 5 and not kills:
            # the next bucket of this update meets no server
            restart()
        return found

    updates: list[int] = []
    monkeypatch.setattr(vllm_weights, "BUCKET", 2**16)
    monkeypatch.setattr(VLLMGroup, "_send", sends)
    timer = threading.Timer(0.0, lambda: None)
    load = BroadcastToVLLM.load

    def loads(self: Any, weights: Any, version: str) -> Any:
        nonlocal timer
        found = load(self, weights, version)
        if version.endswith("v2"):
            # in the middle of the responses that follow
            timer = threading.Timer(0.1, restart)
            timer.start()
        return found

    monkeypatch.setattr(BroadcastToVLLM, "load", loads)
    found = numbers(on(given, server, tmp_path))
    timer.join()
    assert len(kills) == 2
    check_equal(found, expected)
    assert json.dumps(found).count("engine/weights_resent") >= 1


@pytest.mark.parametrize("way", ["tensor", "data"])
def test_all_processes_of_a_server_get_the_weights_and_have_the_numbers_of_one(
    way: str, tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[VLLMGroup] = []
    update = VLLMGroup.update

    def noted(self: VLLMGroup, *given: Any) -> Any:
        groups.append(self)
        received = update(self, *given)
        assert len(received) == 2 and received[0] == received[1]
        return received

    monkeypatch.setattr(VLLMGroup, "update", noted)
    expected = numbers(tree)
    with vllm_server(tmp_path / "model", *TRAINS, f"--{way}-parallel-size", "2") as server:
        found = numbers(on(tree, server, tmp_path))
        counts = httpx.get(f"{server.url}/metrics").text
    check_equal(found, expected)
    if way == "data":
        # three prompts of four responses a step: whole groups, one of them more to the first replica
        lines = [one for one in counts.splitlines() if "request_success_total{" in one]
        done = [
            sum(float(one.split()[-1]) for one in lines if f'engine="{k}"' in one) for k in "01"
        ]
        # a few requests more ask for the weights at the start
        assert [count // 12 for count in sorted(done)] == [1, 2]
    assert len(groups) == 4 and len(set(groups)) == 1
    assert max(row["policy/rollout_logprob_diff"] for row in found) < 1e-5
