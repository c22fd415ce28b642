"""Count every generated group and token as trained, filtered or failed, with a reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightrft.algorithms.group_filters import drop_reason
from lightrft.algorithms.sample_selection import selected
from lightrft.config.base import ComponentConfig
from lightrft.observability.metrics import Last, Max, Mean, Metrics, Min, Sum
from lightrft.rewards.sandbox.results import UNGRADED
from lightrft.types import Rollout

GREEDY = -1
"""``Rollout.sample`` of the greedy response that is generated with a group for its reward alone."""


@dataclass(frozen=True, slots=True)
class FilterResult:
    """The responses of a group to train on.

    Attributes:
        kept: The responses.
        reason: Reason for dropping the group; empty if it is trained on.
    """

    kept: Sequence[Rollout] = ()
    reason: str = ""


def filter_and_select(
    group: Sequence[Rollout],
    filters: Sequence[ComponentConfig],
    select: ComponentConfig | None,
    least: int,
) -> FilterResult:
    """Filter a group, then select responses.

    The reward of the greedy response is stored as the ``baseline`` of the others.

    Args:
        group: All responses of a prompt.
        filters: The settings ``algorithm.filters``.
        select: The setting ``rollout.select``. ``None`` keeps all responses.
        least: Smallest number of responses that must remain after each stage.
    """
    if any(r.finish_reason == "abort" for r in group):
        return FilterResult(reason="aborted")
    for rollout in group:
        _fail_without_number(rollout)
    greedy = next((r for r in group if r.sample == GREEDY), None)
    answers = [r for r in group if r is not greedy and not r.failed]
    if greedy is not None:
        if greedy.failed:
            return FilterResult(reason="baseline_failed")
        for rollout in answers:
            rollout.baseline = greedy.reward
    reason = drop_reason(answers, filters, least)
    kept = [] if reason else selected(answers, select)
    return (
        FilterResult(kept)
        if len(kept) >= least
        else FilterResult(reason=reason or "too_few_selected")
    )


def _fail_without_number(rollout: Rollout) -> None:
    """Count a NaN or infinite reward as a failed score, since it would spoil its whole group."""
    if rollout.reward is not None and not math.isfinite(rollout.reward):
        rollout.failed, rollout.reward = f"the reward is {rollout.reward}", None
        rollout.terms, rollout.weights = {}, {}


@dataclass(slots=True)
class CollectedRollouts:
    """The groups of one step, every rollout generated for them, and the token counts.

    Every token is counted once: sampled + carried_in = trained + filtered + failed + carried_out.
    The lists ``finished``, ``carried`` and ``partial`` are empty after ``record_results``.

    Attributes:
        groups: The groups to train on.
        rollouts: Every rollout generated in this step.
        finished: The scored responses of each group that was not aborted.
        carried: Complete groups for the next step.
        partial: Groups with unfinished responses, which the next step continues.
        tokens: Token counts: ``sampled``, ``trained``, ``filtered``, ``failed``, ``carried_in``
            (from the step before) and ``carried_out`` (to the next step, finished or not).
            ``dropped`` counts all tokens of dropped groups in addition.
        filtered: Filtered tokens by reason: the reason of the dropped group, ``not_selected`` or
            ``baseline``.
        dropped: Dropped groups by reason.
        failures: Failed responses by reason.
        compared: Before any filter, ``groups`` with two or more scored responses, and ``zero_std``
            of them with equal rewards.
        rounds: Number of generation rounds.
        curriculum: Statistics of the curriculum.
    """

    groups: list[list[Rollout]] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    finished: list[list[Rollout]] = field(default_factory=list)
    carried: list[list[Rollout]] = field(default_factory=list)
    partial: list[list[Rollout]] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    curriculum: dict[str, float] = field(default_factory=dict)

    def add_carried_in(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Start with complete groups that an earlier step generated."""
        for group in groups:
            self.groups.append(list(group))
            self.tokens["carried_in"] += tokens_of(group)
            self.tokens["trained"] += tokens_of(group)

    def add_group(self, group: Sequence[Rollout], verdict: FilterResult) -> None:
        """Add a group generated in this step; it is trained on unless ``verdict`` has a reason."""
        self._count(group, verdict)
        if not verdict.reason:
            self.groups.append(list(verdict.kept))
            self.tokens["trained"] += tokens_of(verdict.kept)
        else:
            self.dropped[verdict.reason] += 1
            self.tokens["dropped"] += tokens_of(group)

    def keep(self, places: Sequence[int]) -> None:
        """Fail the responses whose shaped reward is not finite.

        They no longer count as trained. ``places`` are the indices of the other responses, in the
        order of ``groups``.
        """
        kept, place = set(places), 0
        groups: list[list[Rollout]] = []
        for group in self.groups:
            groups.append([])
            for rollout in group:
                if place in kept:
                    groups[-1].append(rollout)
                else:
                    rollout.failed = "the shaped reward is not finite"
                    self.failures[rollout.failed] += 1
                    self.tokens["trained"] -= len(rollout)
                    self.tokens["failed"] += len(rollout)
                place += 1
        self.groups = [group for group in groups if group]

    def carry_over(self, group: Sequence[Rollout], verdict: FilterResult) -> None:
        """Keep a group generated in this step for the next step to train on."""
        self._count(group, verdict)
        self.carried.append(list(verdict.kept))
        self.tokens["carried_out"] += tokens_of(verdict.kept)

    def resume_partial(self, group: Sequence[Rollout]) -> None:
        """Count the tokens of a continued group that earlier steps generated.

        Must be called before the group is added, carried or left.
        """
        self.tokens["carried_in"] += tokens_of(group)
        self.tokens["sampled"] -= tokens_of(group)

    def save_partial(self, group: Sequence[Rollout]) -> None:
        """Keep a group with unfinished responses for the next step to continue."""
        self.partial.append(list(group))
        self.tokens["sampled"] += tokens_of(group)
        self.tokens["carried_out"] += tokens_of(group)

    def settle(self, unreadable: int) -> None:
        """Count the unreadable prompts, and empty the lists that only the prompt source reads."""
        if unreadable:
            self.dropped["unreadable"] += unreadable
        self.finished, self.carried, self.partial = [], [], []

    def _compare(self, scored: Sequence[Rollout]) -> None:
        """Count a group whose rewards can be compared."""
        if len(scored) > 1:
            self.compared["groups"] += 1
            self.compared["zero_std"] += len({r.reward for r in scored}) == 1

    def _count(self, group: Sequence[Rollout], verdict: FilterResult) -> None:
        self.rollouts += [r for r in group if len(r) or r.finish_reason != "abort"]
        self.tokens["sampled"] += tokens_of(group)
        if all(r.finish_reason != "abort" for r in group):
            scored = [r for r in group if r.sample != GREEDY and not r.failed]
            self.finished.append(scored)
            self._compare(scored)
        kept = {id(r) for r in verdict.kept}
        for rollout in group:
            if rollout.failed:
                self.failures[rollout.failed] += 1
                self.tokens["failed"] += len(rollout)
            elif id(rollout) not in kept:
                why = "baseline" if rollout.sample == GREEDY else verdict.reason or "not_selected"
                self.filtered[why] += len(rollout)
                self.tokens["filtered"] += len(rollout)


def tokens_of(group: Sequence[Rollout]) -> int:
    """Return the number of tokens of all responses of a group."""
    return sum(map(len, group))


def rollout_metrics(collected: CollectedRollouts) -> Metrics:
    """Return metrics of rewards, lengths and token counts.

    Aborted and greedy responses are not part of the means.
    """
    metrics = Metrics()
    drawn = [r for r in collected.rollouts if r.finish_reason != "abort" and r.sample != GREEDY]
    scored = [r for r in drawn if not r.failed]
    rewards = [r.reward or 0.0 for r in scored]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    if rewards:
        metrics.add("reward/mean", Mean(sum(rewards), len(rewards)))
        metrics.add(
            "reward/std", Mean((sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5)
        )
        metrics.add("reward/max", Max(max(rewards)))
        metrics.add("reward/min", Min(min(rewards)))
    if drawn:
        metrics.add(
            "rollout/frac_reward_failed", Mean(sum(bool(r.failed) for r in drawn), len(drawn))
        )
    if groups := collected.compared["groups"]:
        metrics.add("rollout/frac_reward_zero_std", Mean(collected.compared["zero_std"], groups))
    for rollout in scored:
        for name, value in rollout.terms.items():
            if not name.endswith(
                f"/{UNGRADED}"
            ):  # only ungradable responses have it, so its mean is meaningless
                metrics.add(f"reward/{name}", Mean(value))
    for rollout in collected.rollouts:
        if rollout.sample == GREEDY and rollout.reward is not None and not rollout.failed:
            metrics.add("rollout/baseline", Mean(rollout.reward))
    for rollout in drawn:
        metrics.add("response/length", Mean(len(rollout)))
        metrics.add("response/max_length", Max(len(rollout)))
        metrics.add("response/clip_ratio", Mean(float(rollout.finish_reason == "length")))
    metrics.merge(_account(collected))
    for name, value in collected.curriculum.items():
        metrics.add(f"curriculum/{name}", Last(value))
    return metrics


def _account(collected: CollectedRollouts) -> Metrics:
    metrics, tokens = Metrics(), collected.tokens
    for name in ("sampled", "trained", "filtered", "failed"):
        metrics.add(f"rollout/tokens_{name}", Sum(tokens[name]))
    for name in ("carried_in", "carried_out"):
        if name in tokens:
            metrics.add(f"rollout/tokens_{name}", Sum(tokens[name]))
    for reason, count in collected.filtered.items():
        metrics.add(f"rollout/tokens_filtered/{reason}", Sum(count))
    for reason, count in collected.dropped.items():
        metrics.add(f"rollout/dropped/{reason}", Sum(count))
    metrics.add("rollout/frac_dropped", Mean(tokens["dropped"], tokens["sampled"]))
    metrics.add("rollout/num_failed", Sum(sum(collected.failures.values())))
    ungraded = sum(
        any(name.endswith(f"/{UNGRADED}") for name in r.terms) for r in collected.rollouts
    )
    metrics.add("rollout/num_ungraded", Sum(ungraded))
    metrics.add(
        "rollout/num_aborted", Sum(sum(r.finish_reason == "abort" for r in collected.rollouts))
    )
    metrics.add("rollout/rounds", Sum(collected.rounds))
    metrics.add("rollout/groups", Sum(len(collected.groups)))
    return metrics
