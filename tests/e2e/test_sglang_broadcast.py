"""Weights that a run broadcasts to a server with the protocol of SGLang, also in another process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.engines.sending import sglang_weights
from lightrft.engines.sending.server_calls import address_towards
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.utils.http_client import server_client
from tests import warm
from tests.e2e.command import ROOT
from tests.e2e.test_sglang_engine import FAULTS, answers, assert_fault_stops, on, opened
from tests.serving_helpers import free_port, wait_for
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


def weights_of(server: SGLangServer) -> Weights:
    return {n: t.detach().clone() for n, t in server.generator.engine.decoder.parameters()}


def changed(weights: Weights, *names: str, by: float = 1.1) -> Weights:
    return {n: t * by if n in names or not names else t for n, t in weights.items()}


def by_broadcast(tree: dict[str, Any], url: str, tmp_path: Path, **over: Any) -> dict[str, Any]:
    found = on(tree, url, tmp_path, **over)
    found["engine"]["weights_dir"] = None
    return found


@contextmanager
def in_a_process(folder: Path, port: int) -> Iterator[warm.Process]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = warm.Process(["-m", "tests.sglang_server", str(folder), str(port)], env, folder)
    try:
        wait_for(f"http://127.0.0.1:{port}")
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(300)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_run_trains_on_the_weights_that_it_broadcasts(
    lora: dict[str, Any] | None, rl_tree: dict[str, Any], served: Served, tmp_path: Path
) -> None:
    url, server = served
    over = {} if lora is None else {"model": {"lora": lora}}
    run_rl(build(RLConfig, by_broadcast(rl_tree, url, tmp_path, **over)))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["policy/rollout_logprob_diff"] for row in rows) < 1e-5
    assert server.calls.count("/init_weights_update_group") == 1
    assert "/update_weights_from_disk" not in server.calls
    assert not server.groups


def test_only_changed_tensors_are_sent_in_buckets_of_bounded_size(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = served
    start = weights_of(server)
    largest = max(tensor.nbytes for tensor in start.values())
    monkeypatch.setattr(sglang_weights, "BUCKET", largest)
    engine = opened(url)
    engine.load_weights(start.items(), 1)
    assert sorted(name for call in server.received for name in call) == sorted(start)
    assert len(server.received) > 2
    assert all(sum(start[n].nbytes for n in call) <= largest for call in server.received)
    server.received.clear()
    names = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    new = changed(start, *names)
    engine.load_weights(new.items(), 2)
    assert sorted(name for call in server.received for name in call) == sorted(names)
    assert all(torch.equal(tensor, new[name]) for name, tensor in weights_of(server).items())
    assert server.version == engine.weights
    engine.close()


def test_unchanged_weights_get_the_name_of_their_version(served: Served) -> None:
    url, server = served
    engine = opened(url)
    engine.load_weights(weights_of(server).items(), 1)
    count = len(server.received)
    engine.load_weights(weights_of(server).items(), 2)
    assert len(server.received) == count and server.version == engine.weights
    assert {v for r in answers(engine).values() for v in r.versions} == {2}


def test_copies_do_not_change_with_the_weights_of_the_trainer(served: Served) -> None:
    url, server = served
    first, trained = weights_of(server), weights_of(server)
    engine = opened(url)
    engine.load_weights(trained.items(), 1)
    for tensor in trained.values():
        tensor.mul_(2)
    engine._sender().resend()
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights_of(server).items())


def test_matrices_are_sent_in_the_dtype_of_the_server(model_folder: Path) -> None:
    with sglang_server(model_folder, dtype="bfloat16") as (url, server):
        dtypes: dict[str, torch.dtype] = {}

        def noted(weights: Weights) -> Weights:
            dtypes.update((name, tensor.dtype) for name, tensor in weights.items())
            return weights

        server.broken = noted
        engine = opened(url)
        engine.load_weights(weights_of(server).items(), 1)
        assert dtypes["lm_head.weight"] == torch.bfloat16
        assert dtypes["model.norm.weight"] == torch.float32


def test_every_process_of_a_server_with_tensor_parallelism_receives_them(
    model_folder: Path,
) -> None:
    with sglang_server(model_folder, tp_size=2) as (url, server):
        engine = opened(url)
        new = changed(weights_of(server))
        # the server compares with its second process
        engine.load_weights(new.items(), 1)
        assert all(torch.equal(tensor, new[name]) for name, tensor in weights_of(server).items())
        engine.close()


@pytest.mark.parametrize("name", ["dp_size", "pp_size"])
def test_a_server_whose_processes_cannot_join_one_group_is_refused(
    name: str, rl_tree: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    with (
        sglang_server(model_folder, **{name: 2}) as (url, _),
        pytest.raises(ConfigError, match=rf"{name} = 2.*set engine\.weights_dir to a folder"),
    ):
        run_rl(build(RLConfig, by_broadcast(rl_tree, url, tmp_path)))


def test_all_weights_are_sent_after_the_server_has_dropped_them(served: Served) -> None:
    url, server = served
    weights = weights_of(server)
    engine = opened(url)
    engine.load_weights(weights.items(), 1)
    engine.sleep(2)
    engine.wake()
    server.received.clear()
    engine.load_weights(weights.items(), 2)
    assert sorted(name for call in server.received for name in call) == sorted(weights)


def test_a_broadcast_that_breaks_is_repeated_with_all_weights(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    url, server = served
    weights = weights_of(server)
    engine = opened(url)
    engine.load_weights(weights.items(), 1)
    server.received.clear()

    async def broken(call: Any) -> object:
        del server.edited["/update_weights_from_distributed"]
        return {"success": False, "message": "Failed to update parameter online: broken pipe."}

    server.edited["/update_weights_from_distributed"] = broken
    new = changed(weights, "model.norm.weight")
    engine.load_weights(new.items(), 2)
    assert "broken pipe.); all are sent again" in caplog.text
    assert sorted(name for call in server.received for name in call) == sorted(weights)
    assert all(torch.equal(tensor, new[name]) for name, tensor in weights_of(server).items())


def test_a_server_that_does_not_join_is_named_with_the_way_out_at_once(served: Served) -> None:
    url, server = served

    async def refused(call: Any) -> object:
        return {"success": False, "message": "no backend of this name"}

    server.edited["/init_weights_update_group"] = refused
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"no backend of this name; set engine\.weights_dir"):
        opened(url).load_weights(weights_of(server).items(), 1)
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("over", [{}, {"optimizer": {"lr": 1e-6}}], ids=["large", "small"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_broadcast_that_goes_wrong_stops_the_run_at_its_first_batch(
    fault: Callable[[Weights], Weights],
    over: dict[str, Any],
    rl_tree: dict[str, Any],
    served: Served,
    tmp_path: Path,
) -> None:
    url, server = served
    tree = by_broadcast(deep_merge(rl_tree, over), url, tmp_path)
    assert_fault_stops(fault, server, tree, tmp_path / "run")


def test_a_changed_matrix_that_the_server_holds_as_before_is_named(served: Served) -> None:
    url, server = served
    engine = opened(url)
    weights = weights_of(server)
    engine.load_weights(weights.items(), 1)
    weights["model.layers.0.self_attn.k_proj.weight"] *= 1.0001
    engine.load_weights(weights.items(), 2)
    server.broken = lambda sent: {}
    weights["model.layers.0.self_attn.k_proj.weight"] *= 1.0001
    with pytest.raises(ModelError, match=r"1 of 1 changed tensors as before.*k_proj.*lost update"):
        engine.load_weights(weights.items(), 3)


def test_a_server_that_shows_no_checksums_is_updated_with_a_warning(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    url, server = served
    server.shows_checksums = False
    engine = opened(url)
    weights = weights_of(server)
    for version in (1, 2, 3):
        engine.load_weights(changed(weights, by=1 + version / 8).items(), version)
    assert sum("does not show checksums" in one for one in caplog.messages) == 1


@pytest.mark.parametrize("about", [{"dtype": "auto"}, {"quantization": "fp8"}], ids=str)
def test_checksums_of_a_type_that_may_not_follow_are_not_asked_for(
    about: dict[str, Any], model_folder: Path
) -> None:
    with sglang_server(model_folder, **about) as (url, server):
        server.shows_checksums = False
        engine = opened(url)
        weights = weights_of(server)
        engine.load_weights(weights.items(), 1)
        server.broken = lambda sent: {}
        engine.load_weights(changed(weights, by=1 + 1e-6).items(), 2)
        assert server.version.endswith("-2")


def test_a_server_in_another_process_receives_them_also_after_it_was_killed(
    model_folder: Path, served: Served
) -> None:
    own, reference = served
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    first = changed(weights_of(reference))
    second = changed(first, "lm_head.weight", by=0.7)
    expected = {}
    for version, weights in ((1, first), (2, second)):
        reference.generator.engine.decoder.load(weights.items())
        expected[version] = {seed: r.token_ids for seed, r in answers(opened(own)).items()}

    def found() -> dict[int, list[int]]:
        return {seed: r.token_ids for seed, r in answers(engine).items()}

    with in_a_process(model_folder, port):
        engine = opened(url)
        engine.load_weights(first.items(), 1)
        assert found() == expected[1]
    with in_a_process(model_folder, port):
        # an answer shows that it was restarted
        assert found() == expected[1]
        assert engine.take_counts()["weights_resent"] == 1
    with in_a_process(model_folder, port):
        # an update of one tensor finds it out
        engine.load_weights(second.items(), 2)
        assert found() == expected[2]
        engine.close()


def test_the_address_is_that_of_the_network_of_the_server() -> None:
    assert address_towards("http://localhost:30000") == "127.0.0.1"
    assert address_towards("http://127.0.0.1:30000/v1") == "127.0.0.1"
