"""Generation engines in remote workers, with weights of their own, shared by all ranks."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.model import PolicyModelConfig
from lightrft.config.strategy import SamplingConfig, StrategyConfig
from lightrft.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.engines.decoder_protocol import CompiledSteps
from lightrft.engines.fingerprint import checksums
from lightrft.engines.native import GenerationBatch, NativeEngine
from lightrft.engines.requests import check_requests
from lightrft.engines.vllm import VLLMBatch, VLLMEngine
from lightrft.engines.weight_transport import WeightBuffer
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.decoding.static_step import CompileCount
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.rollout.serialization import PackedRollout, pack_rollout, unpack_rollout
from lightrft.types import Request, Rollout
from lightrft.utils.device_transfer import release_cached_memory
from lightrft.utils.errors import RESUMES, WorkerError
from lightrft.workers.local_vllm import build_vllm
from lightrft.workers.weight_sync import WeightSync, WeightSyncConfig
from lightrft.workers.worker_group import FaultPolicy, PendingCall, Reply, WorkerGroup

TURN_SECONDS = 0.25
"""Seconds a worker generates before it returns finished responses and takes new requests.

A stop request waits at most this long.
"""
LOOK_SECONDS = 0.05
"""Polling interval for a stop request, in seconds."""


class DrawReply(NamedTuple):
    """The reply of a worker to a call for a job.

    Attributes:
        responses: Packed responses.
        compiled: Counts of its compiled steps. ``None`` where none are compiled.
    """

    responses: list[PackedRollout]
    compiled: CompiledSteps | None


class ResponseBatch(Protocol):
    """Responses in progress, see ``GenerationBatch``."""

    @property
    def unfinished(self) -> bool: ...

    def add(self, requests: Sequence[Request], /) -> None: ...

    def advance(self, stopped: Callable[[], bool] = never_stop, /) -> list[Rollout]: ...

    def abort(self) -> list[Rollout]: ...


class EngineWorker(ABC):
    """An engine inside its worker. It generates in short turns, so other calls run in between."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox = WeightBuffer(self.receive)
        self._drawings: dict[str, ResponseBatch] = {}

    @abstractmethod
    def begin(self, sampling: SamplingConfig) -> ResponseBatch:
        """Return a batch without requests."""

    @abstractmethod
    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights that have arrived."""

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """Return the checksums of the current weights that are known."""

    @abstractmethod
    def settle(self, version: int) -> Fingerprint:
        """Finish the transfer of ``version`` once all its weights have arrived."""

    def draw(
        self, job: str, requests: Sequence[Request], sampling: SamplingConfig, seconds: float
    ) -> DrawReply:
        """Generate for ``job`` for about ``seconds`` and return the finished responses, packed.

        Args:
            job: name of the ``generate`` call.
            requests: new requests, in addition to the unfinished ones of this job.
            sampling: sampling settings of the job.
            seconds: length of the turn.
        """
        ends, found = time.monotonic() + seconds, []
        if job not in self._drawings:
            self._drawings[job] = self.begin(sampling)
        drawing = self._drawings[job]
        drawing.add(requests)
        while drawing.unfinished and time.monotonic() < ends:
            # Turns are short, so that weights and abort requests need not wait for a long response.
            found += drawing.advance(lambda: time.monotonic() >= ends)
        if not drawing.unfinished:
            del self._drawings[job]
        return self._reply(found)

    def abort(self, job: str) -> DrawReply:
        """Abort ``job`` and return its unfinished responses, packed."""
        drawing = self._drawings.pop(job, None)
        # Without it, the job has ended already, or this worker was restarted since.
        return self._reply(drawing.abort() if drawing is not None else [])

    def _reply(self, responses: list[Rollout]) -> DrawReply:
        packed = [pack_rollout(response) for response in responses]
        return DrawReply(packed, self.compiled())

    def compiled(self) -> CompiledSteps | None:
        """Return the counts of compiled steps, or ``None`` where none are compiled."""
        return None

    def weights(self, method: str, *args: object) -> object:
        """Call ``method`` of the inbox, on behalf of the transport, and return its result."""
        return getattr(self.inbox, method)(*args)

    def ping(self) -> None:
        """Do nothing: a reply proves that the worker is alive."""
        return

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``."""
        self.engine.sleep(level)

    def wake(self) -> None:
        """See ``Engine.wake``."""
        self.engine.wake()


class NativeEngineWorker(EngineWorker):
    """A native engine with separate weights."""

    engine: NativeEngine

    def begin(self, sampling: SamplingConfig) -> GenerationBatch:
        return GenerationBatch(self.engine, (), sampling)

    def compiled(self) -> CompiledSteps | None:
        return self.engine.compiled

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.engine.decoder.load(weights)

    def fingerprint(self) -> Fingerprint:
        return checksums(self.engine.decoder.parameters())

    def settle(self, version: int) -> Fingerprint:
        return self.engine.load_weights((), version)


class VLLMEngineWorker(EngineWorker):
    """An engine vLLM. Weights that have arrived are kept until the whole update is there.

    Args:
        engine: The engine.
        keeps: Keep them after the update too, for policies of which only a part is trained and
            sent. vLLM needs all weights of a fused layer in one update.
    """

    engine: VLLMEngine

    def __init__(self, engine: VLLMEngine, keeps: bool) -> None:
        super().__init__(engine)
        self._keeps = keeps
        self._arrived: dict[str, Tensor] = {}

    def begin(self, sampling: SamplingConfig) -> VLLMBatch:
        return VLLMBatch(self.engine, (), sampling)

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._arrived.update(weights)

    def fingerprint(self) -> Fingerprint:
        # vLLM packs its weights, so only those that were sent are known
        return {}

    def settle(self, version: int) -> Fingerprint:
        found = self.engine.load_weights(self._arrived.items(), version)
        if not self._keeps:
            self._arrived = {}
        return found


def vllm_worker(
    model: PolicyModelConfig, config: EngineConfig, _: StrategyConfig
) -> VLLMEngineWorker:
    """Make the object of an engine worker with vLLM.

    Args:
        model: the model to load.
        config: settings of the engine.
    """
    # no weights: vLLM reads them itself
    actor = Actor.load(model, device=torch.device("meta"))
    decoder, tokenizer = KVDecoder(actor.model), load_tokenizer(model)
    engine = build_vllm(model, config, tokenizer, decoder, SINGLE_PROCESS)
    trained = all(parameter.requires_grad for parameter in actor.model.parameters())
    return VLLMEngineWorker(engine, keeps=not trained and not engine.weights.serves_adapters)


class EngineWorkerGroup(Engine):
    """An ``Engine`` over workers with an ``EngineWorker`` each.

    Rank 0 calls the workers. On other ranks the object has no workers, joins collective calls, and
    sends a part of the weights. Requests are assigned prompt by prompt as workers become free. When
    a worker is lost, its unfinished requests are sent to other workers. The worker is restarted
    with the newest weights, which the ranks that send them keep.

    Args:
        workers: the workers. Empty on other ranks than 0.
        config: settings of the engine.
        limits: timeouts and restarts of workers.
        transfer: settings of the weight transfer.
        ranks: all ranks of the run.

    Raises:
        WorkerError: restarts do not help, or engines are repeatedly lost with the same request.
        ModelError: workers do not hold the same weights.
    """

    shared_by_all_ranks = True

    def __init__(
        self,
        workers: Sequence[Worker],
        config: EngineConfig,
        limits: FaultPolicy,
        transfer: WeightSyncConfig,
        ranks: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.config = config
        self._way = transfer.way
        self.delivery = WeightSync(workers, limits, transfer, ranks)
        self._losses: Counter[int] = Counter()
        self._compiled: dict[str, CompiledSteps] = {}

    @property
    def compiled(self) -> CompiledSteps | None:
        """Counts of the compiled steps of all workers. ``None`` where none are compiled."""
        counts = list(self._compiled.values())
        if not counts:
            return None
        return CompileCount(
            graphs=sum(count.graphs for count in counts),
            seconds=sum(count.seconds for count in counts),
            steps=sum(count.steps for count in counts),
            failures=sum(count.failures for count in counts),
            failure=next((count.failure for count in counts if count.failure), ""),
        )

    @property
    def group(self) -> WorkerGroup:
        """The group of workers."""
        return self.delivery.group

    @property
    def version(self) -> int:
        """The version of the newest weights."""
        return self.delivery.version

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Generate a response to each request, and yield it once it is finished. See
        ``Engine.generate``.

        Args:
            requests: requests with a distinct seed each.
            sampling: sampling settings.
            stopped: returns True once generation must stop. Unfinished responses are then returned
                with finish reason ``abort``.

        Raises:
            ResourceError: a request exceeds ``max_cache_tokens``. It is raised at once.
        """
        wanted = list(requests)
        check_requests(wanted, sampling, self.config)
        return self._answers(wanted, sampling, stopped)

    def _answers(
        self, requests: list[Request], sampling: SamplingConfig, stopped: Callable[[], bool]
    ) -> Iterator[Rollout]:
        most = self.config.max_num_seqs
        job = _Job(self.group, most, requests, sampling, self._losses, self._compiled)
        try:
            while job.unfinished:
                if stopped():
                    yield from job.abort()
                    return
                yield from job.advance()
        finally:  # the caller may stop iterating early
            job.drop()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """See ``Engine.load_weights``.

        Every rank must call it, since gathering ``weights`` may be a collective operation.
        """
        self._release_memory()
        return self.delivery.sync(weights, version)

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``. A worker that restarts is skipped, and comes back awake."""
        self.group.each("sleep", level)

    def wake(self) -> None:
        """See ``Engine.wake``."""
        self._release_memory()
        self.group.each("wake")

    def _release_memory(self) -> None:
        """Release cached memory of a device on which workers are about to take memory."""
        if self._way == "shared":
            release_cached_memory()

    def take_counts(self) -> dict[str, float]:
        """See ``HasEventCounts``."""
        return self.delivery.take_counts()

    def close(self) -> None:
        """End the workers."""
        self.delivery.close()


def split_requests(requests: Sequence[Request], workers: int) -> Iterator[list[Request]]:
    """Yield ``requests`` prompt by prompt, in portions of at most one worker's share of all
    requests.
    """
    most = max(1, math.ceil(len(requests) / max(1, workers)))
    groups: dict[int, list[Request]] = {}
    for request in requests:
        # Responses to one prompt stay on one worker, which then computes the prompt once.
        groups.setdefault(id(request.prompt), []).append(request)
    for group in groups.values():
        for first in range(0, len(group), most):
            yield group[first : first + most]


@dataclass(slots=True, eq=False)
class _WorkerSlot(PendingCall):
    """A worker, its unfinished requests by seed, and the ``fresh`` ones that were not sent to it
    yet.
    """

    asked: dict[int, Request] = field(default_factory=dict)
    fresh: list[Request] = field(default_factory=list)


class _Job:
    """One ``generate`` call. ``losses`` counts, by seed, the workers lost with an unfinished
    request. ``compiled`` gets the counts of compiled steps, by the name of the worker.
    """

    def __init__(
        self,
        group: WorkerGroup,
        max_rows: int,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        losses: Counter[int],
        compiled: dict[str, CompiledSteps],
    ) -> None:
        self.group = group
        self.losses = losses
        self.compiled = compiled
        self.name = secrets.token_hex(8)
        self.sampling = sampling
        self.most = max_rows + max_rows // 4  # a surplus fills rows that become free within a turn
        self.waiting = deque(split_requests(requests, len(group.workers)))
        self.desks = [_WorkerSlot(worker) for worker in group.workers]

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting) or any(desk.asked for desk in self.desks)

    def advance(self) -> list[Rollout]:
        """Assign requests to workers with free rows, and wait shortly for responses."""
        self._hand_out()
        calls = [desk.call for desk in self.desks if desk.call is not None]
        if calls:
            wait(calls, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
        else:
            time.sleep(LOOK_SECONDS)
        found: list[Rollout] = []
        for desk in self.desks:
            found += self._settle(desk, self.group.take)
        return found

    def abort(self) -> list[Rollout]:
        """Stop the job and return all responses, finished or not."""
        found: list[Rollout] = []
        busy = [desk for desk in self.desks if desk.asked and self.group.ready(desk.worker)]
        # A worker has one pending call of this job at most, so turns must end before ``abort``.
        for desk in busy:
            found += self._settle(desk, self.group.outcome)
        # All are called before the first is waited for: they abort at the same time.
        for desk in busy:
            if desk.asked:
                self.group.begin(desk, "abort", self.name)
        for desk in busy:
            found += self._settle(desk, self.group.outcome)
        # Those that no worker has begun, and those of workers that were lost meanwhile.
        left = list(itertools.chain(*self.waiting))
        for desk in self.desks:
            left += desk.asked.values()
        self._forget()
        for r in left:
            # A response that continues an earlier one keeps what it had.
            empty = Rollout(r.prompt, [], [], [], [], "abort", r.seed, r.sample)
            found.append(r.partial or empty)
        return found

    def drop(self) -> None:
        """Abort the job on the workers without waiting for a result."""
        for desk in self.desks:
            if desk.asked:
                desk.worker.call("abort", self.name)
        self._forget()

    def _forget(self) -> None:
        self.waiting.clear()
        for desk in self.desks:
            desk.asked.clear()

    def _hand_out(self) -> None:
        ready = [desk for desk in self.desks if self.group.ready(desk.worker)]
        while self.waiting and ready:
            desk = min(ready, key=lambda d: len(d.asked))
            if len(desk.asked) >= self.most:  # so are all others, since this one has the fewest
                break
            group = self.waiting.popleft()
            desk.asked |= {request.seed: request for request in group}
            desk.fresh += group
        for desk in ready:
            if desk.asked and desk.call is None:
                self.group.begin(desk, "draw", self.name, desk.fresh, self.sampling, TURN_SECONDS)
                desk.fresh = []

    def _settle(self, desk: _WorkerSlot, how: Callable[[PendingCall], Reply]) -> list[Rollout]:
        """Return the responses from the call of ``desk``. If the worker is lost, requeue its
        requests.
        """
        try:
            found = how(desk)
        except WorkerLost as lost:
            self._lose(desk, str(lost))
            return []
        rollouts = []
        for reply in found:
            if reply.compiled is not None:
                self.compiled[desk.worker.name] = reply.compiled
        for packed in itertools.chain(*(reply.responses for reply in found)):
            # Responses travel without their prompt, which this process has.
            request = desk.asked.pop(packed["seed"])
            rollouts.append(unpack_rollout(packed, request.prompt))
            self.losses.pop(request.seed, None)
        return rollouts

    def _lose(self, desk: _WorkerSlot, why: str) -> None:
        """Requeue the requests of ``desk``. Raises ``WorkerError`` if a request keeps losing its
        workers.

        The worker's count of consecutive restarts does not detect this: other requests may finish
        in between and reset it.
        """
        # Requests that never reached the worker cannot be the cause of its end.
        fresh = {request.seed for request in desk.fresh}
        known = [request for request in desk.asked.values() if request.seed not in fresh]
        self.losses.update(request.seed for request in known)
        self.waiting.extendleft(split_requests(list(desk.asked.values()), 1))
        desk.asked.clear()
        desk.fresh.clear()
        restarts = self.group.limits.restarts
        # One more than a worker's restarts: that error comes first and describes the cause better.
        often = [request for request in known if self.losses[request.seed] > restarts + 1]
        if often:
            raise WorkerError(
                f"{restarts + 2} engines were lost one after another while they generated the "
                f"same {len(often)} responses, e.g. to prompt {often[0].prompt.id!r} (the last: "
                f"{desk.worker.name}: {why}), more than launch.ray.restarts = {restarts}; see "
                "what the lines above say of it. Where it is memory, lower engine.max_num_seqs, "
                "engine.max_cache_tokens or the length of responses. "
                f"{RESUMES}"
            )
