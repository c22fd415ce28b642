"""Reward models and judges in remote workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.distributed.worker_api import Worker
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.rewards.base import RewardScorer
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Rollout
from lightrft.workers.local import model_scorers
from lightrft.workers.scoring.collecting import CollectingScorer
from lightrft.workers.scoring.judge_scorer import JudgeScorer
from lightrft.workers.scoring.model_scorer import ModelScorer
from lightrft.workers.worker_group import FaultPolicy, WorkerGroup

SCORED = ("reward", "terms", "weights", "failed", "step_rewards")
Outcome = dict[str, object]
"""The values of the fields ``SCORED`` of a rollout, by name."""


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
        outcomes = [{name: getattr(one, name) for name in SCORED} for one in rollouts]
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
