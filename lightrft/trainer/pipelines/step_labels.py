"""Split solutions in steps, and label the steps by responses that continue them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightrft.algorithms.reward_terms.text_steps import split_steps
from lightrft.config.rollout import StepLabelsConfig


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution in steps.

    Args:
        prompt: index of its prompt.
        sample: index among the solutions of the prompt.
        text: the text.
        steps: the steps, without the text between them.
        ends: end of each step in ``text``, with the text up to the next step.
    """

    prompt: int
    sample: int
    text: str
    steps: tuple[str, ...]
    ends: tuple[int, ...]

    def prefix(self, count: int) -> str:
        """Return the text of the first ``count`` steps."""
        return self.text[: self.ends[count - 1]]

    @staticmethod
    def split(prompt: int, sample: int, text: str, separator: str) -> Solution:
        """Return ``text`` in steps, which ``separator`` ends.

        Args:
            prompt: index of the prompt.
            sample: index among the solutions of the prompt.
            text: the text of the solution.
            separator: text between two steps. Empty parts are no steps.
        """
        steps, ends = split_steps(text, separator)
        return Solution(prompt, sample, text, tuple(steps), tuple(ends))

    @staticmethod
    def joined(prompt: int, sample: int, steps: Sequence[str], separator: str) -> Solution:
        """Return a solution of given steps.

        Args:
            prompt: index of the prompt.
            sample: index among the solutions of the prompt.
            steps: the steps.
            separator: text between two steps.
        """
        text = separator.join(steps)
        ends: list[int] = []
        for step in steps:
            ends.append((ends[-1] if ends else 0) + len(step) + len(separator))
        ends[-1] = len(text)
        return Solution(prompt, sample, text, tuple(step.strip() for step in steps), tuple(ends))


class Tally(NamedTuple):
    """The responses that continue the first steps of a solution.

    Attributes:
        right: responses that are right.
        scored: responses with a score.
        failed: responses whose scoring failed.
        truncated: responses that were cut off at the limit of tokens.
    """

    right: int
    scored: int
    failed: int = 0
    truncated: int = 0

    @staticmethod
    def of(group: Iterable[Mapping[str, Any]], threshold: float) -> Tally:
        """Count the lines of a group.

        Args:
            group: lines with ``reward``, ``failed`` and ``finish_reason``.
            threshold: reward of a right response.
        """
        lines = list(group)
        rewards = [line["reward"] for line in lines if not line["failed"]]
        return Tally(
            sum(reward >= threshold for reward in rewards),
            len(rewards),
            len(lines) - len(rewards),
            sum(line["finish_reason"] == "length" for line in lines),
        )


@dataclass(frozen=True, slots=True)
class Bisection:
    """The search for the first wrong step (OmegaPRM, arXiv 2406.06592, section 3.2).

    Attributes:
        right: largest number of first steps that some response continues rightly.
        wrong: smallest number of first steps known to be wrong. 0 if the solution is right, or
            could not be scored.
        next: number of first steps to continue next. 0 if the search is over.
    """

    right: int
    wrong: int
    next: int

    @staticmethod
    def of(count: int, tallies: Mapping[int, Tally]) -> Bisection:
        """Return the state of the search in a solution.

        Args:
            count: number of its steps.
            tallies: responses by the number of first steps that they continue.
        """
        whole = tallies.get(count)
        if whole is None:
            return Bisection(0, 0, count)
        if whole.right or not whole.scored:
            return Bisection(count if whole.right else 0, 0, 0)
        right, wrong = 0, count
        while wrong - right > 1:
            middle = (right + wrong) // 2
            tally = tallies.get(middle)
            if tally is None:
                return Bisection(right, wrong, middle)
            if not tally.scored:
                break
            if tally.right:
                right = middle
            else:
                wrong = middle
        return Bisection(right, wrong, 0)


def wanted(count: int, tallies: Mapping[int, Tally], config: StepLabelsConfig) -> list[int]:
    """Return the numbers of first steps to continue next, in order.

    Args:
        count: number of steps of the solution.
        tallies: responses by the number of first steps that they continue.
        config: the settings ``steps``.
    """
    if config.search == "first_wrong":
        following = Bisection.of(count, tallies).next
        return [following] if following else []
    return [k for k in range(1, count + 1) if k not in tallies]


class StepLabels(NamedTuple):
    """Labels of the steps of a solution; None for a step without a label.

    Attributes:
        soft: share of right responses among those that continue the solution after the step.
        hard: 1 if some response is right, else 0.
    """

    soft: list[float | None]
    hard: list[int | None]


def labels_of(count: int, tallies: Mapping[int, Tally], config: StepLabelsConfig) -> StepLabels:
    """Label the steps of a solution.

    ``soft`` is the soft estimation and ``hard`` the hard estimation of Math-Shepherd (arXiv
    2312.08935, equations 3 and 4). The label of the last step is the score of the solution itself.

    Args:
        count: number of steps.
        tallies: responses by the number of first steps that they continue.
        config: the settings ``steps``.
    """
    measured = [tallies.get(k, Tally(0, 0)) for k in range(1, count + 1)]
    soft = [tally.right / tally.scored if tally.scored else None for tally in measured]
    hard: list[int | None] = [None if s is None else int(s > 0) for s in soft]
    if config.search == "first_wrong":
        found = Bisection.of(count, tallies)
        for k in range(count):
            # A right response to more steps is one to fewer steps, too.
            if k < found.right:
                hard[k] = 1
            elif k + 1 != found.wrong:
                # Whether a step after a wrong one is right has no meaning.
                soft[k] = hard[k] = None
    return StepLabels(soft, hard)
