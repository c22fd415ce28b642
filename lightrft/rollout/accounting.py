"""Count every generated group and token as trained, filtered or failed, with a reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightrft.algorithms.group_filters import drop_reason
from lightrft.algorithms.reward_terms.text_measures import reflections, repetition
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
    # First, so that the filters and the baseline below see only finite rewards.
    greedy: Rollout | None = None
    answers: list[Rollout] = []
    for rollout in group:
        _fail_without_number(rollout)
        if rollout.sample == GREEDY:
            greedy = rollout
        elif not rollout.failed:
            answers.append(rollout)
    if greedy is not None:
        if greedy.failed:
            return FilterResult(reason="baseline_failed")
        for rollout in answers:
            rollout.baseline = greedy.reward
    reason = drop_reason(answers, filters, least)
    if reason:
        return FilterResult(reason=reason)
    kept = selected(answers, select)
    if len(kept) < least:
        return FilterResult(reason="too_few_selected")
    return FilterResult(kept)


def _fail_without_number(rollout: Rollout) -> None:
    """Count a NaN or infinite reward as a failed score, since it would spoil its whole group."""
    if rollout.reward is None or math.isfinite(rollout.reward):
        return
    rollout.failed = f"the reward is {rollout.reward}"
    rollout.reward = None
    rollout.terms = {}
    rollout.weights = {}


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
            of them with equal rewards. A carried group counts in the step that trains on it.
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
            self._compare(group)
            self.tokens["carried_in"] += tokens_of(group)
            self.tokens["trained"] += tokens_of(group)

    def add_group(self, group: Sequence[Rollout], verdict: FilterResult) -> None:
        """Add a group generated in this step; it is trained on unless ``verdict`` has a reason."""
        self._compare(self._count(group, verdict))
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
        kept = set(places)
        place = 0
        groups: list[list[Rollout]] = []
        for group in self.groups:
            groups.append([])
            for rollout in group:
                if place in kept:
                    groups[-1].append(rollout)
                else:
                    rollout.failed = "the shaped reward is not finite"
                    self.failures[rollout.failed] += 1
                    # From one count to the other, so that the sum of all stays.
                    self.tokens["trained"] -= len(rollout)
                    self.tokens["failed"] += len(rollout)
                place += 1
        # A group without responses would have no prompt in the batch.
        self.groups = list(filter(None, groups))

    def drop_groups(self, reason: str) -> None:
        """Train on none of the groups after all, for ``reason``."""
        for group in self.groups:
            self.dropped[reason] += 1
            self.tokens["dropped"] += tokens_of(group)
            # From one count to the other, so that the sum of all stays.
            self.tokens["trained"] -= tokens_of(group)
            self.tokens["filtered"] += tokens_of(group)
            self.filtered[reason] += tokens_of(group)
        self.groups = []

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
        # The step that sampled these tokens has counted them. Adding the group counts all of it.
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
            distinct = {r.reward for r in scored}
            self.compared["zero_std"] += len(distinct) == 1

    def _count(self, group: Sequence[Rollout], verdict: FilterResult) -> list[Rollout]:
        """Count a group that was generated in this step. Return its scored responses."""
        # An aborted response without tokens was never started.
        self.rollouts += [r for r in group if len(r) or r.finish_reason != "abort"]
        self.tokens["sampled"] += tokens_of(group)
        # By identity: responses of a group may be equal in every field.
        kept = {id(r) for r in verdict.kept}
        scored: list[Rollout] = []
        for rollout in group:
            if rollout.failed:
                self.failures[rollout.failed] += 1
                self.tokens["failed"] += len(rollout)
                continue
            reason = verdict.reason or "not_selected"
            # The greedy response is never trained on, whatever becomes of its group.
            if rollout.sample == GREEDY:
                reason = "baseline"
            else:
                scored.append(rollout)
            if id(rollout) not in kept:
                self.filtered[reason] += len(rollout)
                self.tokens["filtered"] += len(rollout)
        # Scores of an aborted group are incomplete, so nothing may be learned from them.
        if any(r.finish_reason == "abort" for r in group):
            return []
        self.finished.append(scored)
        return scored


def tokens_of(group: Sequence[Rollout]) -> int:
    """Return the number of tokens of all responses of a group."""
    return sum(map(len, group))


def rollout_metrics(collected: CollectedRollouts) -> Metrics:
    """Return metrics of rewards, lengths and token counts.

    Aborted and greedy responses are not part of the means.
    """
    answers: list[Rollout] = []
    greedy: list[Rollout] = []
    for rollout in collected.rollouts:
        if rollout.sample == GREEDY:
            greedy.append(rollout)
        elif rollout.finish_reason != "abort":
            answers.append(rollout)
    scored = [r for r in answers if not r.failed]
    metrics = _reward_metrics(scored)
    # A mean over no responses or no groups has no value and is not written.
    failed = len(answers) - len(scored)
    metrics.add("rollout/frac_reward_failed", Mean(failed, len(answers)))
    compared = collected.compared
    metrics.add("rollout/frac_reward_zero_std", Mean(compared["zero_std"], compared["groups"]))
    for rollout in greedy:
        if rollout.reward is not None and not rollout.failed:
            metrics.add("rollout/baseline", Mean(rollout.reward))
    metrics.add("rollout/entropy", _sampled_entropy(answers))
    for rollout in answers:
        metrics.add("response/length", Mean(len(rollout)))
        metrics.add("response/max_length", Max(len(rollout)))
        metrics.add("response/clip_ratio", Mean(float(rollout.finish_reason == "length")))
        metrics.add("response/reflections", Mean(reflections(rollout.text)))
    if drafted := sum(r.drafted for r in collected.rollouts):
        accepted = sum(r.accepted for r in collected.rollouts)
        metrics.add("rollout/draft_acceptance", Mean(accepted, drafted))
        metrics.add("rollout/drafted_tokens", Sum(drafted))
    metrics.merge(_account(collected))
    for name, value in collected.curriculum.items():
        metrics.add(f"curriculum/{name}", Last(value))
    return metrics


def mean_repetition(collected: CollectedRollouts) -> Mean:
    """Return the mean repetition of the responses of a step; see ``repetition``."""
    texts = [
        rollout.text
        for rollout in collected.rollouts
        if rollout.sample != GREEDY and rollout.finish_reason != "abort"
    ]
    return Mean(math.fsum(map(repetition, texts)), len(texts))


def _sampled_entropy(answers: Sequence[Rollout]) -> Mean:
    """Return minus the mean log-prob of the sampled tokens, which estimates their entropy.

    Log-probs that are not finite, as of an engine that reports none, are left out.
    """
    found = [
        logprob
        for rollout in answers
        for logprob, is_sampled in zip(rollout.logprobs, rollout.sampled, strict=True)
        if is_sampled and math.isfinite(logprob)
    ]
    return Mean(-math.fsum(found), len(found))


def _reward_metrics(scored: Sequence[Rollout]) -> Metrics:
    """Return the distribution of the rewards, and the mean of each term."""
    metrics = Metrics()
    rewards = [r.reward or 0.0 for r in scored]
    if rewards:
        mean = sum(rewards) / len(rewards)
        variance = sum((r - mean) ** 2 for r in rewards) / len(rewards)
        metrics.add("reward/mean", Mean(sum(rewards), len(rewards)))
        metrics.add("reward/std", Mean(variance**0.5))
        metrics.add("reward/max", Max(max(rewards)))
        metrics.add("reward/min", Min(min(rewards)))
    for rollout in scored:
        for name, value in rollout.terms.items():
            # Only ungradable responses have this term, so its mean is meaningless.
            if not name.endswith(f"/{UNGRADED}"):
                metrics.add(f"reward/{name}", Mean(value))
    return metrics


def _account(collected: CollectedRollouts) -> Metrics:
    metrics, tokens = Metrics(), collected.tokens
    # Only runs that carry tokens between steps report these two.
    carried = [name for name in ("carried_in", "carried_out") if name in tokens]
    for name in ("sampled", "trained", "filtered", "failed", *carried):
        metrics.add(f"rollout/tokens_{name}", Sum(tokens[name]))
    for reason, count in collected.filtered.items():
        metrics.add(f"rollout/tokens_filtered/{reason}", Sum(count))
    for reason, count in collected.dropped.items():
        metrics.add(f"rollout/dropped/{reason}", Sum(count))
    metrics.add("rollout/frac_dropped", Mean(tokens["dropped"], tokens["sampled"]))
    metrics.add("rollout/num_failed", Sum(sum(collected.failures.values())))
    ungraded = aborted = 0
    for rollout in collected.rollouts:
        ungraded += any(name.endswith(f"/{UNGRADED}") for name in rollout.terms)
        aborted += rollout.finish_reason == "abort"
    metrics.add("rollout/num_ungraded", Sum(ungraded))
    metrics.add("rollout/num_aborted", Sum(aborted))
    metrics.add("rollout/rounds", Sum(collected.rounds))
    metrics.add("rollout/groups", Sum(len(collected.groups)))
    return metrics
