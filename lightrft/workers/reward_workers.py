"""Scoring in workers: each holds a scorer, with reward processes of its own."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from typing import Any

from lightrft.config.reward import RewardConfig
from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.rewards.base import Scoring
from lightrft.rewards.scorer import Scorer
from lightrft.types import Prompt, Rollout
from lightrft.workers.worker_group import Crew, Limits, Seat

TURN_SECONDS = 0.05
"""How long a worker waits for an answer to be scored before it hears what else there is."""
LOOK_SECONDS = 0.002
TRIES = 3
"""Workers that may be lost with a rollout before it counts as failed."""

Outcome = dict[str, Any]
"""The fields of a rollout that scoring fills."""


def scorer_host(config: RewardConfig) -> ScorerHost:
    """What a worker makes."""
    return ScorerHost(Scorer(config))


class ScorerHost:
    """A scorer in its worker, for one or more that ask it."""

    def __init__(self, scorer: Scoring) -> None:
        self.scorer = scorer
        self._asked: dict[int, tuple[str, int, Rollout]] = {}
        self._done: defaultdict[str, list[tuple[int, Outcome]]] = defaultdict(list)

    def exchange(self, client: str, rollouts: Sequence[tuple[int, Rollout]], seconds: float) -> list[tuple[int, Outcome]]:
        """Take the numbered ``rollouts`` of ``client``; what is scored of his by number, waiting up to ``seconds`` for something."""
        for number, rollout in rollouts:
            self._asked[id(rollout)] = client, number, rollout
            self.scorer.submit(rollout)
        ends = time.monotonic() + seconds
        while True:
            for rollout in self.scorer.results(wait=False):
                whose, number, _ = self._asked.pop(id(rollout))
                self._done[whose].append((number, outcome_of(rollout)))
            if self._done[client] or time.monotonic() >= ends:
                return self._done.pop(client)
            time.sleep(LOOK_SECONDS)

    def check_sources(self, sources: Iterable[str]) -> None:
        self.scorer.check_sources(sources)


def outcome_of(rollout: Rollout) -> Outcome:
    """What scoring has made of ``rollout``."""
    return {name: getattr(rollout, name) for name in ("reward", "terms", "weights", "failed")}


@dataclass(slots=True, eq=False)
class _Desk(Seat):
    """A worker, what it has been given and has not scored, by number, and what of that it has not been told yet."""

    asked: dict[int, Rollout] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)


class RemoteScorer:
    """``Scoring`` over workers that hold a ``ScorerHost`` each. What a lost worker had not scored is scored elsewhere; a rollout that
    ``TRIES`` workers were lost with comes back as failed. Raises ``WorkerError`` when workers cannot be kept alive."""

    def __init__(self, workers: Sequence[Worker], limits: Limits) -> None:
        self.crew = Crew(workers, limits)
        self.client = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._desks = [_Desk(worker) for worker in workers]
        self._tries: dict[int, int] = {}
        self._waiting: deque[tuple[int, Rollout]] = deque()
        self._done: deque[Rollout] = deque()
        self._sources: set[str] = set()

    @property
    def pending(self) -> int:
        """Rollouts submitted and not yet given back by ``results``."""
        return len(self._done) + len(self._waiting) + sum(len(desk.asked) for desk in self._desks)

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raises ``RewardError`` naming the data sources for whose rows there is no reward."""
        unknown = set(sources) - self._sources
        if unknown:
            self.crew.ask("check_sources", sorted(unknown))
            self._sources |= unknown

    def submit(self, rollout: Rollout) -> None:
        """Queue ``rollout``. Raises ``RewardError`` when its data source has no terms."""
        self.check_sources([rollout.prompt.data_source])
        rollout.reward, rollout.terms, rollout.weights, rollout.failed = None, {}, {}, ""
        self._waiting.append((next(self._numbers), rollout))
        self._pump()

    def results(self, wait: bool = False) -> Iterator[Rollout]:
        """Rollouts that are scored, each once; with ``wait``, until none is pending."""
        while True:
            self._pump()
            while self._done:
                yield self._done.popleft()
            if not wait or not self.pending:
                return
            self._linger()

    def take_counts(self) -> dict[str, int]:
        """See ``Counting``."""
        return {"restarts": self.crew.take_restarts()}

    def close(self) -> None:
        self.crew.close()

    def _linger(self) -> None:
        calls = [desk.call for desk in self._desks if desk.call is not None]
        if calls:
            wait(calls, timeout=TURN_SECONDS, return_when=FIRST_COMPLETED)
        else:
            time.sleep(TURN_SECONDS)

    def _pump(self) -> None:
        """Take what is there, and pass on what waits."""
        for desk in self._desks:
            self._settle(desk)
        ready = [desk for desk in self._desks if self.crew.ready(desk.worker)]
        while self._waiting and ready:
            number, rollout = self._waiting.popleft()
            desk = min(ready, key=lambda d: len(d.asked))
            desk.asked[number] = rollout
            desk.fresh.append(number)
        for desk in ready:
            if desk.asked and desk.call is None:
                told = without_media([desk.asked[number] for number in desk.fresh])
                self.crew.begin(desk, "exchange", self.client, list(zip(desk.fresh, told, strict=True)), TURN_SECONDS)
                desk.fresh = []

    def _settle(self, desk: _Desk) -> None:
        try:
            found = self.crew.take(desk)
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

    def _lose(self, desk: _Desk, why: str) -> None:
        """Have what ``desk`` was given scored elsewhere."""
        known = set(desk.asked) - set(desk.fresh)
        for number, rollout in reversed(desk.asked.items()):
            self._tries[number] = self._tries.get(number, 0) + (number in known)
            if self._tries[number] < TRIES:
                self._waiting.appendleft((number, rollout))
            else:
                rollout.failed = f"{TRIES} scoring workers were lost with it (the last: {why})"
                self._done.append(rollout)
        desk.asked.clear()
        desk.fresh.clear()


def without_media(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Copies that share what a reward may read, and leave behind what it does not."""
    prompts: dict[int, Prompt] = {}
    copies = []
    for rollout in rollouts:
        p = rollout.prompt
        prompt = prompts.setdefault(id(p), replace(p, media={}, attachments=()))
        copies.append(replace(rollout, prompt=prompt))
    return copies
