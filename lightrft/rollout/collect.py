"""Prompts to scored groups: generation with scoring beside it, filtering, and refill to the exact number of groups."""

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
from lightrft.rollout.accounting import GREEDY, Collected, Verdict, judge
from lightrft.rollout.serialization import pack_rollout, unpack_rollout
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import Interrupted, RewardError
from lightrft.utils.seeding import request_seed


class Source(Protocol):
    """Where a step's prompts come from. ``carried`` are groups of the step before that this one trains on, ``begun`` those that
    it draws on first."""

    carried: list[list[Rollout]]
    begun: list[list[Rollout]]

    def draw(self, count: int) -> list[Prompt]: ...

    def settle(self, collected: Collected) -> None:
        """Learn from what the step has collected, for those after it."""
        ...


def silent() -> None:
    """For whoever has nobody to tell that the work goes on."""
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
    """Draw and score until, with those carried over from the step before, ``rollout.prompts`` groups pass the filters, or
    ``rollout.max_rounds`` rounds are over. ``ranks`` take part, unless it is those of the strategy."""
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


def _settle(got: Collected, group: list[Rollout], verdict: Verdict, used: bool, config: RLConfig) -> None:
    if config.rollout.partial and any(r.finish_reason == "abort" for r in group):
        got.leave(group)
    elif used or verdict.reason:
        got.add(group, verdict)
    elif config.rollout.carry_over and len(got.carried) < config.rollout.prompts:
        got.carry(group, verdict)
    else:
        got.add(group, Verdict(reason="surplus"))


def check_scored(rollouts: Sequence[Rollout], which: str) -> None:
    """Raises ``RewardError``, with the most common reason, when every one of ``rollouts`` failed: nothing can be learned or said."""
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
    """One list of requests per prompt, each with a seed of its own; with ``greedy``, one for its likeliest answer comes first.
    ``first`` is the place of the first prompt among those that are asked in turn."""
    extra = [GREEDY] if greedy else []
    return [
        [Request(p, request_seed(*seeds, i, s), s, greedy=s == GREEDY) for s in (*extra, *range(samples))]
        for i, p in enumerate(prompts, first)
    ]


def rest_of(group: Sequence[Rollout]) -> list[Request]:
    """Requests for what is not finished of ``group``."""
    return [Request(r.prompt, r.seed, r.sample, greedy=r.sample == GREEDY, begun=r) for r in group if r.finish_reason == "abort"]


def paused(requests: Sequence[Sequence[Request]], tokens: int | None) -> list[list[Request]]:
    """``requests`` that grow by at most ``tokens`` tokens each."""
    if tokens is None:
        return [list(group) for group in requests]
    return [[replace(r, pause=r.held + tokens) for r in group] for group in requests]


@dataclass(slots=True)
class Quota:
    """Groups judged in the order in which they were drawn out, until ``wanted`` of them pass."""

    wanted: int
    judge: Callable[[Sequence[Rollout]], Verdict]
    passed: int = 0
    _verdicts: dict[int, Verdict] = field(default_factory=dict)
    _counted: dict[int, None] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.passed >= self.wanted

    def of(self, index: int, group: Sequence[Rollout]) -> Verdict:
        """The verdict on group ``index``; each is judged once."""
        if index not in self._verdicts:
            self._verdicts[index] = self.judge(group)
        return self._verdicts[index]

    def count(self, index: int, group: Sequence[Rollout]) -> None:
        """Take group ``index`` into the quota, if it passes."""
        if not self.of(index, group).reason:
            self.passed += 1
            self._counted[index] = None

    @property
    def counted(self) -> list[int]:
        """The groups taken into the quota, in that order."""
        return list(self._counted)

    def uses(self, index: int) -> bool:
        """Whether a group that passes is one of those wanted: all are where the quota was not met."""
        return not self.met or index in self._counted


@dataclass(slots=True)
class Drawn:
    """Answers that are there already, in the place of an engine."""

    rollouts: list[Rollout]

    @staticmethod
    def of(
        engine: Engine,
        requests: Sequence[Sequence[Request]],
        sampling: SamplingConfig,
        timers: Timers,
        sign: Callable[[], None],
    ) -> Drawn:
        """Those of ``engine``, which nothing stops; ``sign`` is called between tokens."""

        def over() -> bool:
            sign()
            return False

        with timers("generate"):
            return Drawn(list(engine.generate([r for group in requests for r in group], sampling, over)))

    def generate(
        self, requests: Iterable[Request], sampling: SamplingConfig, stopped: Callable[[], bool] = never
    ) -> Iterator[Rollout]:
        yield from self.rollouts


class Draws(Protocol):
    """Of an engine, what draws answers."""

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
    """Every request answered and scored, group by group in the order asked, each with those that are ``ready`` of it. Scoring runs
    while the rest is still being drawn.

    Once the ``quota`` is met, what is not finished comes back as it is, with finish reason ``abort`` and without a reward. Raises
    ``Interrupted`` when ``stopped`` cut the drawing short. Whatever happens, nothing of it is left with ``scorer``. ``sign`` is called
    between tokens and with every score.
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
    """``scored`` for all ranks: all of them know all groups then. Where each has an engine of its own, each draws its share, and every
    group is finished: which of them a ``quota`` takes is then settled by their order, not by time. Ranks that draw ``together`` draw the
    share of one, and the first of them scores it when all of it is there, not before: none may stop while others go on."""
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
            source = engine if engine.together == 1 else Drawn.of(engine, asked, sampling, timers, sign)
            if ranks.rank % engine.together == 0:
                drawn.extend(scored(source, scorer, asked, sampling, timers, stopped, quota if leading else None, begun, sign))
        finally:
            engine.sleep(1)
        packed = {i: [pack_rollout(r) for r in group] for i, group in zip(places, drawn)}
        return packed, quota.counted if quota is not None and leading else []

    told = patiently(ranks, work)
    if leading:
        return drawn  # the very answers that the quota has judged
    found = {i: group for part, _ in told for i, group in part.items()}
    prompts = [next(r.prompt for r in (*group, *some)) for group, some in zip(requests, ready or [()] * len(requests))]
    groups = [[unpack_rollout(fields, prompt) for fields in found[i]] for i, prompt in enumerate(prompts)]
    if quota is not None:
        for i in told[0][1] if engine.of_all else range(len(groups)):
            if not quota.met:
                quota.count(i, groups[i])
    return groups


class _Flow:
    """Answers on their way: from the engine to scoring, and from there to their groups."""

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
        """An answer as the engine gives it."""
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
        """Take back what is scored; with ``wait``, all of it."""
        for done in self.scorer.results(wait=wait):
            self._place(done)

    def ask(self, quota: Quota) -> None:
        """Judge groups in the order in which they were drawn out, once as many are as could meet ``quota``. Waits for their scores,
        so that what is used does not depend on how fast scoring is."""
        while self._drawn_out and not quota.met and quota.passed + len(self._drawn_out) >= quota.wanted:
            group = self._drawn_out.popleft()
            if self._missing[group]:
                for done in self.scorer.results(wait=True):
                    self._place(done)
                    if not self._missing[group]:
                        break
            quota.count(group, self._in_order(group))

    def result(self) -> list[list[Rollout]]:
        """The groups, each in the order of its samples. Raises ``RuntimeError`` when answers are missing."""
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
