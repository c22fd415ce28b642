"""Runs that sample from ``lightrft serve``: they have the numbers of the native engine, and wrong weights end them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import ChatConfig, EvaluateConfig, RLConfig, SFTConfig
from lightrft.engines.native import NativeEngine
from lightrft.engines.weight_transport import WeightBuffer
from lightrft.observability.trackers import read_rows
from lightrft.serving import weight_updates
from lightrft.trainer import rl
from lightrft.trainer.inference import Chat, run_eval
from lightrft.trainer.rl import run_rl
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.utils.http_client import server_client
from tests import warm
from tests.e2e.several import ENVIRONMENT, check_equal, config_file, train
from tests.e2e.test_faults import run_until
from tests.serving_helpers import (
    free_port,
    killing_server,
    model_server,
    serve_process,
    wait_for,
)

KEY = "TEST_KEY_OF_SERVERS"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setitem(ENVIRONMENT, KEY, "secret")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text("secret\n")
    return tmp_path / "keys"


@pytest.fixture
def url(model_folder: Path, keys: Path) -> Iterator[str]:
    with model_server(model_folder, weights_token_file=str(keys)) as (url, _):
        yield url


def served(tree: dict[str, Any], url: str, **over: Any) -> dict[str, Any]:
    engine = {"kind": "http", "url": url, "api_key_env": KEY}
    return deep_merge({**tree, "engine": engine}, over)


def numbers(tree: dict[str, Any]) -> list[dict[str, float]]:
    """Run ``rl`` and return its metrics, without times."""
    config = build(RLConfig, tree)
    run_rl(config)
    rows = read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")
    names = ("reward", "loss", "grad", "tokens/", "kl", "entropy", "step", "response")
    return [{k: v for k, v in row.items() if k.startswith(names)} for row in rows]


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Equal up to the order of sums in float32: the server fills its batches in another order."""
    assert len(found) == len(expected) == 4
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_a_run_over_http_has_the_numbers_of_the_native_engine(
    rl_tree: dict[str, Any], url: str
) -> None:
    expected = numbers(deep_merge(rl_tree, {"run": {"name": "native"}}))
    assert_same(numbers(served(rl_tree, url)), expected)


FOUR_BITS = pytest.param(
    {"lora": {"rank": 4}, "load_in_4bit": True},
    id="4 bits",
    marks=[
        pytest.mark.quant,
        pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
    ],
)


@pytest.mark.parametrize(
    "model", [{"lora": {"rank": 4}}, {"lora": {"rank": 4, "dora": True}}, FOUR_BITS], ids=str
)
def test_adapters_are_sent_as_merged_weights_and_give_the_numbers_of_the_native_engine(
    model: dict[str, Any], rl_tree: dict[str, Any], url: str
) -> None:
    tree = deep_merge(rl_tree, {"model": model, "optimizer": {"lr": 1e-2}})
    expected = numbers(deep_merge(tree, {"run": {"name": "native"}}))
    assert_same(numbers(served(tree, url)), expected)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_server_generates_while_the_policy_trains_with_the_numbers_of_the_native_engine(
    lora: dict[str, Any] | None, rl_tree: dict[str, Any], url: str
) -> None:
    over = {
        "model": {"lora": lora},
        "rollout": {"staleness": 1},
        "algorithm": {"importance_sampling": ["tis"]},
        "optimizer": {"lr": 1e-2},
        "reward": {"terms": [rl_tree["reward"]["terms"][0].replace(":ones", ":varied")]},
    }
    tree = deep_merge(rl_tree, over)
    expected = numbers(deep_merge(tree, {"run": {"name": "native"}}))
    assert_same(numbers(served(tree, url)), expected)
    rows = read_rows(Path(tree["run"]["dir"]) / "run" / "metrics.jsonl")
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1]


@pytest.mark.slow
def test_a_server_that_is_killed_and_restarted_changes_no_number(
    rl_tree: dict[str, Any],
    model_folder: Path,
    keys: Path,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = numbers(deep_merge(rl_tree, {"run": {"name": "native"}}))
    learn = rl.learn

    def learning(context: Any, *rest: Any) -> Any:
        until = time.monotonic() + 300
        while context.step == 1 and len(kills) < 2:  # else the run could be over before
            assert time.monotonic() < until
            time.sleep(0.01)
        return learn(context, *rest)

    monkeypatch.setattr(rl, "learn", learning)
    port, words = free_port(), (f"weights_token_file={keys}", "model.dtype=float32")
    started.append(serve_process(model_folder, port, *words, verb="serve"))
    wait_for(f"http://127.0.0.1:{port}")
    with killing_server(
        model_folder, port, started, most=2, after=0.4, words=words, verb="serve"
    ) as kills:
        tree = served(rl_tree, f"http://127.0.0.1:{port}")
        found = numbers(tree)
    assert len(kills) == 2
    assert_same(found, expected)
    rows = read_rows(Path(tree["run"]["dir"]) / "run" / "metrics.jsonl")
    assert sum(row["engine/retries"] for row in rows) > 0


ENGINE = {"engine": {"kind": "http", "url": "http://127.0.0.1:9"}}


@pytest.mark.parametrize(
    ("verb", "over"),
    [
        ("rl", ENGINE),
        ("rl", {"reward": {"models": [{"url": "http://127.0.0.1:9", "name": "rm"}]}}),
        ("sft", ENGINE),
    ],
    ids=["engine", "reward", "evaluation"],
)
def test_a_run_that_waits_for_its_server_says_so_and_ends_at_sigterm(
    rl_tree: dict[str, Any], tmp_path: Path, started: list[Any], verb: str, over: dict[str, Any]
) -> None:
    tree = rl_tree
    if verb == "sft":
        tree = {name: rl_tree[name] for name in ("model", "data", "reward", "run")}
        tree |= {"batch_size": 5, "train": {"steps": 1}}
        tree["eval"] = {"data": {"sources": rl_tree["data"]["sources"]}, "every": 1}
    file = config_file(deep_merge(tree, over), tmp_path, "waits")
    started.append(warm.Process(["-m", "lightrft", verb, file], ENVIRONMENT))
    [run] = started
    until = time.monotonic() + 300
    while "http://127.0.0.1:9 has not answered for" not in run.said(2):
        assert run.poll() is None and time.monotonic() < until, run.said(2)
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(300) == 143
    assert "SIGTERM: stopping before the first step" in run.said(2)


Fault = Callable[[str, Tensor], "tuple[str, Tensor] | None"]


def skipped(name: str, tensor: Tensor) -> None:
    return None


def half_done(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    return None if "layers.1." in name else (name, tensor)


def of_the_wrong_layer(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    layer = next((part for part in swap if part in name), "")
    return name.replace(layer, swap[layer]) if layer else name, tensor


def with_swapped_shards(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    return name, torch.cat(tensor.chunk(2)[::-1]) if "down_proj" in name else tensor


FAULTS = [skipped, half_done, of_the_wrong_layer, with_swapped_shards]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "targets": ["down_proj"]}])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_weight_update_that_goes_wrong_stops_the_run_at_its_first_batch(
    fault: Fault,
    lora: dict[str, Any] | None,
    rl_tree: dict[str, Any],
    model_folder: Path,
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates: list[int] = []
    begin = weight_updates.WeightUpdates.begin

    def counted(self: Any, call: Any) -> Any:
        updates.append(1)
        return begin(self, call)

    def buffer(load: Callable[..., None]) -> WeightBuffer:
        def faulty(weights: Any) -> None:
            for name, tensor in weights:
                # the first update sends the weights that the run starts with
                arrived = (name, tensor) if len(updates) == 1 else fault(name, tensor)
                if arrived is not None:
                    load([arrived])

        return WeightBuffer(faulty)

    monkeypatch.setattr(weight_updates, "WeightBuffer", buffer)
    monkeypatch.setattr(weight_updates.WeightUpdates, "begin", counted)
    with model_server(model_folder, weights_token_file=str(keys)) as (url, _):
        # rewards that differ, so that the first step changes the weights
        varied = rl_tree["reward"]["terms"][0].replace(":ones", ":varied")
        tree = served(rl_tree, url, reward={"terms": [varied]}, model={"lora": lora})
        with pytest.raises(ModelError, match="were not transferred"):
            run_rl(build(RLConfig, tree))
    assert len(read_rows(Path(tree["run"]["dir"]) / "run" / "metrics.jsonl")) <= 1


def test_a_server_whose_version_lags_stops_the_run(
    rl_tree: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = NativeEngine.load_weights
    monkeypatch.setattr(NativeEngine, "load_weights", lambda self, w, version: load(self, w, 0))
    with pytest.raises(ModelError, match="version 0, and the policy has version 1"):
        run_rl(build(RLConfig, served(rl_tree, url)))


def test_training_on_a_server_that_takes_no_weights_is_refused(
    rl_tree: dict[str, Any], model_folder: Path
) -> None:
    with (
        model_server(model_folder) as (url, _),
        pytest.raises(ConfigError, match=r"takes no new weights.*weights_token_file"),
    ):
        run_rl(build(RLConfig, served(rl_tree, url)))


def test_training_with_a_key_that_may_not_update_is_refused(
    rl_tree: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "another")
    with pytest.raises(
        ConfigError, match=rf"engine\.api_key_env = .{KEY}.*not one of this server.s"
    ):
        run_rl(build(RLConfig, served(rl_tree, url)))


def test_eval_and_chat_over_http_give_what_the_native_engine_gives(
    rl_tree: dict[str, Any], url: str, tmp_path: Path
) -> None:
    shared = {name: rl_tree[name] for name in ("model", "reward")}
    held = {"data": rl_tree["data"], "samples": 2, "sampling": {"max_new_tokens": 5}}
    eval_tree = {**shared, "eval": held, "run": {"dir": str(tmp_path), "name": "a"}}
    local = run_eval(build(EvaluateConfig, eval_tree))
    eval_tree["run"]["name"] = "b"
    assert run_eval(build(EvaluateConfig, served(eval_tree, url))).metrics == pytest.approx(
        local.metrics
    )
    talk = {"model": rl_tree["model"], "sampling": {"max_new_tokens": 4}}
    answer = Chat(build(ChatConfig, served(talk, url))).say("1+1=")
    assert answer.token_ids == Chat(build(ChatConfig, talk)).say("1+1=").token_ids


def test_an_evaluation_of_supervised_training_samples_from_the_trained_weights(
    rl_tree: dict[str, Any], url: str
) -> None:
    sources = rl_tree["data"]["sources"]
    tree = {name: rl_tree[name] for name in ("model", "data", "reward", "optimizer", "log")}
    tree |= {
        "batch_size": 5,
        "train": {"steps": 3},
        "eval": {"data": {"sources": sources}, "every": 1, "sampling": {"max_new_tokens": 5}},
        "run": {**rl_tree["run"], "name": "native"},
    }
    run_sft(build(SFTConfig, tree))
    run_sft(build(SFTConfig, served(tree, url, run={"name": "served"})))
    found: dict[str, list[Any]] = {}
    for name in ("native", "served"):
        files = sorted((Path(rl_tree["run"]["dir"]) / name / "rollouts").glob("*eval*.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        found[name] = [json.loads(line)["token_ids"] for line in lines]
    assert len(found["native"]) == 40
    assert found["served"] == found["native"]


@pytest.mark.slow
def test_two_processes_that_share_a_server_have_the_numbers_of_one(
    uneven_tree: dict[str, Any], url: str, tmp_path: Path
) -> None:
    varied = uneven_tree["reward"]["terms"][0].replace(":ones", ":varied")
    over: dict[str, Any] = {"train": {"steps": 1}, "eval": {"every": 1}}
    over["reward"] = {"terms": [varied]}
    for name, processes in (("one", 1), ("two", 2)):
        train(served(uneven_tree, url, **over), tmp_path, name, processes)
    check_equal(tmp_path / "two", tmp_path / "one")


def ahead_of(tree: dict[str, Any], **over: Any) -> dict[str, Any]:
    """A run whose batches are generated during training, by older weights, and rewarded differently."""
    varied = tree["reward"]["terms"][0].replace(":ones", ":varied")
    more = {
        "rollout": {"staleness": 1},
        "algorithm": {"importance_sampling": ["tis"]},
        "reward": {"terms": [varied]},
        "checkpoint": {"every": 1, "keep": 9},
    }
    return deep_merge(deep_merge(tree, more), over)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "is_killed"),
    [(None, True), pytest.param({"rank": 4}, False, marks=pytest.mark.thorough)],
)
def test_two_processes_train_while_a_server_generates_with_the_numbers_of_the_native_engine(
    lora: dict[str, Any] | None,
    is_killed: bool,
    uneven_tree: dict[str, Any],
    url: str,
    tmp_path: Path,
) -> None:
    tree = ahead_of(uneven_tree, model={"lora": lora})
    train(tree, tmp_path, "native", 2)
    tree = served(tree, url)
    if is_killed:
        ended = run_until(config_file(tree, tmp_path, "served"), "after checkpoint", 2, 0, "kill")
        assert ended.status != 0
    train(tree, tmp_path, "served", 2)
    check_equal(tmp_path / "served", tmp_path / "native")
    rows = read_rows(tmp_path / "served" / "metrics.jsonl")
    assert [row["staleness/max"] for row in rows if "staleness/max" in row] == [0, 1, 1]
