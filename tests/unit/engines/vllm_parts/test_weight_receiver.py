"""Weights for a vLLM server: its backend, in a thread, receives and reports them. ``tests/e2e/vllm`` has the real server."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrft.config.engine import EngineConfig
from lightrft.engines.fingerprint import checksums
from lightrft.engines.sending import vllm_weights
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.engines.sending.vllm_weights import BroadcastToVLLM, layer_of
from lightrft.engines.vllm_parts import weight_receiver
from lightrft.engines.vllm_parts.weight_receiver import WeightReceiver
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.utils.http_client.server_client import Unanswered

URL = "http://127.0.0.1:1"


class Model(nn.Module):
    """Layers as vLLM has them: a fused one is filled by its last part, and parts of it are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Tensor] = {}
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls += 1
        self.weights.update(weights)


class Process(WeightReceiver):
    """A process of a server."""

    def __init__(self, rank: int, size: int) -> None:
        self.model, self.device = Model(), torch.device("cpu")
        config = SimpleNamespace(model_type="qwen2")
        self.model_config = SimpleNamespace(dtype=torch.float32, hf_config=config, is_moe=False)
        self.parallel_config = SimpleNamespace(
            rank=rank, world_size=size, data_parallel_index=0, pipeline_parallel_size=1
        )
        self.is_active = False


class Server:
    """Answers as vLLM's endpoints do, in place of a ``ServerClient``.

    Attributes:
        before: Called with the path of each request first.
    """

    url = URL
    patience = math.inf

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.name = ""
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda path: None
        self._order = threading.Lock()
        self.restart()

    def restart(self) -> None:
        self.name = "default"
        self.processes = [Process(rank, self.size) for rank in range(self.size)]

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        once: bool = False,
    ) -> Mapping[str, Any]:
        # after an error vLLM closes the connection, so these must not leave it to others
        assert path != "/start_weight_update" or headers == {"Connection": "close"}
        self.calls.append(path)
        self.before(path)
        if path == "/weight_info":
            return {"weight_version": self.name}
        if path == "/get_world_size":
            return {"world_size": self.size}
        if path == "/update_weight_version":
            assert body is not None
            self.name = body["new_version"]
        elif path not in ("/pause?mode=keep", "/resume"):
            self._run(path.removeprefix("/"), body or {})
        return {}

    def _run(self, method: str, body: Mapping[str, Any]) -> None:
        processes = self.processes
        # a broadcast needs all processes at one time
        with self._order, ThreadPoolExecutor(len(processes)) as threads:
            runs = [threads.submit(_do, one, method, body) for one in processes]
        for run in runs:
            if error := run.exception():
                raise Unanswered(f"status 500: {error}")


def _do(process: Process, method: str, body: Mapping[str, Any]) -> None:
    """Call ``method`` as vLLM's ``Worker`` does."""
    if method == "init_weight_transfer_engine":
        process.init_transfer_engine(process.init_info_cls(**body["init_info"]))
    elif method == "shutdown_weight_transfer_engine":
        process.shutdown()
    elif method == "update_weights":
        try:
            process.update_weights(body["update_info"])
        except BaseException:
            process.is_active = False
            raise
    else:
        is_start = method == "start_weight_update"
        if process.is_active == is_start:
            raise RuntimeError(f"{method}: an update is {'already' if is_start else 'not'} active")
        getattr(process, method)()
        process.is_active = is_start


@pytest.fixture(autouse=True)
def reloads(monkeypatch: pytest.MonkeyPatch) -> Generator[list[str]]:
    """The names of vLLM's functions that replace weights, as they are called."""
    called: list[str] = []
    fake = SimpleNamespace(
        initialize_layerwise_reload=lambda model: called.append("initialize"),
        finalize_layerwise_reload=lambda model, config: called.append("finalize"),
    )
    monkeypatch.setattr(weight_receiver, "reload_module", lambda: fake)
    return called


def sender(server: Server, **settings: Any) -> BroadcastToVLLM:
    config = EngineConfig(kind="http", url=URL, **{"timeout": 10.0, **settings})
    refusal = lambda cause: ConfigError(f"refused: {cause}")  # noqa: E731
    return BroadcastToVLLM(server, config, refusal, UpdateCost())  # type: ignore[arg-type]


def model_weights() -> dict[str, Tensor]:
    names = ("q", "k", "norm")
    layers = {
        f"model.layers.{n}.{name}.weight": torch.randn(4, 6) for n in range(2) for name in names
    }
    return {"model.embed.weight": torch.randn(9, 6), **layers, "lm_head.weight": torch.randn(9, 6)}


@pytest.mark.parametrize("size", [1, 2])
def test_every_process_gets_all_weights_in_buckets_and_reports_what_it_received(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "BUCKET", 256)
    server, weights = Server(size), model_weights()
    sending = sender(server)
    assert sending.load(weights.items(), "run-1") == checksums(weights.items())
    for process in server.processes:
        assert all(torch.equal(process.model.weights[name], weights[name]) for name in weights)
    assert server.calls.count("/update_weights") > 3
    assert server.name == "run-1" and server.calls[-1] == "/resume"
    sending.close()


def test_a_layer_with_a_changed_tensor_is_sent_whole_and_no_other() -> None:
    server, weights = Server(), model_weights()
    sending = sender(server)
    sending.load(weights.items(), "run-1")
    server.processes[0].model.weights.clear()
    changed = {**weights, "model.layers.1.q.weight": torch.ones(4, 6)}
    # only the trained ones may come
    sending.cost.take()
    found = sending.load([("model.layers.1.q.weight", torch.ones(4, 6))], "run-2")
    assert found == checksums(changed.items())
    assert sending.cost.num_bytes == 3 * changed["model.layers.1.q.weight"].nbytes
    assert sorted(server.processes[0].model.weights) == [
        f"model.layers.1.{name}.weight" for name in ("k", "norm", "q")
    ]
    server.processes[0].model.weights.clear()
    sending.load(changed.items(), "run-3")
    assert not server.processes[0].model.weights and server.name == "run-3"
    sending.close()


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.10.self_attn.q_proj.bias", "model.layers.10"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("visual.blocks.0.attn.qkv.weight", "visual.blocks.0"),
        ("lm_head.weight", "lm_head"),
        ("model.norm.weight", "model.norm"),
    ],
)
def test_a_layer_holds_all_tensors_that_vllm_fuses(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_a_restarted_server_gets_all_weights_again() -> None:
    server, weights = Server(), model_weights()
    sending = sender(server)
    sending.load(weights.items(), "run-1")
    assert not sending.check()
    server.restart()
    assert sending.check()
    assert server.name == "run-1"
    assert server.processes[0].model.weights.keys() == weights.keys()
    server.restart()
    new = {name: tensor * 2 for name, tensor in weights.items()}
    # an update of one tensor finds it out too
    sending.load([("lm_head.weight", new["lm_head.weight"])], "run-2")
    assert server.processes[0].model.weights.keys() == weights.keys()
    sending.close()


def test_weights_of_another_run_end_this_one() -> None:
    server = Server()
    sending = sender(server)
    sending.load(model_weights().items(), "run-1")
    server.name = "other-7"
    with pytest.raises(ModelError, match=r"holds the weights 'other-7' in place of 'run-1'"):
        sending.check()
    with pytest.raises(ModelError, match=r"holds the weights 'other-7' in place of 'run-1'"):
        sending.load(model_weights().items(), "run-2")
    sending.close()


def test_an_update_that_breaks_is_repeated_with_all_weights(reloads: list[str]) -> None:
    server, weights = Server(), model_weights()
    sending = sender(server)
    sending.load(weights.items(), "run-1")
    server.processes[0].model.weights.clear()
    reloads.clear()
    breaks = [True]

    def before(path: str) -> None:
        if path == "/update_weights" and breaks and breaks.pop():
            assert server.name == "run-2-incomplete"
            server.processes[0].is_active = False
            raise Unanswered("status 500: broken")

    server.before = before
    assert sending.load([("lm_head.weight", torch.ones(9, 6))], "run-2")
    assert server.processes[0].model.weights.keys() == weights.keys()
    # what the first trial has begun is ended first, or its tensors would count twice
    assert reloads == ["initialize", "finalize", "initialize", "finalize"]
    sending.close()


def test_an_error_without_a_message_is_named_by_its_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    sending = sender(server)
    sending.load(model_weights().items(), "run-1")

    def before(path: str) -> None:
        if path == "/update_weights":
            server.processes[0].is_active = False
            # as ``Future.result`` raises it
            raise TimeoutError

    server.before = before
    with pytest.raises(ModelError, match=r"did not take the weights 'run-2': TimeoutError$"):
        sending.load([("lm_head.weight", torch.ones(9, 6))], "run-2")
    assert f"weights did not reach engine.url = {URL!r} (TimeoutError); all are" in caplog.text
    sending.close()


def test_a_server_that_does_not_join_in_time_is_refused_with_the_class_of_the_error() -> None:
    server = Server()

    def before(path: str) -> None:
        if path == "/init_weight_transfer_engine":
            raise TimeoutError

    server.before = before
    with pytest.raises(ConfigError, match=r"refused: TimeoutError$"):
        sender(server, timeout=60.0).load(model_weights().items(), "run-1")


def test_an_update_that_a_killed_run_left_open_is_ended_first() -> None:
    server, weights = Server(), model_weights()
    server.processes[0].start_weight_update()
    server.processes[0].is_active = True
    sending = sender(server)
    assert sending.load(weights.items(), "run-1") == checksums(weights.items())
    sending.close()


def skipped(load: Any, weights: Any) -> None:
    pass


def changed(load: Any, weights: Any) -> None:
    load([(name, tensor + 1) for name, tensor in weights])


def renamed(load: Any, weights: Any) -> None:
    load([(name.replace("layers.0", "layers.1"), tensor) for name, tensor in weights])


@pytest.mark.parametrize("fault", [skipped, changed, renamed], ids=lambda fault: fault.__name__)
def test_a_tensor_that_does_not_arrive_as_it_was_sent_ends_the_run(
    fault: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = WeightReceiver._load
    server = Server()
    sending = sender(server)
    monkeypatch.setattr(
        WeightReceiver, "_load", lambda self, w: fault(lambda given: load(self, given), w)
    )
    with pytest.raises(ModelError, match=r"'run-1' were not transferred: .* wrong or not at all"):
        sending.load(model_weights().items(), "run-1")
    assert server.name == "run-1-incomplete"
    sending.close()


def test_a_server_of_another_backend_or_device_is_refused_at_once() -> None:
    server = Server()

    def before(path: str) -> None:
        if path == "/init_weight_transfer_engine":
            raise Unanswered("status 500: Weight transfer not configured.")

    server.before = before
    with pytest.raises(ConfigError, match=r"refused: .*Weight transfer not configured"):
        sender(server, timeout=60.0).load(model_weights().items(), "run-1")
    info = weight_receiver.GroupInfo("127.0.0.1", 1, 2, 64, "cuda", 1.0)
    with pytest.raises(ValueError, match="sends weights on cuda, and this server computes on cpu"):
        server.processes[0].init_transfer_engine(info)


def test_a_server_with_a_pipeline_is_refused_at_once_with_the_option_to_use() -> None:
    server = Server(2)
    for process in server.processes:
        process.parallel_config.pipeline_parallel_size = 2
    said = r"refused: .*--pipeline-parallel-size 2: .*start the server with --tensor-parallel-size"
    with pytest.raises(ConfigError, match=said):
        sender(server, timeout=60.0).load(model_weights().items(), "run-1")
