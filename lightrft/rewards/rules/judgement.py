"""Reward a judgement whose verdict agrees with the label."""

from __future__ import annotations

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.rules.answer_extraction import reference_answer
from lightrft.rewards.rules.verdicts import VerdictForm, agreement, read_verdict
from lightrft.rewards.sandbox.rollout_view import RolloutView


@REWARDS.register("judgement", needs={"label"}, kind="outcome")
def judgement(
    rollout: RolloutView, *, exact: bool = False, unparsed: float = 0.0
) -> dict[str, float]:
    """Return the agreement of the verdict with the label, from 0 to 1.

    The terms ``parsed`` and ``first`` are 1 if the judgement has a verdict, and if the verdict is
    the first response.

    Args:
        exact: Count a rating, a ranking or a rubric only if it equals the label.
        unparsed: Reward of a judgement without a verdict.

    Raises:
        ValueError: If the label is not a verdict.
    """
    form = VerdictForm.of(rollout.prompt.columns)
    verdict = read_verdict(rollout.turn, form)
    agreed = agreement(verdict, reference_answer(rollout), form)
    if exact:
        agreed = float(agreed == 1)
    is_first = verdict == "A" or (isinstance(verdict, tuple) and verdict[0] == "A")
    return {
        "reward": unparsed if verdict is None else agreed,
        "parsed": float(verdict is not None),
        "first": float(is_first),
    }
