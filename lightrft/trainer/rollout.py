"""Prompts to scored groups: generation with scoring beside it, filtering, and refill to the exact number of groups."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightrft.config import RLConfig
from lightrft.strategy.engine.base import Engine
from lightrft.strategy.settings import SamplingConfig
from lightrft.trainer.filters import drop_reason
from lightrft.trainer.parts import needs_of
from lightrft.trainer.roles import Roles, Scoring
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import RewardError
from lightrft.utils.timers import Timers


class Interrupted(Exception):
    """The run was asked to stop while answers were being drawn; nothing of the step has been used."""


@dataclass(slots=True)
class Collected:
    """The groups that are trained on, every rollout that was drawn for them, and the account of tokens.

    ``tokens`` has ``sampled``, ``trained``, ``filtered`` and ``failed``, with ``sampled`` the sum of the others; ``dropped`` counts
    groups by reason; ``failures`` counts answers by reason.
    """

    groups: list[list[Rollout]] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    rounds: int = 0


def request_seed(*parts: int | str) -> int:
    """A seed below 2**63 that depends on nothing but ``parts``, so that a step can be drawn again after a restart."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def collect(
    roles: Roles,
    config: RLConfig,
    step: int,
    draw_prompts: Callable[[int], list[Prompt]],
    timers: Timers,
    stopped: Callable[[], bool] = lambda: False,
) -> Collected:
    """Draw and score until ``rollout.prompts`` groups pass the filters, or ``rollout.max_rounds`` rounds are over."""
    got = Collected()
    wanted = config.rollout.prompts
    least = 2 if "groups" in needs_of(config.algorithm) else 1
    while len(got.groups) < wanted and got.rounds < config.rollout.max_rounds:
        prompts = draw_prompts(wanted - len(got.groups))
        seeds = (config.run.seed, step, got.rounds)
        requests = requests_for(prompts, config.rollout.samples, *seeds)
        groups = scored(roles.engine, roles.scorer, requests, config.sampling, timers, stopped)
        got.rounds += 1
        for group in groups:
            _account(got, group, config, least)
    check_scored(got.rollouts, f"of step {step + 1}")
    return got


def check_scored(rollouts: Sequence[Rollout], which: str) -> None:
    """Raises ``RewardError``, with the most common reason, when every one of ``rollouts`` failed: nothing can be learned or said."""
    reasons = Counter(r.failed for r in rollouts)
    if rollouts and not reasons[""]:
        ((reason, times),) = reasons.most_common(1)
        raise RewardError(
            f"every answer {which} failed to be scored ({len(rollouts)} in all), {times} of them with: {reason}. "
            "Mend what reward.terms names, or the rows that it reads"
        )


def requests_for(prompts: Sequence[Prompt], samples: int, *seeds: int | str) -> list[list[Request]]:
    """One list of requests per prompt, each with a seed of its own."""
    return [[Request(p, request_seed(*seeds, i, s), s) for s in range(samples)] for i, p in enumerate(prompts)]


def scored(
    engine: Engine,
    scorer: Scoring,
    requests: Sequence[Sequence[Request]],
    sampling: SamplingConfig,
    timers: Timers,
    stopped: Callable[[], bool] = lambda: False,
) -> list[list[Rollout]]:
    """Every request answered and scored, group by group in the order asked. Scoring runs while the rest is still being drawn.

    Raises ``Interrupted`` when ``stopped`` turns true between two answers.
    """
    group_of = {request.seed: g for g, group in enumerate(requests) for request in group}
    groups: list[list[Rollout]] = [[] for _ in requests]
    waiting = len(group_of)

    def place(done: Rollout) -> None:
        groups[group_of[done.seed]].append(done)

    with timers("generate"):
        for rollout in engine.generate([r for group in requests for r in group], sampling):
            scorer.submit(rollout)
            for done in scorer.results(wait=False):
                place(done)
                waiting -= 1
            if stopped():
                break
        else:
            stopped = _never
    with timers("reward"):
        for done in scorer.results(wait=True):
            place(done)
            waiting -= 1
    if stopped():
        raise Interrupted
    if waiting:
        raise RuntimeError(f"{waiting} answers did not come back from generation and scoring")
    for group in groups:
        group.sort(key=lambda r: r.sample)
    return groups


def _never() -> bool:
    return False


def _account(got: Collected, group: list[Rollout], config: RLConfig, least: int) -> None:
    got.rollouts += group
    got.tokens["sampled"] += sum(map(len, group))
    for rollout in group:
        if rollout.failed:
            got.failures[rollout.failed] += 1
            got.tokens["failed"] += len(rollout)
    kept = [r for r in group if not r.failed]
    reason = drop_reason(kept, config.algorithm.filters, least)
    tokens = sum(map(len, kept))
    if reason:
        got.dropped[reason] += 1
        got.tokens["filtered"] += tokens
    else:
        got.groups.append(kept)
        got.tokens["trained"] += tokens
