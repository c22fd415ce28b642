"""Scoring in remote workers: reward functions with their processes, reward models and judges."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace

import torch

from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.rewards.base import RewardScorer
from lightrft.rewards.scorer import Scorer
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Prompt, Rollout
from lightrft.workers.local import model_scorers
from lightrft.workers.scoring.collecting import CollectingScorer
from lightrft.workers.scoring.judge_scorer import JudgeScorer
from lightrft.workers.scoring.model_scorer import ModelScorer
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


def reward_model_worker(
    reward: RewardConfig, policy: ModelConfig, strategy: StrategyConfig, threads: int
) -> RewardModelWorker:
    """Make the object of a worker with all reward models and judges.

    Args:
        reward: settings of the rewards.
        policy: settings of the policy.
        strategy: settings that give the device.
        threads: number of CPU threads.
    """
    torch.set_num_threads(threads)
    device = SingleStrategy(strategy).device
    return RewardModelWorker(model_scorers(reward, policy, load_tokenizer(policy), device))


class RewardModelWorker:
    """Reward models and judges inside their worker.

    Args:
        scorers: Add terms to rewards, in order.
    """

    def __init__(self, scorers: Sequence[CollectingScorer]) -> None:
        self.scorers = scorers

    def names(self) -> list[str]:
        """Return the names of the terms of reward models."""
        models = [one for one in self.scorers if isinstance(one, ModelScorer)]
        return [model.name for scorer in models for model in scorer.models]

    def score(self, rollouts: Sequence[Rollout]) -> tuple[list[Outcome], dict[str, int]]:
        """Return the outcome of each response, and the events that were counted.

        Args:
            rollouts: Responses with the rewards of functions. All responses to a prompt are there.
        """
        counts: Counter[str] = Counter()
        for scorer in self.scorers:
            # A response that has failed has no reward, whatever the next models say.
            scorer.score([rollout for rollout in rollouts if not rollout.failed])
            # Both kinds of model count some events by the same name.
            counts.update(scorer.take_counts())
        names = (*SCORED, "step_rewards")
        outcomes = [{name: getattr(one, name) for name in names} for one in rollouts]
        return outcomes, dict(counts)


class RemoteModelScorer(CollectingScorer):
    """A scorer that adds the terms of reward models and judges in workers.

    Calls of a lost worker are repeated by another one, since models keep no state. Raises
    ``WorkerError`` when workers cannot be kept alive.

    Args:
        inner: Scores responses by functions.
        reward: Settings of the rewards.
        workers: Workers with a ``RewardModelWorker`` each.
        limits: Timeouts and restarts.
        budget: Number of tokens that are collected before they are scored. Judges compare
            responses, and wait for all of them.
    """

    def __init__(
        self,
        inner: RewardScorer,
        reward: RewardConfig,
        workers: Sequence[Worker],
        limits: FaultPolicy,
        budget: int = 2**17,
    ) -> None:
        super().__init__(inner, None if reward.judges else budget)
        events = [*(ModelScorer.events if reward.models else ())]
        events += JudgeScorer.events if reward.judges else ()
        self._events = events
        self.group = WorkerGroup(workers, limits)

    def names(self) -> list[str]:
        """Return the names of the terms of reward models."""
        return self.group.ask("names")

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """See ``CollectingScorer.score``. Each worker gets whole groups, of about equal size."""
        for rollout in rollouts:
            rollout.step_rewards = []
        parts = _parts(rollouts, len(self.group.workers))
        with ThreadPoolExecutor(len(parts)) as threads:
            answers = list(threads.map(lambda part: self.group.ask("score", part), parts))
        for part, (outcomes, counts) in zip(parts, answers, strict=True):
            self.counts.update(counts)
            for rollout, outcome in zip(part, outcomes, strict=True):
                for name, value in outcome.items():
                    setattr(rollout, name, value)

    def take_counts(self) -> dict[str, int]:
        """See ``HasEventCounts``."""
        found = super().take_counts()
        # The same events as in the ranks, also before the first call.
        found = {**dict.fromkeys(self._events, 0), **found}
        return {**found, "restarts": found.get("restarts", 0) + self.group.take_restarts()}

    def close(self) -> None:
        """See ``RewardScorer.close``. Also ends the workers."""
        super().close()
        self.group.close()


def _parts(rollouts: Sequence[Rollout], count: int) -> list[list[Rollout]]:
    """Split ``rollouts`` into at most ``count`` parts that hold whole groups."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(id(rollout.prompt), []).append(rollout)
    parts: list[list[Rollout]] = [[] for _ in range(min(count, len(groups)))]
    sizes = [0] * len(parts)
    for group in groups.values():
        least = sizes.index(min(sizes))
        parts[least] += group
        sizes[least] += sum(map(len, group))
    return parts
