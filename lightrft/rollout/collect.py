"""Generate, score and filter groups, and refill to the exact number of groups."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lightrft.algorithms.requirements import needs_of
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import Ranks, patiently
from lightrft.engines.base import Engine, never
from lightrft.observability.timers import Timers
from lightrft.rewards.base import Scoring
from lightrft.roles import Roles
from lightrft.rollout.accounting import GREEDY, Collected, FilterResult, judge
from lightrft.rollout.serialization import pack_rollout, unpack_rollout
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import Interrupted, RewardError
from lightrft.utils.seeding import request_seed


class Source(Protocol):
    """The source of a step's prompts.

    Attributes:
        carried: Complete groups of the step before, which this step trains on.
        begun: Unfinished groups of the step before, which this step continues first.
    """

    carried: list[list[Rollout]]
    begun: list[list[Rollout]]

    def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts."""
        ...

    def settle(self, collected: Collected) -> None:
        """Update the source from the groups that a step has collected."""
        ...


def silent() -> None:
    """Do nothing; the default of ``sign``."""
    return


def collect(
    roles: Roles,
    config: RLConfig,
    step: int,
    source: Source,
    timers: Timers,
    stopped: Callable[[], bool] = never,
    ranks: Ranks | None = None,
) -> Collected:
    """Generate and score groups until ``rollout.prompts`` groups pass the filters.

    Groups carried over from the step before count too. Stops after ``rollout.max_rounds`` rounds.

    Args:
        roles: The engine and the scorer.
        config: The settings of the run.
        step: Number of completed steps; determines the seeds.
        source: Source of prompts and of carried groups.
        timers: Record the time of generation and scoring.
        stopped: Returns true when the run must stop.
        ranks: The process group that shares the work. ``None`` uses all ranks of the strategy.

    Raises:
        Interrupted: If ``stopped`` interrupted generation.
        RewardError: If every response failed to be scored.
    """
    ranks = roles.strategy.ranks if ranks is None else ranks
    got = Collected()
    got.take_in(source.carried)
    waiting = deque(source.begun)
    needs, asked = needs_of(config.algorithm), config.rollout
    least = 2 if "groups" in needs else 1
    while len(got.groups) < asked.prompts and got.rounds < asked.max_rounds:
        missing = asked.prompts - len(got.groups)
        wanted = math.ceil(missing * asked.oversample) - len(got.begun)
        if wanted <= 0:
            break
        begun = [waiting.popleft() for _ in range(min(wanted, len(waiting)))]
        prompts = source.draw(wanted - len(begun)) if wanted > len(begun) else []
        seeds = (config.run.seed, step, got.rounds)
        fresh = requests_for(prompts, asked.samples, *seeds, greedy="greedy" in needs)
        requests = paused([*map(rest_of, begun), *fresh], asked.step_tokens)
        ready = [[r for r in group if r.finish_reason != "abort"] for group in begun] + [[] for _ in fresh]
        quota = Quota(missing, lambda group: judge(group, config, least))
        # Without oversampling every group is needed, so that none is cut short.
        limit = quota if len(requests) > missing else None
        groups = scored_by_all(ranks, roles.engine, roles.scorer, requests, config.sampling, timers, stopped, limit, ready)
        got.rounds += 1
        for group in begun:
            got.go_on(group)
        for index, group in enumerate(groups):
            _settle(got, group, quota.of(index, group), quota.uses(index), config)
    got.begun += waiting
    check_scored(got.rollouts, f"of step {step + 1}")
    source.settle(got)
    return got


def _settle(got: Collected, group: list[Rollout], verdict: FilterResult, used: bool, config: RLConfig) -> None:
    if config.rollout.partial and any(r.finish_reason == "abort" for r in group):
        got.leave(group)
    elif used or verdict.reason:
        got.add(group, verdict)
    elif config.rollout.carry_over and len(got.carried) < config.rollout.prompts:
        got.carry(group, verdict)
    else:
        got.add(group, FilterResult(reason="surplus"))


def check_scored(rollouts: Sequence[Rollout], which: str) -> None:
    """Raise ``RewardError`` with the most common reason if every rollout failed to be scored."""
    reasons = Counter(r.failed for r in rollouts)
    if rollouts and not reasons[""]:
        ((reason, times),) = reasons.most_common(1)
        raise RewardError(
            f"every answer {which} failed to be scored ({len(rollouts)} in all), {times} of them with: {reason}. "
            "Mend what reward.terms names, or the rows that it reads"
        )


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
    extra = [GREEDY] if greedy else []
    return [
        [Request(p, request_seed(*seeds, i, s), s, greedy=s == GREEDY) for s in (*extra, *range(samples))]
        for i, p in enumerate(prompts, first)
    ]


def rest_of(group: Sequence[Rollout]) -> list[Request]:
    """Return requests that continue the unfinished responses of ``group``."""
    return [Request(r.prompt, r.seed, r.sample, greedy=r.sample == GREEDY, begun=r) for r in group if r.finish_reason == "abort"]


def paused(requests: Sequence[Sequence[Request]], tokens: int | None) -> list[list[Request]]:
    """Return ``requests`` that pause after at most ``tokens`` further tokens each."""
    if tokens is None:
        return [list(group) for group in requests]
    return [[replace(r, pause=r.held + tokens) for r in group] for group in requests]


@dataclass(slots=True)
class Quota:
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

    @property
    def counted(self) -> list[int]:
        """Return the indices of the groups that count towards the quota, in order of judgment."""
        return list(self._counted)

    def uses(self, index: int) -> bool:
        """Return whether a passing group is trained on: every one is while the quota is not met."""
        return not self.met or index in self._counted


@dataclass(slots=True)
class PrecomputedEngine:
    """Responses that already exist, in place of an engine."""

    rollouts: list[Rollout]

    @staticmethod
    def of(
        engine: Engine,
        requests: Sequence[Sequence[Request]],
        sampling: SamplingConfig,
        timers: Timers,
        sign: Callable[[], None],
    ) -> PrecomputedEngine:
        """Generate all responses with ``engine``, without interruption.

        Args:
            engine: Generates the responses.
            requests: The requests of each prompt.
            sampling: The sampling settings.
            timers: Record the time of generation.
            sign: Called between tokens.
        """

        def over() -> bool:
            sign()
            return False

        with timers("generate"):
            return PrecomputedEngine(list(engine.generate([r for group in requests for r in group], sampling, over)))

    def generate(
        self, requests: Iterable[Request], sampling: SamplingConfig, stopped: Callable[[], bool] = never
    ) -> Iterator[Rollout]:
        """Yield the existing responses.

        Args:
            requests: Not used.
            sampling: Not used.
            stopped: Not used.
        """
        yield from self.rollouts


class Draws(Protocol):
    """The part of an engine that generates responses. See ``Engine.generate``."""

    def generate(
        self, requests: Iterable[Request], sampling: SamplingConfig, stopped: Callable[[], bool] = never
    ) -> Iterator[Rollout]: ...


def scored(
    engine: Draws,
    scorer: Scoring,
    requests: Sequence[Sequence[Request]],
    sampling: SamplingConfig,
    timers: Timers,
    stopped: Callable[[], bool] = never,
    quota: Quota | None = None,
    ready: Sequence[Sequence[Rollout]] = (),
    sign: Callable[[], None] = silent,
) -> list[list[Rollout]]:
    """Generate and score a response to every request, and return the groups in order.

    Scoring runs while other responses are still being generated. Once the ``quota`` is met,
    unfinished responses are returned with finish reason ``abort`` and without a reward. After an
    error, no rollout is left in ``scorer``.

    Args:
        engine: Generates the responses.
        scorer: Scores the responses.
        requests: The requests of each prompt.
        sampling: The sampling settings.
        timers: Record the time of generation and scoring.
        stopped: Returns true when the run must stop.
        quota: Stops generation early once enough groups pass. ``None`` finishes all groups.
        ready: Scored responses of each group from an earlier step, which are added to the group.
        sign: Called between tokens and with every score.

    Raises:
        Interrupted: If ``stopped`` interrupted generation.
    """
    flow = _Flow(scorer, requests, ready, sign)

    def over() -> bool:
        sign()
        return stopped() or (quota is not None and quota.met)

    try:
        with timers("generate"):
            for rollout in engine.generate([r for group in requests for r in group], sampling, over):
                flow.take(rollout)
                flow.receive()
                if quota is not None:
                    flow.ask(quota)
        with timers("reward"):
            flow.receive(wait=True)
    except Exception:
        with suppress(RewardError):
            for _ in scorer.results(wait=True):
                pass
        raise
    if flow.cut and stopped() and not (quota is not None and quota.met):
        raise Interrupted
    return flow.result()


def scored_by_all(
    ranks: Ranks,
    engine: Engine,
    scorer: Scoring,
    requests: Sequence[Sequence[Request]],
    sampling: SamplingConfig,
    timers: Timers,
    stopped: Callable[[], bool] = never,
    quota: Quota | None = None,
    ready: Sequence[Sequence[Rollout]] = (),
) -> list[list[Rollout]]:
    """Run ``scored`` on all ranks and return all groups on each of them.

    If each rank has an engine, each generates its part and finishes every group. The order of the
    groups, not time, then determines which groups a ``quota`` uses. If ``engine.together`` ranks
    share one sharded model, they generate the same part. The first of them scores it only after
    generation, since none may stop before the others.

    Args:
        ranks: The process group that shares the work.
        engine: Generates the responses.
        scorer: Scores the responses.
        requests: The requests of each prompt, identical on all ranks.
        sampling: The sampling settings.
        timers: Record the time of generation and scoring.
        stopped: Returns true when the run must stop.
        quota: Number of groups that must pass. ``None`` uses all groups.
        ready: Scored responses of each group from an earlier step.
    """
    if ranks.size == 1:
        return scored(engine, scorer, requests, sampling, timers, stopped, quota, ready)
    leading = engine.of_all and ranks.rank == 0
    places = list(range(len(requests)))
    places = places if leading else places[ranks.rank // engine.together :: ranks.size // engine.together]

    drawn: list[list[Rollout]] = []

    def work(sign: Callable[[], None]) -> tuple[dict[int, list[dict[str, Any]]], list[int]]:
        if engine.of_all and not leading:
            return {}, []
        asked, begun = [requests[i] for i in places], [ready[i] for i in places] if ready else ()
        engine.wake()
        try:
            source = engine if engine.together == 1 else PrecomputedEngine.of(engine, asked, sampling, timers, sign)
            if ranks.rank % engine.together == 0:
                drawn.extend(scored(source, scorer, asked, sampling, timers, stopped, quota if leading else None, begun, sign))
        finally:
            engine.sleep(1)
        packed = {i: [pack_rollout(r) for r in group] for i, group in zip(places, drawn)}
        return packed, quota.counted if quota is not None and leading else []

    told = patiently(ranks, work)
    if leading:
        return drawn  # the same objects that the quota has judged
    found = {i: group for part, _ in told for i, group in part.items()}
    prompts = [next(r.prompt for r in (*group, *some)) for group, some in zip(requests, ready or [()] * len(requests))]
    groups = [[unpack_rollout(fields, prompt) for fields in found[i]] for i, prompt in enumerate(prompts)]
    if quota is not None:
        for i in told[0][1] if engine.of_all else range(len(groups)):
            if not quota.met:
                quota.count(i, groups[i])
    return groups


class _Flow:
    """Moves responses from the engine to scoring, and from there to their groups."""

    def __init__(
        self,
        scorer: Scoring,
        requests: Sequence[Sequence[Request]],
        ready: Sequence[Sequence[Rollout]],
        sign: Callable[[], None],
    ) -> None:
        self.scorer = scorer
        self._sign = sign
        self.groups = [list(group) for group in ready] or [[] for _ in requests]
        self.cut = False
        self._group_of = {request.seed: g for g, group in enumerate(requests) for request in group}
        self._undrawn = [len(group) for group in requests]
        self._missing = list(self._undrawn)
        self._drawn_out: deque[int] = deque()

    def take(self, rollout: Rollout) -> None:
        """Submit a response of the engine for scoring."""
        if rollout.finish_reason == "abort":
            self.cut = True
            self._place(rollout)
            return
        self.scorer.submit(rollout)
        group = self._group_of[rollout.seed]
        self._undrawn[group] -= 1
        if not self._undrawn[group]:
            self._drawn_out.append(group)

    def receive(self, wait: bool = False) -> None:
        """Collect scored responses; with ``wait``, all of them."""
        for done in self.scorer.results(wait=wait):
            self._place(done)

    def ask(self, quota: Quota) -> None:
        """Judge finished groups in order, once there are enough of them to meet ``quota``.

        Waits for their scores, so that the speed of scoring does not change the result.
        """
        while self._drawn_out and not quota.met and quota.passed + len(self._drawn_out) >= quota.wanted:
            group = self._drawn_out.popleft()
            if self._missing[group]:
                for done in self.scorer.results(wait=True):
                    self._place(done)
                    if not self._missing[group]:
                        break
            quota.count(group, self._in_order(group))

    def result(self) -> list[list[Rollout]]:
        """Return the groups, each in the order of its samples.

        Raises ``RuntimeError`` if responses are missing.
        """
        if waiting := sum(self._missing):
            raise RuntimeError(f"{waiting} answers did not come back from generation and scoring")
        return [self._in_order(group) for group in range(len(self.groups))]

    def _in_order(self, group: int) -> list[Rollout]:
        self.groups[group].sort(key=lambda r: r.sample)
        return self.groups[group]

    def _place(self, rollout: Rollout) -> None:
        self._sign()
        group = self._group_of[rollout.seed]
        self.groups[group].append(rollout)
        self._missing[group] -= 1
