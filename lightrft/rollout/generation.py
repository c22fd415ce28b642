"""Build requests, and generate and score the responses to them on this rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine, never_stop
from lightrft.observability.timers import Timers
from lightrft.rewards.base import RewardScorer
from lightrft.rollout.accounting import GREEDY, FilterResult
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import GenerationInterrupted, RewardError
from lightrft.utils.seeding import derive_seed

LARGEST_REWARD = 1e15
"""Largest absolute reward. The square of a larger one, summed over a step, may exceed float32."""


def no_op() -> None:
    """Do nothing; the default of ``keep_alive``."""
    return


def requests_for(
    prompts: Sequence[Prompt], samples: int, *seeds: int | str, greedy: bool = False, first: int = 0
) -> list[list[Request]]:
    """Build one list of requests per prompt; each request has a distinct seed.

    Args:
        prompts: The prompts.
        samples: Number of responses per prompt.
        seeds: Parts of the seed.
        greedy: Add a request for the greedy response, as the first of each prompt.
        first: Index of the first prompt in the whole sequence of prompts.
    """
    indices = [GREEDY, *range(samples)] if greedy else list(range(samples))
    groups: list[list[Request]] = []
    for i, prompt in enumerate(prompts, first):
        group: list[Request] = []
        for s in indices:
            # From the prompt's index, not from a counter: part of the prompts get the same seeds.
            seed = derive_seed(*seeds, i, s)
            group.append(Request(prompt, seed, s, greedy=s == GREEDY))
        groups.append(group)
    return groups


def unfinished_requests(group: Sequence[Rollout]) -> list[Request]:
    """Return requests that continue the unfinished responses of ``group``."""
    return [
        Request(r.prompt, r.seed, r.sample, greedy=r.sample == GREEDY, partial=r)
        for r in group
        if r.finish_reason == "abort"
    ]


def with_token_budget(
    requests: Sequence[Sequence[Request]], tokens: int | None
) -> list[list[Request]]:
    """Return ``requests`` that pause after at most ``tokens`` further tokens each."""
    if tokens is None:
        return [list(group) for group in requests]
    return [
        [replace(r, pause_after_tokens=r.num_generated + tokens) for r in group]
        for group in requests
    ]


@dataclass(slots=True)
class GroupQuota:
    """Judges groups in the order in which their generation finished, until ``wanted`` of them pass.

    Attributes:
        wanted: Number of groups that must pass.
        judge: Returns the verdict on a group.
        passed: Number of groups that have passed.
    """

    wanted: int
    judge: Callable[[Sequence[Rollout]], FilterResult]
    passed: int = 0
    _verdicts: dict[int, FilterResult] = field(default_factory=dict)
    # A dictionary as a set that keeps its order.
    _counted: dict[int, None] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Return whether enough groups have passed."""
        return self.passed >= self.wanted

    def of(self, index: int, group: Sequence[Rollout]) -> FilterResult:
        """Return the verdict on group ``index``; each group is judged once."""
        if index not in self._verdicts:
            self._verdicts[index] = self.judge(group)
        return self._verdicts[index]

    def count(self, index: int, group: Sequence[Rollout]) -> None:
        """Count group ``index`` towards the quota if it passes."""
        if not self.of(index, group).reason:
            self.passed += 1
            self._counted[index] = None

    def count_in_order(self, order: Iterable[int], groups: Sequence[Sequence[Rollout]]) -> None:
        """Count the groups whose indices are ``order``, one by one, until the quota is met."""
        for index in order:
            if self.met:
                return
            self.count(index, groups[index])

    @property
    def counted(self) -> list[int]:
        """Return the indices of the groups that count towards the quota, in order of judgment."""
        return list(self._counted)

    def uses(self, index: int) -> bool:
        """Return whether a passing group is trained on: every one is while the quota is not met."""
        return not self.met or index in self._counted


def generate_and_score(
    engine: Engine,
    scorer: RewardScorer,
    requests: Sequence[Sequence[Request]],
    sampling: SamplingConfig,
    timers: Timers,
    stopped: Callable[[], bool] = never_stop,
    quota: GroupQuota | None = None,
    ready: Sequence[Sequence[Rollout]] = (),
    keep_alive: Callable[[], None] = no_op,
) -> list[list[Rollout]]:
    """Generate and score a response to every request on this rank; return the groups in order.

    It does not communicate with other ranks, so it may run in a thread. Scoring runs while other
    responses are still being generated. Once the ``quota`` is met, unfinished responses are
    returned with finish reason ``abort`` and without a reward.

    Args:
        engine: Generates the responses.
        scorer: Scores the responses. After an error, no rollout is left in it.
        requests: The requests of each prompt.
        sampling: The sampling settings.
        timers: Record the time of generation and scoring.
        stopped: Returns true when the run must stop.
        quota: Stops generation early once enough groups pass. ``None`` finishes all groups.
        ready: Scored responses of each group from an earlier step, which are added to the group.
        keep_alive: Called between tokens and with every score.

    Raises:
        GenerationInterrupted: If ``stopped`` interrupted generation.
    """

    def over() -> bool:
        keep_alive()
        return stopped() or (quota is not None and quota.met)

    responses = engine.generate(list(chain.from_iterable(requests)), sampling, over)
    return score_groups(responses, scorer, requests, timers, stopped, quota, ready, keep_alive)


def generate_all(
    engine: Engine,
    requests: Sequence[Sequence[Request]],
    sampling: SamplingConfig,
    timers: Timers,
    keep_alive: Callable[[], None],
) -> list[Rollout]:
    """Generate a response to every request, without interruption.

    Ranks that shard one model must call it together, since none may stop before the others.

    Args:
        engine: Generates the responses.
        requests: The requests of each prompt.
        sampling: The sampling settings.
        timers: Record the time of generation.
        keep_alive: Called between tokens.
    """

    def over() -> bool:
        keep_alive()
        return False

    with timers("generate"):
        return list(engine.generate(list(chain.from_iterable(requests)), sampling, over))


def score_groups(
    responses: Iterable[Rollout],
    scorer: RewardScorer,
    requests: Sequence[Sequence[Request]],
    timers: Timers,
    stopped: Callable[[], bool] = never_stop,
    quota: GroupQuota | None = None,
    ready: Sequence[Sequence[Rollout]] = (),
    keep_alive: Callable[[], None] = no_op,
) -> list[list[Rollout]]:
    """Score ``responses`` as they arrive and return the groups in order.

    Args:
        responses: One response to each request, in any order.
        scorer: Scores the responses. After an error, no rollout is left in it.
        requests: The requests of each prompt.
        timers: Record the time of generation and scoring.
        stopped: Returns true when the run must stop.
        quota: Receives finished groups. ``None`` judges none.
        ready: Scored responses of each group from an earlier step, which are added to the group.
        keep_alive: Called with every score.

    Raises:
        GenerationInterrupted: If ``stopped`` interrupted the responses.
    """
    group_scorer = _GroupScorer(scorer, requests, ready, keep_alive)
    try:
        with timers("generate"):
            for rollout in responses:
                group_scorer.take(rollout)
                group_scorer.receive()
                if quota is not None:
                    group_scorer.ask(quota)
        with timers("reward"):
            group_scorer.receive(wait=True)
    except Exception:
        # A rollout left in the scorer would come back in the next call.
        with suppress(RewardError):
            deque(scorer.results(wait=True), maxlen=0)
        raise
    if group_scorer.cut and stopped() and not (quota is not None and quota.met):
        raise GenerationInterrupted
    return group_scorer.result()


class _GroupScorer:
    """Moves responses from the engine to scoring, and from there to their groups."""

    def __init__(
        self,
        scorer: RewardScorer,
        requests: Sequence[Sequence[Request]],
        ready: Sequence[Sequence[Rollout]],
        keep_alive: Callable[[], None],
    ) -> None:
        self.scorer = scorer
        self._keep_alive = keep_alive
        self.groups = [list(group) for group in ready] or [[] for _ in requests]
        self.cut = False
        # By seed: it is distinct for each request, and the response has it too.
        self._group_of: dict[int, int] = {}
        for index, group in enumerate(requests):
            self._group_of |= dict.fromkeys((request.seed for request in group), index)
        self._ungenerated = [len(group) for group in requests]
        self._missing = list(self._ungenerated)
        self._generated: deque[int] = deque()

    def take(self, rollout: Rollout) -> None:
        """Submit a response of the engine for scoring."""
        if rollout.finish_reason == "abort":
            self.cut = True
            self._place(rollout)
            return
        if rollout.failed:
            # nothing was generated that could be scored
            self._place(rollout)
        else:
            self.scorer.submit(rollout)
        group = self._group_of[rollout.seed]
        self._ungenerated[group] -= 1
        if not self._ungenerated[group]:
            self._generated.append(group)

    def receive(self, wait: bool = False) -> None:
        """Collect scored responses; with ``wait``, all of them."""
        for done in self.scorer.results(wait=wait):
            self._place(done)

    def ask(self, quota: GroupQuota) -> None:
        """Judge finished groups in order, once there are enough of them to meet ``quota``.

        Waits for their scores, so that the speed of scoring does not change the result.
        """
        while self._generated and not quota.met:
            # Even if all of them passed, generation could not stop: do not wait for scores yet.
            if quota.passed + len(self._generated) < quota.wanted:
                return
            group = self._generated.popleft()
            self._wait_for(group)
            quota.count(group, self._in_order(group))

    def _wait_for(self, group: int) -> None:
        """Collect scored responses until ``group`` has all of its responses."""
        if not self._missing[group]:
            return
        for done in self.scorer.results(wait=True):
            self._place(done)
            if not self._missing[group]:
                return

    def result(self) -> list[list[Rollout]]:
        """Return the groups, each in the order of its samples.

        Raises ``RuntimeError`` if responses are missing.
        """
        if waiting := sum(self._missing):
            raise RuntimeError(f"{waiting} responses did not come back from generation and scoring")
        return [self._in_order(group) for group in range(len(self.groups))]

    def _in_order(self, group: int) -> list[Rollout]:
        # Scores arrive in any order. Later sums of floats must not depend on it.
        self.groups[group].sort(key=lambda r: r.sample)
        return self.groups[group]

    def _place(self, rollout: Rollout) -> None:
        # Scores may take minutes after the last token, and other ranks wait meanwhile.
        self._keep_alive()
        refuse_huge(rollout)
        group = self._group_of[rollout.seed]
        self.groups[group].append(rollout)
        self._missing[group] -= 1


def refuse_huge(rollout: Rollout) -> None:
    """Mark a response as failed if its reward, or a term of it, is beyond ``LARGEST_REWARD``."""
    of_reward = {name: rollout.terms.get(name, 0.0) for name in rollout.weights}
    for name, value in {"": rollout.reward or 0.0, **of_reward}.items():
        if abs(value) > LARGEST_REWARD and not rollout.failed:
            what = f"the term {name!r}" if name else "the reward"
            rollout.failed = f"{what} is {value:g}, beyond +-{LARGEST_REWARD:g}"
            rollout.reward = None
