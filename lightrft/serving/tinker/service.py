"""The addresses that tinker's client calls."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrft.config.generation.serving import BatchingConfig, ServeTinkerConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.serving.batcher import Batcher
from lightrft.serving.field_table import RequestFields
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall, HTTPProblem, bad
from lightrft.serving.reward_service import ServedModel
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.serving.tinker.adapters import (
    Adapters,
    AdapterShape,
    SamplingJob,
    Snapshot,
    Trained,
    checkpoint_info,
)
from lightrft.serving.tinker.protobuf import decode
from lightrft.serving.tinker.training_data import loss_of, read_data
from lightrft.serving.tinker.wire import (
    FIELDS,
    Body,
    adam_settings,
    losses_answer,
    read_samples,
    samples_answer,
    tinker_error,
)
from lightrft.serving.work_queue import Work
from lightrft.utils.errors import UserError, first_line

_log = logging.getLogger(__name__)
POLL_SECONDS = 30.0
"""Longest wait for a result, below the 45 seconds of the client."""
EXPIRY_SECONDS = 3600.0
"""Time without a heartbeat after which a session is finished. The client sends one every 10 s."""
KEPT_RESULTS = 1024
"""Number of latest results that are kept after they were fetched."""
KEPT_SNAPSHOTS = 16
"""Number of latest snapshots that are in memory."""
NAME = re.compile(r"[\w-][\w.-]*")
"""A name of a checkpoint, which is a folder."""
PATH = re.compile(r"tinker://([\w:-]+)/(weights|sampler_weights)/([\w-][\w.-]*)")


@dataclass(slots=True)
class Session:
    """A session of a client.

    Attributes:
        about: What the client tells of it, for checkpoints.
        seen: Time of ``time.monotonic`` of its last heartbeat.
        is_finished: It accepts nothing more.
    """

    about: Mapping[str, Any]
    seen: float = field(default_factory=time.monotonic)
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class TrainingClient:
    """A training client: its adapter, and the number of its last request."""

    trained: Trained
    about: Mapping[str, Any]
    last: int = 0


@dataclass(slots=True, eq=False)
class SamplingClient:
    """Weights to sample from: those of a snapshot, or of a checkpoint, or of the base model.

    Attributes:
        path: Path of the checkpoint. ``None`` for none.
        snapshot: Its weights. ``None`` where they are not in memory, or for the base model.
        is_base: It samples from the base model.
    """

    path: str | None = None
    snapshot: Snapshot | None = None
    is_base: bool = False


@dataclass(frozen=True, slots=True)
class SampleJob:
    """A request for samples, with its fields."""

    sampler: SamplingClient
    sampling: SamplingConfig
    samples: SamplingJob
    body: Mapping[str, Any]


Job = SampleJob | Callable[[], object]


class TinkerService:
    """Training clients over one base model, and samplers of their weights.

    Args:
        adapters: The model.
        config: Settings of the server.
        served: Name and digest of the model.
        tokenizer: Folder or name of the tokenizer, for the client.
        metrics: Counters of the server.
    """

    def __init__(
        self,
        adapters: Adapters,
        config: ServeTinkerConfig,
        served: ServedModel,
        tokenizer: str,
        metrics: ServerMetrics,
    ) -> None:
        self.adapters = adapters
        self.config = config
        self.served = served
        self.tokenizer = tokenizer
        self.worker: Batcher[Job] = Batcher(
            self._computed, BatchingConfig(wait_ms=0), metrics, "trains and samples"
        )
        self._sessions: dict[str, Session] = {}
        self._clients: dict[str, TrainingClient] = {}
        self._samplers: dict[str, SamplingClient] = {}
        self._kept: deque[SamplingClient] = deque()
        self._results: dict[str, Future[Any]] = {}
        self._fetched: OrderedDict[str, None] = OrderedDict()

    @property
    def problem(self) -> str:
        """The reason why nothing is computed; empty while requests are answered."""
        return self.worker.problem

    def stop(self) -> None:
        """No request waits for others here."""

    def close(self) -> None:
        """Finish the accepted requests, and stop."""
        self.worker.close()

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses."""
        posts = {
            # One after another: the parts of a call then arrive in their order.
            "client/config": _always({"parallel_fwdbwd_chunks": False}),
            "client/dynamic_config": _always({}),
            "telemetry": _always({"status": "accepted"}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        gets = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._sampler_info,
        }

        def endpoint(name: str, answer: Any, method: str) -> Endpoint:
            fields: RequestFields | None = FIELDS.get(name)
            path = f"/api/v1/{name}"
            return Endpoint((path,), answer, method, error=tinker_error, fields=fields)

        return [
            *(endpoint(name, answer, "POST") for name, answer in posts.items()),
            *(endpoint(name, answer, "GET") for name, answer in gets.items()),
        ]

    # Sessions.

    async def _capabilities(self, call: HTTPCall) -> dict[str, object]:
        model = {
            "model_name": self.served.name,
            "max_context_length": self.served.max_model_len,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    async def _create_session(self, call: HTTPCall) -> dict[str, object]:
        for id, session in self._sessions.items():
            if not session.is_finished and time.monotonic() - session.seen > EXPIRY_SECONDS:
                _log.warning(
                    "session %s had no heartbeat for %g s and is finished: its weights that were "
                    "not saved are gone",
                    id,
                    EXPIRY_SECONDS,
                )
                self._end_session(id)
        id = uuid.uuid4().hex
        told = ("tags", "user_metadata", "display_name")
        self._sessions[id] = Session({name: call.body[name] for name in told if name in call.body})
        return {"session_id": id}

    async def _heartbeat(self, call: HTTPCall) -> dict[str, object]:
        self._session(Body(call.body)["session_id"]).seen = time.monotonic()
        return {}

    async def _finish(self, call: HTTPCall) -> dict[str, object]:
        _log.info("session %s: %s", call.body["session_id"], dict(call.body))
        self._end_session(call.body["session_id"])
        return {}

    def _end_session(self, id: str) -> None:
        self._session(id).is_finished = True
        for name in [name for name in self._results if name.startswith(f"{id}:")]:
            del self._results[name]
        for name in [name for name in self._samplers if name.startswith(f"{id}:")]:
            del self._samplers[name]
        for name in [name for name in self._clients if name.startswith(f"{id}:")]:
            trained = self._clients.pop(name).trained
            self.worker.submit(_alone(lambda trained=trained: self.adapters.remove(trained)))

    # Training.

    async def _create_model(self, call: HTTPCall) -> dict[str, object]:
        body = Body(call.body)
        given = Body(body["lora_config"] or {})
        if given["rank"] < 1:
            raise bad(f"lora_config.rank = {given['rank']}: it must be at least 1")
        names = ("train_attn", "train_mlp", "train_unembed")
        shape = AdapterShape(
            int(given["rank"]), self.config.lora_alpha, **{n: given.get(n, True) for n in names}
        )
        self._check_base(body["base_model"])
        seed = given.get("seed")
        return self._create(body, lambda: self.adapters.add(shape, seed))

    def _create(self, body: Body, make: Callable[[], Trained]) -> dict[str, object]:
        """Queue the creation of a training client by ``make``."""
        session = self._session(body["session_id"])
        id = f"{body['session_id']}:train:{body['model_seq_id']}"
        told = {"session": session.about, "user_metadata": body.get("user_metadata")}

        def create() -> object:
            self._clients[id] = TrainingClient(make(), told)
            return {"model_id": id}

        return {"model_id": id, **self._queue(f"{id}:0", create)}

    async def _info(self, call: HTTPCall) -> dict[str, object]:
        id = Body(call.body)["model_id"]
        data = {
            "arch": self.adapters.actor.text_config.model_type,
            "model_name": self.served.name,
            "tokenizer_id": self.tokenizer,
        }
        return {
            "model_data": data,
            "model_id": id,
            "model_name": self.served.name,
            "is_lora": True,
            "lora_rank": self._client(id).trained.shape.rank,
        }

    async def _forward_backward(self, call: HTTPCall) -> dict[str, object]:
        if not call.data:
            raise bad(
                "forward_backward: send a message of protobuf, as version 0.38 of tinker does"
            )
        body = Body(decode("ForwardBackwardRequest", call.data))
        trained = self._client(body["model_id"]).trained
        backward = not body.get("forward_only", 0)

        def compute() -> object:
            try:
                loss = loss_of(body.get("loss_fn", ""))
                settings = loss.settings(_loss_config(body))
                data = read_data(body["data"], loss, self.adapters.vocabulary)
            except (HTTPProblem, UserError) as error:
                if backward:
                    self.adapters.fail(trained, str(error))
                raise
            return losses_answer(*self.adapters.forward(trained, data, settings, backward=backward))

        return self._in_order(body, compute)

    async def _optim_step(self, call: HTTPCall) -> dict[str, object]:
        body = Body(call.body)
        settings, clip = adam_settings(body["adam_params"] or {})
        trained = self._client(body["model_id"]).trained

        def step() -> object:
            return {"metrics": {"grad_norm": self.adapters.step(trained, settings, clip)}}

        return self._in_order(body, step)

    async def _save_weights(self, call: HTTPCall) -> dict[str, object]:
        body = Body(call.body)
        path = self._new_path(body, "weights")
        folder = self._folder(path)
        return self._in_order(body, self._saving(body, path, folder, optimizer=True))

    async def _save_for_sampler(self, call: HTTPCall) -> dict[str, object]:
        body = Body(call.body)
        if body.get("path") is not None:
            path = self._new_path(body, "sampler_weights")
            folder = self._folder(path)
            return self._in_order(body, self._saving(body, path, folder, optimizer=False))
        trained = self._client(body["model_id"]).trained
        session = body["model_id"].partition(":")[0]
        id = f"{session}:sample:{body['sampling_session_seq_id']}"

        def save() -> object:
            self._add_sampler(id, SamplingClient(snapshot=self.adapters.snapshot(trained)))
            return {"sampling_session_id": id}

        return self._in_order(body, save)

    def _saving(
        self, body: Body, path: str, folder: Path, *, optimizer: bool
    ) -> Callable[[], object]:
        """Return the job that writes a checkpoint.

        Args:
            body: The request.
            path: Path of the checkpoint.
            folder: Its folder.
            optimizer: Write the state of the optimizer too.
        """
        client = self._client(body["model_id"])

        def save() -> object:
            if folder.exists() and not body.get("overwrite"):
                raise bad(f"{path} is there already; take another name, or overwrite=True")
            about = {"client": client.about, "user_metadata": body.get("user_metadata")}
            self.adapters.save(client.trained, folder, about, optimizer=optimizer)
            return {"path": path}

        return save

    async def _load_weights(self, call: HTTPCall) -> dict[str, object]:
        body = Body(call.body)
        folder = self._folder(body["path"])
        optimizer = body["optimizer"]
        if body.get("base_model") is not None:
            self._check_base(body["base_model"])
        if body.get("session_id") is not None:

            def make() -> Trained:
                trained = self.adapters.add(AdapterShape(**checkpoint_info(folder)["shape"]), 0)
                try:
                    self.adapters.load(trained, folder, optimizer=optimizer)
                except BaseException:
                    self.adapters.remove(trained)
                    raise
                return trained

            return self._create(body, make)
        trained = self._client(body["model_id"]).trained

        def load() -> object:
            self.adapters.load(trained, folder, optimizer=optimizer)
            return {"path": body["path"], "model_id": body["model_id"]}

        return self._in_order(body, load)

    async def _weights_info(self, call: HTTPCall) -> dict[str, object]:
        shape = checkpoint_info(self._folder(Body(call.body)["tinker_path"]))["shape"]
        parts = {name: shape[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        base = self.served.name
        return {"base_model": base, "is_lora": True, "lora_rank": shape["rank"], **parts}

    # Sampling.

    async def _create_sampler(self, call: HTTPCall) -> dict[str, object]:
        body = Body(call.body)
        self._session(body["session_id"])
        id = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        base, path = body.get("base_model"), body.get("model_path")
        if base is None and path is None:
            raise bad("give base_model or model_path")
        if base is not None:
            self._check_base(base)
        if path is None:
            self._samplers[id] = SamplingClient(is_base=True)
        else:
            found = await asyncio.to_thread(self.adapters.read, self._folder(path))
            self._add_sampler(id, SamplingClient(path, found))
        return {"sampling_session_id": id}

    def _add_sampler(self, id: str, sampler: SamplingClient) -> None:
        self._samplers[id] = sampler
        self._kept.append(sampler)
        while len(self._kept) > KEPT_SNAPSHOTS:
            self._kept.popleft().snapshot = None

    async def _sampler_info(self, call: HTTPCall) -> dict[str, object]:
        id = call.body["sampler_id"]
        path = self._sampler(id).path
        return {"sampler_id": id, "base_model": self.served.name, "model_path": path}

    async def _sample(self, call: HTTPCall) -> dict[str, object]:
        body = Body(call.body)
        sampler = self._sampler(body["sampling_session_id"])
        room = self.served.max_model_len
        assert room is not None
        samples, sampling = await asyncio.to_thread(
            read_samples, body, self.adapters.vocabulary, room
        )
        name = f"{body['sampling_session_id']}:{body['seq_id']}"
        job = SampleJob(sampler, sampling, samples, body)
        sequences = [f"{name}:{k}" for k in range(len(samples.requests))]
        found = self._queue(name, job, (id(sampler), sampling))
        return {**found, "sample_sequence_ids": sequences}

    def _weights(self, sampler: SamplingClient) -> Snapshot | None:
        """Return the weights of a sampler, which are read again if they are not in memory."""
        if sampler.is_base or sampler.snapshot is not None:
            return sampler.snapshot
        if sampler.path is None:
            raise UserError(
                f"the snapshot of this sampling client is gone: the server keeps the latest "
                f"{KEPT_SNAPSHOTS}; create a new one, or save it by save_weights_for_sampler"
            )
        return self.adapters.read(self._folder(sampler.path))

    # Results.

    def _computed(self, works: Sequence[Work[Job]]) -> list[object]:
        jobs = [work.payload for work in works]
        try:
            return self._results_of(jobs)
        except Exception as error:
            # Each is then computed alone, so that a request fails only by itself.
            if len(jobs) > 1:
                raise
            return [_failure(error)]

    def _results_of(self, jobs: Sequence[Job]) -> list[object]:
        first = jobs[0]
        if not isinstance(first, SampleJob):
            return [first()]
        samples = [job for job in jobs if isinstance(job, SampleJob)]
        found = self.adapters.sample(
            self._weights(first.sampler), first.sampling, [job.samples for job in samples]
        )
        return [samples_answer(job.body, one) for job, one in zip(samples, found, strict=True)]

    def _in_order(self, body: Body, job: Callable[[], object]) -> dict[str, object]:
        """Queue a request of a training client, after all earlier ones."""
        id, number = body["model_id"], body["seq_id"]
        client = self._client(id)
        if f"{id}:{number}" not in self._results and number <= client.last:
            raise bad(f"seq_id = {number} comes after {client.last} of this client: send in order")
        client.last = max(client.last, number)
        return {"model_id": id, **self._queue(f"{id}:{number}", job)}

    def _queue(self, id: str, job: Job, key: Any = None) -> dict[str, object]:
        """Queue a job and return the id of its result. A repeated request is queued once.

        Args:
            id: Id of the request.
            job: The job.
            key: Jobs of equal keys may be computed together. ``None`` for none.
        """
        if id not in self._results:
            work = _alone(job) if key is None else Work(job, 0, float("inf"), key)
            self._results[id] = self.worker.submit(work)
        return {"request_id": id}

    async def _retrieve(self, call: HTTPCall) -> object:
        id = Body(call.body)["request_id"]
        future = self._results.get(id)
        if future is None:
            raise HTTPProblem(
                404,
                f"there is no request {id!r}: its result was fetched, or the server was restarted "
                "since; create the client again, from a checkpoint",
            )
        seconds = min(POLL_SECONDS, self.config.http.timeout / 2)
        await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
        if not future.done():
            raise HTTPProblem(408, f"request {id!r} is not computed yet; ask again")
        self._fetched[id] = None
        if len(self._fetched) > KEPT_RESULTS:
            self._results.pop(self._fetched.popitem(last=False)[0], None)
        return future.result()

    # Names.

    def _session(self, id: str) -> Session:
        session = self._sessions.get(id)
        if session is None:
            raise HTTPProblem(404, f"there is no session {id!r}; was the server restarted since?")
        if session.is_finished:
            raise HTTPProblem(410, f"session {id!r} is finished; create a new ServiceClient")
        return session

    def _client(self, id: str) -> TrainingClient:
        if id not in self._clients:
            raise HTTPProblem(
                404,
                f"there is no training client {id!r}: its session is finished, or the server was "
                "restarted; create it again, from a checkpoint",
            )
        return self._clients[id]

    def _sampler(self, id: str) -> SamplingClient:
        if id not in self._samplers:
            raise HTTPProblem(
                404,
                f"there is no sampling client {id!r}: its session is finished, or the server was "
                "restarted; create it again",
            )
        return self._samplers[id]

    def _check_base(self, name: str) -> None:
        if name != self.served.name:
            raise bad(f"base_model = {name!r}: this server has {self.served.name!r}")

    def _new_path(self, body: Body, kind: str) -> str:
        name = body["path"]
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise bad(f"name = {name!r}: write letters, digits, '_', '-' and '.'")
        return f"tinker://{body['model_id']}/{kind}/{name}"

    def _folder(self, path: str) -> Path:
        """Return the folder of a checkpoint."""
        found = PATH.fullmatch(path)
        if found is None:
            raise bad(
                f"path = {path!r}: it must be tinker://ID/weights/NAME, as save_state returns"
            )
        return Path(self.config.dir).expanduser().joinpath(*found.groups())


def _always(answer: dict[str, object]) -> Callable[[HTTPCall], Awaitable[object]]:
    async def given(call: HTTPCall) -> object:
        return answer

    return given


def _alone(job: Job) -> Work[Job]:
    """Return a work that is computed in its turn, with no other."""
    return Work(job, 0, float("inf"), object())


def _failure(error: Exception) -> dict[str, object]:
    """Return the answer of a request that failed."""
    if isinstance(error, HTTPProblem):
        return tinker_error(error)
    if isinstance(error, UserError):
        return tinker_error(bad(str(error)))
    _log.error("a request failed", exc_info=error)
    return tinker_error(HTTPProblem(500, f"the server failed: {first_line(error)}"))


def _loss_config(body: Mapping[str, Any]) -> dict[str, float | str]:
    """Return ``loss_fn_config`` of a request, which a client sends in two forms."""
    found: dict[str, float | str] = {
        pair.get("key", ""): pair.get("value", 0.0) for pair in body["loss_fn_config"]
    }
    for pair in body["loss_fn_config_v2"]:
        value = pair.get("value", {})
        found[pair.get("key", "")] = value.get("text", value.get("number", 0.0))
    return found
