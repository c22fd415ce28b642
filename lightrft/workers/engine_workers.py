"""Engines in workers, each with weights of its own, that stand for all ranks of a run."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrft.config.model import ModelConfig
from lightrft.config.strategy import EngineConfig, SamplingConfig, StrategyConfig
from lightrft.distributed.process_group import ALONE, Ranks
from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.engines.base import Fingerprint, never
from lightrft.engines.native import Drawing, NativeEngine, check_requests, checksums
from lightrft.engines.weight_transport import Inbox
from lightrft.models.decoding.kv_decoder import Decoder
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.rollout.serialization import pack_rollout, unpack_rollout
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Request, Rollout
from lightrft.utils.errors import WorkerError
from lightrft.workers.local import local_frozen
from lightrft.workers.weight_sync import Delivery, Hand, Receiver, led
from lightrft.workers.worker_group import Crew, Limits, Seat

TURN_SECONDS = 0.25
"""How long a worker draws before it tells what is finished and hears what else there is: what a stop waits for at most."""
LOOK_SECONDS = 0.05
"""Between two looks at whether to stop."""


def engine_host(model: ModelConfig, config: EngineConfig, strategy: StrategyConfig, threads: int) -> EngineHost:
    """What a worker makes: an engine over ``model``, on the device of ``strategy`` with ``threads`` threads."""
    torch.set_num_threads(threads)
    actor = local_frozen(model, SingleStrategy(strategy))
    return EngineHost(NativeEngine(Decoder(actor.model), load_tokenizer(model), config, shared=False))


class EngineHost(Receiver):
    """An engine in its worker: it draws in turns, so that it hears between them."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.inbox = Inbox(engine.decoder.load)
        self._drawings: dict[str, Drawing] = {}

    def draw(self, job: str, requests: Sequence[Request], sampling: SamplingConfig, seconds: float) -> list[dict[str, Any]]:
        """Draw for ``job``, with ``requests`` besides those that it has, for about ``seconds``; what is finished, packed."""
        ends, found = time.monotonic() + seconds, []
        drawing = self._drawings.setdefault(job, Drawing(self.engine, (), sampling))
        drawing.add(requests)
        while drawing.unfinished and time.monotonic() < ends:
            found += drawing.advance(lambda: time.monotonic() >= ends)
        if not drawing.unfinished:
            del self._drawings[job]
        return [pack_rollout(rollout) for rollout in found]

    def abort(self, job: str) -> list[dict[str, Any]]:
        """Give up ``job``: what it has not finished, packed."""
        drawing = self._drawings.pop(job, None)
        return [] if drawing is None else [pack_rollout(rollout) for rollout in drawing.abort()]

    def fingerprint(self) -> Fingerprint:
        """Of the weights as they are."""
        return checksums(self.engine.decoder.parameters())

    def settle(self, version: int) -> Fingerprint:
        """All weights of ``version`` are there."""
        return self.engine.load_weights((), version)

    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    def wake(self) -> None:
        self.engine.wake()


class RemoteEngines:
    """``Engine`` over workers that hold an ``EngineHost`` each. The first rank asks them; on the others the object only takes part in
    what all ranks must do together, and has no workers.

    Requests are handed out prompt by prompt as workers get free. What a lost worker had not answered is asked again, elsewhere, and the
    worker is started anew with the newest weights, which are kept on this machine. Raises ``WorkerError`` when that does not help, or
    engines are lost with the same request again and again, and ``ModelError`` when workers do not hold the same weights.
    """

    of_all = True
    together = 1
    shared = False

    def __init__(self, workers: Sequence[Worker], config: EngineConfig, limits: Limits, hand: Hand, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.delivery = Delivery(workers, limits, hand)
        self._ranks = ranks
        self._losses: Counter[int] = Counter()

    @property
    def crew(self) -> Crew:
        return self.delivery.crew

    @property
    def version(self) -> int:
        return self.delivery.version

    def generate(
        self, requests: Iterable[Request], sampling: SamplingConfig, stopped: Callable[[], bool] = never
    ) -> Iterator[Rollout]:
        """See ``Engine.generate``. Raises ``ResourceError`` at once for a request that ``token_budget`` can never hold."""
        wanted = list(requests)
        check_requests(wanted, sampling, self.config)
        return self._answers(wanted, sampling, stopped)

    def _answers(self, requests: list[Request], sampling: SamplingConfig, stopped: Callable[[], bool]) -> Iterator[Rollout]:
        job = _Job(self.crew, self.config.max_rows, requests, sampling, self._losses)
        try:
            while job.unfinished:
                if stopped():
                    yield from job.abort()
                    return
                yield from job.advance()
        finally:
            job.drop()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """See ``Engine.load_weights``. Called on every rank: to put ``weights`` together may take all of them."""
        return led(self._ranks, weights, lambda stream: self.delivery.hand_over(stream, version))

    def sleep(self, level: int) -> None:
        self._tell("sleep", level)

    def wake(self) -> None:
        self._tell("wake")

    def take_counts(self) -> dict[str, int]:
        """See ``Counting``."""
        return self.delivery.take_counts()

    def close(self) -> None:
        self.delivery.close()

    def _tell(self, method: str, *args: Any) -> None:
        """Have every worker do something; one that is on its way back comes as it was made."""
        self.crew.each(method, *args)


def portions(requests: Sequence[Request], workers: int) -> Iterator[list[Request]]:
    """``requests`` prompt by prompt, cut where one worker would have more than its part of all."""
    most = max(1, math.ceil(len(requests) / max(1, workers)))
    groups: dict[int, list[Request]] = {}
    for request in requests:
        groups.setdefault(id(request.prompt), []).append(request)
    for group in groups.values():
        for first in range(0, len(group), most):
            yield group[first : first + most]


@dataclass(slots=True, eq=False)
class _Desk(Seat):
    """A worker, what it has been given and has not answered, by seed, and what of that it has not been told yet."""

    asked: dict[int, Request] = field(default_factory=dict)
    fresh: list[Request] = field(default_factory=list)


class _Job:
    """One ``generate`` call. ``losses`` counts, by seed, the workers that were lost with a request that nobody has answered."""

    def __init__(
        self, crew: Crew, max_rows: int, requests: Sequence[Request], sampling: SamplingConfig, losses: Counter[int]
    ) -> None:
        self.crew = crew
        self.losses = losses
        self.name = secrets.token_hex(8)
        self.sampling = sampling
        self.most = max_rows + max_rows // 4  # some more than grow at one time, for those that get free within a turn
        self.waiting = deque(portions(requests, len(crew.workers)))
        self.desks = [_Desk(worker) for worker in crew.workers]

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting) or any(desk.asked for desk in self.desks)

    def advance(self) -> list[Rollout]:
        """Hand out what there is room for, and wait a little for answers."""
        self._hand_out()
        calls = [desk.call for desk in self.desks if desk.call is not None]
        if calls:
            wait(calls, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
        else:
            time.sleep(LOOK_SECONDS)
        return [rollout for desk in self.desks for rollout in self._settle(desk, self.crew.take)]

    def abort(self) -> list[Rollout]:
        """What is finished by now, and the rest as it is."""
        found: list[Rollout] = []
        busy = [desk for desk in self.desks if desk.asked and self.crew.ready(desk.worker)]
        for desk in busy:
            found += self._settle(desk, self.crew.outcome)
        for desk in busy:
            if desk.asked:
                self.crew.begin(desk, "abort", self.name)
        for desk in busy:
            found += self._settle(desk, self.crew.outcome)
        left = [*itertools.chain(*self.waiting), *(r for desk in self.desks for r in desk.asked.values())]
        self._forget()
        return found + [r.begun or Rollout(r.prompt, [], [], [], [], "abort", r.seed, r.sample) for r in left]

    def drop(self) -> None:
        """Let the workers forget what nobody waits for any more."""
        for desk in self.desks:
            if desk.asked:
                desk.worker.call("abort", self.name)
        self._forget()

    def _forget(self) -> None:
        self.waiting.clear()
        for desk in self.desks:
            desk.asked.clear()

    def _hand_out(self) -> None:
        ready = [desk for desk in self.desks if self.crew.ready(desk.worker)]
        while self.waiting and ready:
            desk = min(ready, key=lambda d: len(d.asked))
            if len(desk.asked) >= self.most:
                break
            group = self.waiting.popleft()
            desk.asked |= {request.seed: request for request in group}
            desk.fresh += group
        for desk in ready:
            if desk.asked and desk.call is None:
                self.crew.begin(desk, "draw", self.name, desk.fresh, self.sampling, TURN_SECONDS)
                desk.fresh = []

    def _settle(self, desk: _Desk, how: Callable[[Seat], tuple[Any, ...]]) -> list[Rollout]:
        """The answers that the call of ``desk`` brought; with a loss, all that it was given waits again."""
        try:
            found = how(desk)
        except WorkerLost as lost:
            self._lose(desk, str(lost))
            return []
        rollouts = [unpack_rollout(packed, desk.asked.pop(packed["seed"]).prompt) for answers in found for packed in answers]
        for rollout in rollouts:
            self.losses.pop(rollout.seed, None)
        return rollouts

    def _lose(self, desk: _Desk, why: str) -> None:
        """Have others draw what ``desk`` was given. Raises ``WorkerError`` for requests that take their workers with them: those may
        answer others, or turns without an answer, in between, so that nobody's starts in a row come to an end."""
        fresh = {request.seed for request in desk.fresh}
        known = [request for request in desk.asked.values() if request.seed not in fresh]
        self.losses.update(request.seed for request in known)
        self.waiting.extendleft(portions(list(desk.asked.values()), 1))
        desk.asked.clear()
        desk.fresh.clear()
        restarts = self.crew.limits.restarts
        # Later than a worker's starts in a row, which say more of what is wrong.
        if often := [request for request in known if self.losses[request.seed] > restarts + 1]:
            raise WorkerError(
                f"{restarts + 2} engines were lost one after another while they drew the same {len(often)} answers, e.g. to prompt "
                f"{often[0].prompt.id!r} (the last: {desk.worker.name}: {why}), more than launch.ray.restarts = {restarts} bears; see what "
                "the lines above say of it. Where it is memory, lower engine.max_rows, engine.token_budget or the length of answers. The "
                "same command goes on from the last checkpoint"
            )
