"""Turn scored groups into preference examples: pairs, rankings or labelled responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lightrft.config.base import ComponentConfig
from lightrft.config.preference.online import OnlineConfig
from lightrft.config.preference.sections import PreferenceKind
from lightrft.datasets.preference.preference_dataset import PreferenceExample, PreferenceResponse
from lightrft.datasets.preference.preference_rows import dense_ranks, margins_of
from lightrft.rollout.accounting import FilterResult, filter_and_select
from lightrft.types import Rollout

MISSING_EOS = "missing_eos"
"""Reward term of a response that the length limit cut."""
DIFFERENT_REWARDS = ComponentConfig(name="zero_variance")
"""The filter of groups that have nothing to compare."""


@dataclass(frozen=True, slots=True)
class PreferenceJudge:
    """Decides which responses of a group are compared.

    Attributes:
        kind: What the losses read.
        online: The settings ``online``.
    """

    kind: PreferenceKind
    online: OnlineConfig

    def __call__(self, group: Sequence[Rollout]) -> FilterResult:
        """Return the responses to compare, or the reason why the group gives no example.

        The penalty of a cut response becomes part of its reward.
        """
        penalise_cut(group, self.online.missing_eos_penalty)
        if self.kind == "labelled" and self.online.threshold is not None:
            return filter_and_select(group, (), None, 1)
        verdict = filter_and_select(group, (DIFFERENT_REWARDS,), None, 2)
        if verdict.reason or self.kind == "labelled":
            return verdict
        kept = verdict.kept
        if self.kind == "pair" and self.online.pairs == "best_worst":
            kept = best_and_worst(kept)
        # As of a noisy judge. Nothing can be learned from a response that beats itself.
        if contradict(kept):
            return FilterResult(reason="equal_responses")
        return FilterResult(kept)


def penalise_cut(group: Sequence[Rollout], penalty: float) -> None:
    """Subtract ``penalty`` from the reward of each response that the length limit cut."""
    if not penalty:
        return
    for rollout in group:
        if rollout.reward is None:
            continue
        is_cut = rollout.finish_reason == "length"
        rollout.reward -= penalty * is_cut
        rollout.terms[MISSING_EOS] = float(is_cut)
        rollout.weights[MISSING_EOS] = -penalty


def reward_of(rollout: Rollout) -> float:
    """Return the reward of a scored response."""
    assert rollout.reward is not None
    return rollout.reward


def best_and_worst(group: Sequence[Rollout]) -> list[Rollout]:
    """Return the response of the highest and that of the lowest reward.

    Of equal rewards it is the first response, which is as random as any.
    """
    return [max(group, key=reward_of), min(group, key=reward_of)]


def contradict(group: Sequence[Rollout]) -> bool:
    """Return True if two responses of equal tokens have different rewards."""
    responses = {tuple(rollout.token_ids) for rollout in group}
    scored = {(tuple(rollout.token_ids), rollout.reward) for rollout in group}
    return len(scored) > len(responses)


def example_of(
    group: Sequence[Rollout], kind: PreferenceKind, threshold: float | None
) -> PreferenceExample:
    """Build the example of a group that ``PreferenceJudge`` has kept.

    The reward of a response is its rating. Its margin is the distance to the next lower reward.

    Args:
        group: Scored responses to one prompt.
        kind: What the losses read.
        threshold: The setting ``online.threshold``.
    """
    prompt = group[0].prompt
    rewards = [reward_of(rollout) for rollout in group]
    ranks: Sequence[int | None] = [None] * len(group)
    labels: Sequence[bool | None] = [None] * len(group)
    margins: Sequence[float | None] = [None] * len(group)
    if kind == "labelled":
        labels = desirable(rewards, threshold)
    else:
        ordered = dense_ranks([-reward for reward in rewards])
        ranks, margins = ordered, margins_of(rewards, ordered)
    responses: list[PreferenceResponse] = []
    for k, rollout in enumerate(group):
        responses.append(
            PreferenceResponse(
                rollout.token_ids,
                rollout.sampled,
                rank=ranks[k],
                desirable=labels[k],
                rating=rewards[k],
                margin=margins[k],
            )
        )
    return PreferenceExample(
        prompt.token_ids,
        responses,
        prompt.id,
        data_source=prompt.data_source,
        prompt_media=prompt.media,
    )


def desirable(rewards: Sequence[float], threshold: float | None) -> list[bool]:
    """Return the label of each response of a group.

    Args:
        rewards: Rewards of the group.
        threshold: Smallest reward of a desirable response. None takes those above the mean.
    """
    if threshold is not None:
        return [reward >= threshold for reward in rewards]
    mean = fmean(rewards)
    return [reward > mean for reward in rewards]
