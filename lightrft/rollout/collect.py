"""Collect the groups of a step: plan rounds of generation, gather their groups and admit them.

A round is planned from the settings and the prompts (``plan_round``), generated and scored by each
rank (``generate_and_score``), gathered over ranks, and filtered, selected and counted (``admit``).
Rounds follow until enough groups have passed.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from lightrft.config.engine import EngineConfig
from lightrft.config.rollout import RolloutConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.distributed.process_group import ProcessGroup, run_with_keepalive
from lightrft.engines.base import Engine, never_stop
from lightrft.observability.timers import Timers
from lightrft.rewards.base import RewardScorer
from lightrft.roles import Roles
from lightrft.rollout.accounting import CollectedRollouts, FilterResult
from lightrft.rollout.generation import (
    GroupQuota,
    generate_all,
    generate_and_score,
    requests_for,
    score_groups,
    unfinished_requests,
    with_token_budget,
)
from lightrft.rollout.serialization import PackedRollout, pack_rollout, unpack_rollout
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import RewardError


class PromptSource(Protocol):
    """The source of a step's prompts.

    Attributes:
        carried: Complete groups of the step before, which this step trains on.
        partial: Unfinished groups of the step before, which this step continues first.
    """

    carried: list[list[Rollout]]
    partial: list[list[Rollout]]

    def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts."""
        ...

    def record_results(self, collected: CollectedRollouts) -> None:
        """Update the source from the groups that a step has collected."""
        ...


@dataclass(frozen=True, slots=True)
class CollectSettings:
    """The settings that decide which groups a step collects.

    Attributes:
        rollout: The settings ``rollout``.
        sampling: The settings ``sampling``.
        judge: Decides which responses of a group are trained on. Called once for each group.
        seed: The setting ``run.seed``.
        engine: The settings ``engine``.
        greedy: Each group has a greedy response too, for its reward alone.
    """

    rollout: RolloutConfig
    sampling: SamplingConfig
    judge: Callable[[Sequence[Rollout]], FilterResult]
    seed: int
    engine: EngineConfig
    greedy: bool = False


@dataclass(slots=True)
class Round:
    """One round of generation.

    Attributes:
        requests: The requests of each group, identical on all ranks.
        begun: Unfinished groups that the first of the ``requests`` continue.
        quota: Decides which groups the step uses.
    """

    requests: list[list[Request]]
    begun: list[list[Rollout]]
    quota: GroupQuota

    @property
    def ready(self) -> list[list[Rollout]]:
        """Return the scored responses of each group from an earlier step."""
        finished = [[r for r in group if r.finish_reason != "abort"] for group in self.begun]
        return finished + [[] for _ in self.requests[len(self.begun) :]]

    @property
    def limit(self) -> GroupQuota | None:
        """Return the quota if it may end generation early.

        Without oversampling every group is needed, so that none is cut short.
        """
        return self.quota if len(self.requests) > self.quota.wanted else None


def collect_rollouts(
    roles: Roles,
    settings: CollectSettings,
    step: int,
    source: PromptSource,
    timers: Timers,
    stopped: Callable[[], bool] = never_stop,
    ranks: ProcessGroup | None = None,
) -> CollectedRollouts:
    """Generate and score groups until ``rollout.prompts_per_step`` groups pass the filters.

    Groups carried over from the step before count too. Stops after ``rollout.max_rounds`` rounds.

    Args:
        roles: The engine and the scorer.
        settings: Decide which groups are collected.
        step: Number of completed steps; determines the seeds.
        source: Source of prompts and of carried groups.
        timers: Record the time of generation and scoring.
        stopped: Returns true when the run must stop.
        ranks: The process group that shares the work. ``None`` uses all ranks of the strategy.

    Raises:
        GenerationInterrupted: If ``stopped`` interrupted generation.
        RewardError: If every response failed to be scored.
    """
    ranks = roles.strategy.ranks if ranks is None else ranks
    collected = CollectedRollouts()
    collected.add_carried_in(source.carried)
    waiting = deque(source.partial)
    while (planned := plan_round(settings, step, source, collected, waiting)) is not None:
        groups = generate_on_ranks(
            ranks,
            roles.engine,
            roles.scorer,
            planned.requests,
            settings.sampling,
            timers,
            stopped,
            planned.limit,
            planned.ready,
        )
        admit(collected, planned, groups, settings.rollout)
    collected.partial += waiting
    # Before the source records the step: a step that fails must leave the source as it was.
    check_scored(collected.rollouts, f"of step {step + 1}")
    source.record_results(collected)
    return collected


def plan_round(
    settings: CollectSettings,
    step: int,
    source: PromptSource,
    collected: CollectedRollouts,
    waiting: deque[list[Rollout]],
) -> Round | None:
    """Take the prompts of the next round and build its requests.

    Args:
        settings: Decide how many groups are needed.
        step: Number of completed steps; determines the seeds.
        source: Source of prompts.
        collected: The groups of earlier rounds.
        waiting: Unfinished groups of the step before. Those that the round continues are removed.

    Returns:
        The round, or ``None`` if the step needs none.
    """
    rollout = settings.rollout
    missing = rollout.prompts_per_step - len(collected.groups)
    if missing <= 0 or collected.rounds >= rollout.max_rounds:
        return None
    wanted = math.ceil(missing * rollout.oversample) - len(collected.partial)
    if wanted <= 0:
        return None
    begun = [waiting.popleft() for _ in range(min(wanted, len(waiting)))]
    prompts = source.draw(wanted - len(begun)) if wanted > len(begun) else []
    # The round is part of the seed: a prompt that comes back in a later round gets new responses.
    seeds = (settings.seed, step, collected.rounds)
    fresh = requests_for(prompts, rollout.group_size, *seeds, greedy=settings.greedy)
    # Unfinished groups come first: ``Round.ready`` and ``admit`` match them by position.
    asked = [*map(unfinished_requests, begun), *fresh]
    requests = with_token_budget(asked, rollout.max_tokens_per_step)
    return Round(requests, begun, GroupQuota(missing, settings.judge))


def admit(
    collected: CollectedRollouts,
    planned: Round,
    groups: Sequence[list[Rollout]],
    rollout: RolloutConfig,
) -> None:
    """Filter and select the groups of a round, and count their tokens.

    Args:
        collected: The groups of the step, to which the round is added.
        planned: The round.
        groups: The scored groups of all ranks, in the order of the requests.
        rollout: The settings ``rollout``.
    """
    collected.rounds += 1
    # Before the loop below adds these groups, which counts all of their tokens as sampled.
    for group in planned.begun:
        collected.resume_partial(group)
    for index, group in enumerate(groups):
        verdict = planned.quota.of(index, group)
        _admit_group(collected, group, verdict, planned.quota.uses(index), rollout)


def _admit_group(
    collected: CollectedRollouts,
    group: list[Rollout],
    verdict: FilterResult,
    used: bool,
    rollout: RolloutConfig,
) -> None:
    """Train on a group, keep it for the next step, or drop it."""
    if rollout.partial and any(r.finish_reason == "abort" for r in group):
        collected.save_partial(group)
    elif used or verdict.reason:
        collected.add_group(group, verdict)
    elif rollout.carry_over and len(collected.carried) < rollout.prompts_per_step:
        collected.carry_over(group, verdict)
    else:
        collected.add_group(group, FilterResult(reason="surplus"))


def check_scored(rollouts: Sequence[Rollout], which: str) -> None:
    """Raise ``RewardError`` with the most common reason if every rollout failed to be scored."""
    reasons = Counter(r.failed for r in rollouts)
    if rollouts and not reasons[""]:
        ((reason, times),) = reasons.most_common(1)
        raise RewardError(
            f"every response {which} failed to be scored ({len(rollouts)} in all), {times} of "
            f"them with: {reason}. Mend what reward.terms or reward.models names, or the rows that "
            "it reads"
        )


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups that one rank generated, as plain data for the other ranks.

    Attributes:
        groups: The packed rollouts of each group, by the group's index in the round.
        counted: Indices of the groups that the rank counted towards the quota, in order.
    """

    groups: dict[int, list[PackedRollout]]
    counted: Sequence[int] = ()

    @staticmethod
    def of(
        places: Sequence[int], groups: Sequence[Sequence[Rollout]], counted: Sequence[int] = ()
    ) -> RankGroups:
        """Pack ``groups``.

        Args:
            places: Index of each group in the round.
            groups: The rollouts of each group.
            counted: Indices of the groups that the rank counted towards the quota, in order.
        """
        packed = {i: [pack_rollout(r) for r in group] for i, group in zip(places, groups)}
        return RankGroups(packed, counted)


def unpack_groups(
    parts: Sequence[RankGroups], requests: Sequence[Sequence[Request]]
) -> list[list[Rollout]]:
    """Return the groups of all ranks in the order of ``requests``."""
    found: dict[int, list[PackedRollout]] = {}
    for part in parts:
        found |= part.groups
    groups: list[list[Rollout]] = []
    for i, group in enumerate(requests):
        # Prompts are not sent, since every rank has the requests.
        prompt = group[0].prompt
        groups.append([unpack_rollout(fields, prompt) for fields in found[i]])
    return groups


def places_of(ranks: ProcessGroup, count: int, tensor_parallel_size: int = 1) -> range:
    """Return the indices of the groups that this rank generates.

    Args:
        ranks: This rank and the number of ranks.
        count: Number of groups of all ranks.
        tensor_parallel_size: Number of consecutive ranks that generate the same groups.
    """
    # Every n-th group, so that the numbers of groups of two ranks differ by at most one.
    first = ranks.rank // tensor_parallel_size
    step = ranks.size // tensor_parallel_size
    return range(first, count, step)


@contextmanager
def _awake(engine: Engine) -> Generator[None]:
    """Let an engine of this process with weights of its own free its memory afterwards."""
    if engine.shares_weights or engine.shared_by_all_ranks:
        yield
        return
    engine.wake()
    try:
        yield
    finally:
        engine.sleep(1)


def generate_on_ranks(
    ranks: ProcessGroup,
    engine: Engine,
    scorer: RewardScorer,
    requests: Sequence[Sequence[Request]],
    sampling: SamplingConfig,
    timers: Timers,
    stopped: Callable[[], bool] = never_stop,
    quota: GroupQuota | None = None,
    ready: Sequence[Sequence[Rollout]] = (),
) -> list[list[Rollout]]:
    """Generate and score on all ranks, and return all groups on each of them.

    If each rank has an engine, each generates its part and finishes every group. The order of the
    groups, not time, then determines which groups a ``quota`` uses. If
    ``engine.tensor_parallel_size`` ranks share one sharded model, they generate the same part. The
    first of them scores it only after generation, since none may stop before the others.

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
        with _awake(engine):
            return generate_and_score(
                engine, scorer, requests, sampling, timers, stopped, quota, ready
            )
    # Of an engine that all ranks share, the first rank makes all calls.
    leading = engine.shared_by_all_ranks and ranks.rank == 0
    places = places_of(ranks, len(requests), engine.tensor_parallel_size)
    if leading:
        places = range(len(requests))
    asked = [requests[i] for i in places]
    begun = [ready[i] for i in places] if ready else ()
    own: list[list[Rollout]] = []

    def work(keep_alive: Callable[[], None]) -> RankGroups:
        if engine.shared_by_all_ranks and not leading:
            return RankGroups({})
        engine.wake()
        try:
            if engine.tensor_parallel_size == 1:
                limit = quota if leading else None
                own.extend(
                    generate_and_score(
                        engine, scorer, asked, sampling, timers, stopped, limit, begun, keep_alive
                    )
                )
            else:
                responses = generate_all(engine, asked, sampling, timers, keep_alive)
                # The other ranks of the group have the same responses, which are scored once.
                if ranks.rank % engine.tensor_parallel_size == 0:
                    own.extend(
                        score_groups(
                            responses, scorer, asked, timers, stopped, None, begun, keep_alive
                        )
                    )
        finally:
            engine.sleep(1)
        counted = quota.counted if quota is not None and leading else ()
        return RankGroups.of(places, own, counted)

    parts = run_with_keepalive(ranks, work)
    if leading:
        return own  # the same objects that the quota has judged
    groups = unpack_groups(parts, requests)
    if quota is not None:
        # Only the first rank knows the order in which a shared engine finished the groups.
        order = parts[0].counted if engine.shared_by_all_ranks else range(len(groups))
        quota.count_in_order(order, groups)
    return groups


def score_on_ranks(
    ranks: ProcessGroup,
    scorer: RewardScorer,
    groups: Sequence[Sequence[Rollout]],
    timers: Timers,
    stopped: Callable[[], bool] = never_stop,
) -> list[list[Rollout]]:
    """Score complete groups, each on one rank, and return all of them on each rank.

    Args:
        ranks: The process group that shares the work.
        scorer: Scores the responses.
        groups: The responses of each prompt, identical on all ranks.
        timers: Record the time of scoring.
        stopped: Returns true when the run must stop.
    """
    requests = [[Request(r.prompt, r.seed, r.sample) for r in group] for group in groups]
    places = places_of(ranks, len(groups))

    def work(keep_alive: Callable[[], None]) -> RankGroups:
        own = score_groups(
            chain.from_iterable(groups[i] for i in places),
            scorer,
            [requests[i] for i in places],
            timers,
            stopped,
            keep_alive=keep_alive,
        )
        return RankGroups.of(places, own)

    if ranks.size == 1:
        return score_groups(chain.from_iterable(groups), scorer, requests, timers, stopped)
    return unpack_groups(run_with_keepalive(ranks, work), requests)
