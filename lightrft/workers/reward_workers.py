"""Scoring in remote workers: each has a scorer with reward processes."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace

from lightrft.config.reward import RewardConfig
from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.rewards.base import RewardScorer
from lightrft.rewards.scorer import Scorer
from lightrft.types import Prompt, Rollout
from lightrft.workers.worker_group import FaultPolicy, PendingCall, WorkerGroup

TURN_SECONDS = 0.05
"""Seconds a worker waits for a score before it accepts new rollouts."""
LOOK_SECONDS = 0.002
"""Polling interval for new scores, in seconds."""
TRIES = 3
"""Number of workers that may be lost with a rollout before it counts as failed."""

SCORED = ("reward", "terms", "weights", "failed")
Outcome = dict[str, object]
"""The values of the fields ``SCORED`` of a rollout, by name."""


def reward_scorer_worker(config: RewardConfig) -> RewardScorerWorker:
    """Make the object of a scoring worker."""
    return RewardScorerWorker(Scorer(config))


class RewardScorerWorker:
    """A scorer inside its worker, for one or more clients."""

    def __init__(self, scorer: RewardScorer) -> None:
        self.scorer = scorer
        self._asked: dict[int, tuple[str, int, Rollout]] = {}
        self._done: defaultdict[str, list[tuple[int, Outcome]]] = defaultdict(list)

    def exchange(
        self, client: str, rollouts: Sequence[tuple[int, Rollout]], seconds: float
    ) -> list[tuple[int, Outcome]]:
        """Queue ``rollouts`` of ``client`` and return its outcomes that are ready, by number.

        Args:
            client: name of the calling rank.
            rollouts: new rollouts with their numbers.
            seconds: maximum time to wait for a first outcome.
        """
        for number, rollout in rollouts:
            # The entry holds the rollout too, so that Python cannot reuse its id.
            self._asked[id(rollout)] = client, number, rollout
            self.scorer.submit(rollout)
        ends = time.monotonic() + seconds
        while True:
            for rollout in self.scorer.results(wait=False):
                whose, number, _ = self._asked.pop(id(rollout))
                outcome: Outcome = {name: getattr(rollout, name) for name in SCORED}
                self._done[whose].append((number, outcome))
            if self._done[client] or time.monotonic() >= ends:
                return self._done.pop(client)
            time.sleep(LOOK_SECONDS)

    def check_sources(self, sources: Iterable[str]) -> None:
        """See ``RewardScorer.check_sources``."""
        self.scorer.check_sources(sources)


@dataclass(slots=True, eq=False)
class _WorkerSlot(PendingCall):
    """A worker, its unscored rollouts by number, and the ``fresh`` ones that were not sent to it
    yet.
    """

    asked: dict[int, Rollout] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)


class RewardWorkerGroup:
    """A ``RewardScorer`` over workers with a ``RewardScorerWorker`` each.

    Unscored rollouts of a lost worker are scored by others. A rollout with which ``TRIES`` workers
    were lost is returned as failed. Raises ``WorkerError`` when workers cannot be kept alive.
    """

    def __init__(self, workers: Sequence[Worker], limits: FaultPolicy) -> None:
        self.group = WorkerGroup(workers, limits)
        self.client = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._desks = [_WorkerSlot(worker) for worker in workers]
        self._tries: dict[int, int] = {}
        self._waiting: deque[tuple[int, Rollout]] = deque()
        self._done: deque[Rollout] = deque()
        self._sources: set[str] = set()

    @property
    def pending(self) -> int:
        """The number of rollouts that were submitted and not yet returned by ``results``."""
        return len(self._done) + len(self._waiting) + sum(len(desk.asked) for desk in self._desks)

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise ``RewardError`` with the names of data sources that have no reward."""
        unknown = set(sources) - self._sources
        if unknown:
            self.group.ask("check_sources", sorted(unknown))
            self._sources |= unknown

    def submit(self, rollout: Rollout) -> None:
        """Queue ``rollout``. Raises ``RewardError`` when its data source has no terms."""
        self.check_sources([rollout.prompt.data_source])
        rollout.reward, rollout.terms, rollout.weights, rollout.failed = None, {}, {}, ""
        self._waiting.append((next(self._numbers), rollout))
        self._pump()

    def results(self, wait: bool = False) -> Iterator[Rollout]:
        """Yield scored rollouts, each once. With ``wait``, continue until none is pending."""
        while True:
            self._pump()
            while self._done:
                yield self._done.popleft()
            if not wait or not self.pending:
                return
            calls = [desk.call for desk in self._desks if desk.call is not None]
            if calls:
                wait_for(calls, timeout=TURN_SECONDS, return_when=FIRST_COMPLETED)
            else:
                time.sleep(TURN_SECONDS)  # all workers are being restarted

    def take_counts(self) -> dict[str, int]:
        """See ``HasEventCounts``."""
        return {"restarts": self.group.take_restarts()}

    def close(self) -> None:
        """End the workers."""
        self.group.close()

    def _pump(self) -> None:
        """Collect finished outcomes and assign waiting rollouts to workers."""
        for desk in self._desks:
            self._settle(desk)
        ready = [desk for desk in self._desks if self.group.ready(desk.worker)]
        while self._waiting and ready:
            number, rollout = self._waiting.popleft()
            desk = min(ready, key=lambda d: len(d.asked))
            desk.asked[number] = rollout
            desk.fresh.append(number)
        for desk in ready:
            if desk.asked and desk.call is None:
                told = without_media([desk.asked[number] for number in desk.fresh])
                numbered = list(zip(desk.fresh, told, strict=True))
                self.group.begin(desk, "exchange", self.client, numbered, TURN_SECONDS)
                desk.fresh = []

    def _settle(self, desk: _WorkerSlot) -> None:
        try:
            found = self.group.take(desk)
        except WorkerLost as lost:
            self._lose(desk, str(lost))
            return
        for outcomes in found:
            for number, outcome in outcomes:
                rollout = desk.asked.pop(number)
                self._tries.pop(number, None)
                for name, value in outcome.items():
                    setattr(rollout, name, value)
                self._done.append(rollout)

    def _lose(self, desk: _WorkerSlot, why: str) -> None:
        """Requeue the rollouts of ``desk``. A rollout lost ``TRIES`` times counts as failed."""
        known = set(desk.asked) - set(desk.fresh)
        # Reversed, so that they stand in their old order at the front of the queue.
        for number, rollout in reversed(desk.asked.items()):
            # Rollouts that never reached the worker cannot be the cause of its end.
            self._tries[number] = self._tries.get(number, 0) + (number in known)
            if self._tries[number] < TRIES:
                self._waiting.appendleft((number, rollout))
            else:
                rollout.failed = f"{TRIES} scoring workers were lost with it (the last: {why})"
                self._done.append(rollout)
        desk.asked.clear()
        desk.fresh.clear()


def without_media(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return copies of ``rollouts`` without media, which rewards do not read."""
    prompts: dict[int, Prompt] = {}
    copies = []
    for rollout in rollouts:
        p = rollout.prompt
        prompt = prompts.setdefault(id(p), replace(p, media={}, attachments=()))
        copies.append(replace(rollout, prompt=prompt))
    return copies
