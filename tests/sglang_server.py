"""A server that speaks the protocol of SGLang, as its source has it, and computes with a tiny real model.

SGLang itself needs a GPU. What is written here follows ``sglang/srt/entrypoints/http_server.py``, ``managers/io_struct.py``,
``sampling/sampling_params.py``, ``layers/sampler.py`` and the tokenizer manager of SGLang 0.5: log-probs after temperature and before
filters, events with all tokens so far, a response at its limit that ends by length whatever its last token is, ``ignore_eos`` over
``stop_token_ids``, and a version of weights that is a string. It joins a process group as
``sglang.srt.utils.common.init_custom_process_group`` does, by ``rendezvous`` and torch's own helper. As SGLang 0.5.23 it takes tensors
between ``/begin_weight_update`` and ``/end_weight_update`` alone, and unpickles no class but those of shared tensors.

    python -m tests.sglang_server FOLDER PORT

``tests/sglang_package`` starts it as ``sglang.launch_server``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import multiprocessing
import os
import pickle
import re
import sys
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import load_file

from lightrft.config.base import build
from lightrft.config.engine import EngineConfig
from lightrft.config.generation.serving import HTTPConfig, ServeConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.sglang import SGLangEngine
from lightrft.serving.chat.chat_completions import opened
from lightrft.serving.chat.text_generator import Wanted
from lightrft.serving.generation_server import generation_service
from lightrft.serving.http_server import Endpoint, HTTPServer
from lightrft.serving.problems import HTTPCall, HTTPProblem
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.types import Prompt
from lightrft.workers.local_served import own_server_options
from tests.serving_helpers import answering


class SGLangServer:
    """The answers of SGLang.

    Attributes:
        deltas: Events have the new tokens alone (``--incremental-streaming-output``).
        raw: Log-probs are before temperature (``SGLANG_RETURN_ORIGINAL_LOGPROB``).
        deterministic: Seeds have an effect (``--enable-deterministic-inference``).
        released: Memory that is released now.
        calls: Paths of the requests.
        broken: Changes the weights of an update.
        groups: The process groups that it has joined, by name.
        received: Names of the tensors of each broadcast.
        edited: Answers in the place of its own, by path.
        end: Called for a group that it does not know, and for memory that it has not released. SGLang ends then.
        shows_checksums: It answers ``/weights_checker``. Older versions do not.
        sessions: Updates need a session. Versions before 0.5.23 have none.
        in_session: A session is open.
    """

    def __init__(self, folder: Path, deterministic: bool = True, **about: Any) -> None:
        tree = {"model": {"path": str(folder), "dtype": "float32"}, "device": "cpu"}
        service = generation_service(build(ServeConfig, tree), ServerMetrics(), 4096)
        self.generator = service.generator
        self.version = "default"
        self.deltas = self.raw = False
        self.deterministic = deterministic
        self.released: set[str] = set()
        self.calls: list[str] = []
        self.broken: Any = None
        self.about_server = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "dtype": "float32", **about}
        self.groups: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self.received: list[tuple[str, ...]] = []
        self.edited: dict[str, Any] = {}
        self.end: Callable[[], object] = lambda: None
        self.sessions, self.in_session = True, False
        self.shows_checksums = True

    def endpoints(self) -> list[Endpoint]:
        routes = {
            "/generate": self.generate,
            "/tokenize": self.tokenize,
            "/update_weights_from_disk": self.update,
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.receive,
            "/destroy_weights_update_group": self.leave,
            "/update_weights_from_tensor": self.open_handles,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.finish,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.resume,
        }
        shown = {
            "/health": self.health,
            "/v1/models": self.models,
            "/model_info": self.model,
            "/server_info": self.server,
        }
        return [
            Endpoint(("/weights_checker",), self.checksums),
            *(Endpoint((path,), self.noted(path, answer)) for path, answer in routes.items()),
            *(
                Endpoint((path,), answer, "GET", is_open=path == "/health")
                for path, answer in shown.items()
            ),
        ]

    def noted(self, path: str, answer: Any) -> Any:
        async def answered(call: HTTPCall) -> object:
            self.calls.append(path)
            return await self.edited.get(path, answer)(call)

        return answered

    async def health(self, call: HTTPCall) -> object:
        return {}

    async def models(self, call: HTTPCall) -> object:
        entry = {"id": "tiny", "owned_by": "sglang", "max_model_len": self.generator.context}
        return {"object": "list", "data": [entry]}

    async def model(self, call: HTTPCall) -> object:
        return {"model_path": "tiny", "is_generation": True, "weight_version": self.version}

    async def server(self, call: HTTPCall) -> object:
        return {
            "version": "0.5",
            "enable_memory_saver": True,
            **self.about_server,
            "enable_deterministic_inference": self.deterministic,
        }

    async def checksums(self, call: HTTPCall) -> object:
        """Of each parameter, under the names of SGLang's fused layers."""
        if not self.shows_checksums:
            raise HTTPProblem(404, "Not Found")
        assert call.body == {"action": "checksum"}
        held: dict[str, Any] = {}
        for name, tensor in self.generator.engine.decoder.parameters():
            fused = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
            fused = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", fused)
            found = held.setdefault(fused, hashlib.sha256())
            found.update(tensor.detach().contiguous().numpy().tobytes())
        sums = {name: found.hexdigest()[:16] for name, found in held.items()}
        return {"success": True, "message": "Success", "ranks": [{"checksums": sums}]}

    async def tokenize(self, call: HTTPCall) -> object:
        text, special = call.body["prompt"], call.body["add_special_tokens"]
        ids = self.generator.tokenizer(text, add_special_tokens=special)["input_ids"]
        return {"tokens": ids, "count": len(ids), "max_model_len": self.generator.context}

    async def release(self, call: HTTPCall) -> object:
        self.released |= set(call.body["tags"])
        return None

    async def resume(self, call: HTTPCall) -> object:
        if not set(call.body["tags"]) <= self.released:
            self.end()
        self.released -= set(call.body["tags"])
        return None

    async def begin(self, call: HTTPCall) -> object:
        return self.in_turn(begins=True)

    async def finish(self, call: HTTPCall) -> object:
        return self.in_turn(begins=False)

    def in_turn(self, begins: bool) -> object:
        if not self.sessions:
            raise HTTPProblem(404, "Not Found")
        if self.in_session == begins:
            raise HTTPProblem(400, "a weight-update session is already open, or none is")
        self.in_session = begins
        return {"success": True, "message": "Success"}

    def check_session(self) -> None:
        if self.sessions and not self.in_session:
            raise HTTPProblem(400, "must run between begin_weight_update and end_weight_update()")

    async def open_handles(self, call: HTTPCall) -> object:
        self.check_session()
        [payload] = call.body["serialized_named_tensors"]
        data = io.BytesIO(base64.b64decode(payload, validate=True))
        opened = await asyncio.to_thread(SafeUnpickler(data).load)
        # into its own memory, as SGLang's ``load_weights`` does
        weights = {name: tensor.clone() for name, tensor in opened}
        if weights:
            self.received.append(tuple(weights))
        await self.take(call, weights, call.body.get("weight_version"))
        return {"success": True, "message": "Success"}

    async def join(self, call: HTTPCall) -> object:
        given = dict(call.body)
        assert self.about_server["dp_size"] == 1, "dp_size must be 1"
        if self.about_server["tp_size"] == 2:
            self.others[given["group_name"]] = SecondRank(given)
        self.groups[given["group_name"]] = await asyncio.to_thread(
            join, given, given["rank_offset"]
        )
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def receive(self, call: HTTPCall) -> object:
        self.check_session()
        given = dict(call.body)
        if given["group_name"] not in self.groups:
            self.end()
        group, other = self.groups[given["group_name"]], self.others.get(given["group_name"])
        if other is not None:
            other.pipe.send(given)
        try:
            weights = await asyncio.to_thread(receive, given, group)
        except RuntimeError as error:
            raise HTTPProblem(400, f"Failed to update parameter online: {error}.") from error
        if other is not None:
            assert other.pipe.recv() == {
                name: t.double().sum().item() for name, t in weights.items()
            }
        if names := given["names"]:
            self.received.append(tuple(names))
        await self.take(call, weights, given.get("weight_version"))
        return {"success": True, "message": "Succeeded to update parameter online."}

    async def leave(self, call: HTTPCall) -> object:
        group = self.groups.pop(call.body["group_name"], None)
        if group is None:
            raise HTTPProblem(400, "The group to be destroyed does not exist.")
        dist.destroy_process_group(group)
        if (other := self.others.pop(call.body["group_name"], None)) is not None:
            other.process.kill()
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def update(self, call: HTTPCall) -> object:
        files = sorted(Path(call.body["model_path"]).glob("*.safetensors"))
        if not files:
            raise HTTPProblem(400, f"no weights in {call.body['model_path']}")
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        await self.take(call, weights, call.body["weight_version"])
        return {"success": True, "message": "Succeeded to update model weights."}

    async def take(self, call: HTTPCall, weights: dict[str, Any], version: str | None) -> None:
        if "weights" in self.released:
            self.end()
        loop = self.generator.loop
        assert await asyncio.to_thread(loop.hold, "weights are updated", call.deadline)
        if self.broken is not None and weights:
            weights = self.broken(weights)
        self.generator.engine.decoder.load(weights.items())
        self.version = self.version if version is None else version
        loop.release()

    async def generate(self, call: HTTPCall) -> object:
        if self.released or self.in_session:
            raise HTTPProblem(500, f"memory is released: {self.released}")
        given = dict(call.body["sampling_params"])
        seed = given.pop("sampling_seed", 0)
        assert not given.get("ignore_eos") and call.body["return_logprob"]
        sampling = SamplingConfig(**{k: v for k, v in given.items() if k != "ignore_eos"})
        prompt = Prompt("0", call.body["input_ids"])
        wanted = Wanted(sampling, [seed], is_stream=True, has_tokens=True)
        future, stream = self.generator.begin([prompt], wanted, call.deadline)
        assert stream is not None
        if call.body.get("stream"):
            return opened(stream, future, self.events(stream, prompt, sampling))
        async for _ in stream.choices():
            pass
        rollout = stream.rollout(0)
        [row] = self.generator.likely([rollout], len(self.generator.tokenizer))
        scale = 1.0 if self.raw else sampling.temperature
        ids, values = zip(*row.likely[0], strict=True)
        logprobs = (torch.tensor(values) / scale).log_softmax(-1).tolist()
        top = [[[lp, id, None] for lp, id in zip(logprobs, ids, strict=True)][:2]]
        rows = [[lp, id, None] for lp, id in zip(rollout.logprobs, rollout.token_ids, strict=True)]
        return {"meta_info": {**self.about(rows, "length"), "output_top_logprobs": top}}

    async def events(
        self, stream: Any, prompt: Prompt, sampling: SamplingConfig
    ) -> AsyncIterator[object]:
        rows: list[Any] = []
        async for piece in stream.choices():
            ids, logprobs = stream.new_tokens(0)
            new = [[lp, id, None] for lp, id in zip(logprobs, ids, strict=True)]
            rows += new
            reason = piece["finish_reason"]
            if reason == "stop" and len(rows) >= sampling.max_new_tokens:
                reason = "length"
            if new or reason is not None:
                about = self.about(new if self.deltas else rows, reason)
                yield {"text": "", "meta_info": {**about, "completion_tokens": len(rows)}}

    def about(self, rows: list[Any], reason: str | None) -> dict[str, Any]:
        return {
            "id": "0",
            "finish_reason": None if reason is None else {"type": reason},
            "weight_version": self.version,
            "completion_tokens": len(rows),
            "output_token_logprobs": list(rows),
        }


class SafeUnpickler(pickle.Unpickler):
    """Opens handles of tensors. The names are those of SGLang's class that tensors of a CPU may need."""

    ALLOWED: ClassVar = {
        ("multiprocessing.reduction", "_rebuild_partial"),
        ("multiprocessing.resource_sharer", "DupFd"),
        ("functools", "partial"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch", "bfloat16"),
        ("torch", "int64"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_storage_fd"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        ("torch.multiprocessing.reductions", "rebuild_storage_empty"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage_child"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name})")
        return super().find_class(module, name)


def join(given: dict[str, Any], rank: int) -> Any:
    """The group, as every process of SGLang makes it."""
    address = f"tcp://{given['master_address']}:{given['master_port']}"
    limit = c10d.default_pg_timeout
    store, rank, size = next(dist.rendezvous(address, rank, given["world_size"], timeout=limit))
    store.set_timeout(limit)
    name = given["group_name"]
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(given["backend"]),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def receive(given: dict[str, Any], group: Any) -> dict[str, torch.Tensor]:
    """The weights of one call."""
    weights, works = {}, []
    for name, dtype, shape in zip(given["names"], given["dtypes"], given["shapes"], strict=True):
        weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        works.append(dist.broadcast(weights[name], src=0, group=group, async_op=True))
    for work in works:
        work.wait()
    return weights


class SecondRank:
    """Another process of a server with ``--tp-size 2``. It answers with the sum of each tensor."""

    def __init__(self, given: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=self.run, args=(given, end), daemon=True)
        self.process.start()

    @staticmethod
    def run(given: dict[str, Any], pipe: Any) -> None:
        group = join(given, given["rank_offset"] + 1)
        while True:
            weights = receive(pipe.recv(), group)
            pipe.send({name: tensor.double().sum().item() for name, tensor in weights.items()})


@contextmanager
def sglang_server(folder: Path, **settings: Any) -> Generator[tuple[str, SGLangServer]]:
    """Serve the model of ``folder`` in a thread."""
    server = SGLangServer(folder, **settings)
    try:
        with answering(*server.endpoints()) as (url, _):
            yield url, server
    finally:
        server.generator.close()


PACKAGE = Path(__file__).parent / "sglang_package"
"""Must be in the path of Python for ``started_sglang``."""


def started_sglang(folder: Path, tokenizer: Any, **settings: Any) -> SGLangEngine:
    """An engine over a server in a process of its own, as a run without ``engine.url`` starts it."""
    config = EngineConfig(kind="sglang", **settings)
    model = ModelConfig(path=str(folder), dtype="float32")
    options = own_server_options(model, config, torch.device("cpu"))
    return SGLangEngine.start(config, tokenizer, [tokenizer.eos_token_id], options)


if __name__ == "__main__":
    made = SGLangServer(Path(sys.argv[1]))
    made.end = lambda: os._exit(1)
    server = HTTPServer(made.endpoints(), HTTPConfig(port=int(sys.argv[2])), ServerMetrics())
    server.bind()
    server.run()
