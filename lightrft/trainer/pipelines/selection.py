"""Choose the responses to a prompt that become training rows.

Each function of ``SELECTORS`` takes the usable responses to one prompt and returns its rows,
without the prompt. Of equal rewards, the first sample counts as the better one.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrft.config.rollout import ConditionConfig, SelectConfig
from lightrft.datasets.row_parser import ends_with_assistant, joined_content

Line = Mapping[str, Any]
"""A response as ``lightrft generate`` writes it without a selection."""

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable response.

    Args:
        sample: index among the responses to the prompt.
        text: the text.
        reward: the reward. NaN for a response that no reward scored.
    """

    sample: int
    text: str
    reward: float

    @property
    def message(self) -> list[dict[str, str]]:
        """The response as messages."""
        return [{"role": "assistant", "content": self.text}]


@dataclass(slots=True)
class Counts:
    """Numbers of prompts, responses and rows of a selection.

    Attributes:
        prompts: prompts with responses.
        responses: all responses.
        rows: rows written.
        left_out: responses that are in no row whatever their reward, by reason.
        without_rows: prompts without a row, by reason.
        rewards: sum of the rewards of all scored responses.
        scored: number of scored responses.
        first_failure: reason why the first response was not scored.
    """

    prompts: int = 0
    responses: int = 0
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    without_rows: Counter[str] = field(default_factory=Counter)
    rewards: float = 0.0
    scored: int = 0
    first_failure: str = ""

    def add_group(self, group: Sequence[Line]) -> None:
        """Count the responses to one prompt."""
        self.prompts += 1
        self.responses += len(group)
        for line in group:
            if line.get("failed"):
                self.first_failure = self.first_failure or line["failed"]
            elif line.get("reward") is not None:
                self.rewards += line["reward"]
                self.scored += 1

    @property
    def failed(self) -> int:
        """The number of responses that were not scored."""
        return self.left_out["not scored"]

    def summary(self) -> dict[str, object]:
        """Return the numbers for ``summary.json``."""
        mean = {"mean_reward": self.rewards / self.scored} if self.scored else {}
        return {
            "prompts": self.prompts,
            "responses": self.responses,
            "rows": self.rows,
            **mean,
            "responses_left_out": dict(self.left_out),
            "prompts_without_rows": dict(self.without_rows),
        }

    def __str__(self) -> str:
        parts = [f"{self.prompts} prompts, {self.responses} responses"]
        left_out = [f"{count} {why}" for why, count in self.left_out.items()]
        if left_out:
            parts.append(f"left out: {', '.join(left_out)}")
        missing = [f"{count} {why}" for why, count in self.without_rows.items()]
        if missing:
            parts.append(f"prompts without a row: {', '.join(missing)}")
        return "; ".join(parts)


def usable(group: Sequence[Line], config: SelectConfig, left_out: Counter[str]) -> list[Candidate]:
    """Return the responses to one prompt that may be in a row, in the order of samples.

    Args:
        group: the responses to one prompt.
        config: the settings ``select``.
        left_out: counts the other responses by reason.
    """
    compares = config.keep in ("best", "pairs", "ranked", "self_play")
    seen: set[str] = set()
    answers: list[Candidate] = []
    for line in group:
        text = line["response"]
        # The readers of rows compare responses without the white space around them.
        stripped = text.strip()
        if line.get("failed"):
            left_out["not scored"] += 1
        elif line["finish_reason"] == "length" and not config.keep_truncated:
            left_out["truncated"] += 1
        elif not stripped:
            left_out["empty"] += 1
        elif stripped in seen and (compares or config.distinct):
            left_out["equal to another"] += 1
        else:
            seen.add(stripped)
            reward = line.get("reward")
            answers.append(
                Candidate(line["sample"], text, float("nan") if reward is None else reward)
            )
    return answers


@dataclass(frozen=True, slots=True)
class Choice:
    """The usable responses to a prompt, and what else a selection reads.

    Args:
        answers: the usable responses, in the order of samples.
        config: the settings ``select``.
        own: the response in the row of the prompt. None if it has none.
        label: the label of the row of the prompt.
        stated: returns the text that states a reward, for ``conditioned``.
    """

    answers: Sequence[Candidate]
    config: SelectConfig
    own: str | None = None
    label: object = None
    stated: Callable[[float], str] | None = None

    def by_reward(self) -> list[Candidate]:
        """Return the responses from the highest reward to the lowest."""
        # The sort is stable, so the first of equal rewards comes first.
        return sorted(self.answers, key=lambda answer: -answer.reward)

    def completion(self, answer: Candidate) -> Row:
        """Return the row of one response for supervised training."""
        labelled = {} if self.label is None else {"label": self.label}
        return {
            "sample": answer.sample,
            "completion": answer.message,
            **labelled,
            "reward": answer.reward,
        }


Pair = tuple[Candidate, Candidate]
"""A response and another one with a lower reward."""

Chosen = tuple[list[Row], str]
"""Rows, and the reason why there are none."""


def best(choice: Choice) -> Chosen:
    """Return the rows of the responses with the highest rewards."""
    top = choice.by_reward()[: choice.config.per_prompt or 1]
    return [choice.completion(answer) for answer in top], "without a usable response"


def correct(choice: Choice) -> Chosen:
    """Return the rows of the responses whose reward reaches the threshold."""
    right = [a for a in choice.answers if a.reward >= choice.config.threshold]
    rows = [choice.completion(answer) for answer in right[: choice.config.per_prompt]]
    return rows, "without a correct response"


def pairs(choice: Choice) -> Chosen:
    """Return the pairs with the largest differences of rewards."""
    found: list[Pair] = []
    for better, worse in itertools.combinations(choice.by_reward(), 2):
        if better.reward - worse.reward > choice.config.margin:
            found.append((better, worse))
    rows: list[Row] = []
    for better, worse in spread(found, choice.config.per_prompt or 1):
        rows.append(
            {
                "sample": f"{better.sample}-{worse.sample}",
                "chosen": better.message,
                "rejected": worse.message,
                "score_chosen": better.reward,
                "score_rejected": worse.reward,
            }
        )
    return rows, "without two responses of different rewards"


def spread(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """Return the ``count`` pairs with the largest differences of rewards.

    Of equal differences, such as those of rewards of only 0 and 1, pairs of responses that fewer of
    the taken pairs have come first. All pairs of one right response would be nearly one pair.
    """
    difference: Callable[[Pair], float] = lambda pair: pair[0].reward - pair[1].reward  # noqa: E731
    taken: list[Pair] = []
    uses: Counter[int] = Counter()
    for _, tied in itertools.groupby(sorted(pairs, key=difference, reverse=True), difference):
        left = list(tied)
        while left and len(taken) < count:
            pair = min(left, key=lambda pair: uses[pair[0].sample] + uses[pair[1].sample])
            left.remove(pair)
            taken.append(pair)
            uses.update(response.sample for response in pair)
    return taken


def labelled(choice: Choice) -> Chosen:
    """Return one row for each response, with a label by the threshold."""
    rows: list[Row] = []
    for answer in choice.answers[: choice.config.per_prompt]:
        good = answer.reward >= choice.config.threshold
        row = {"sample": answer.sample, "completion": answer.message, "label": good}
        rows.append({**row, "reward": answer.reward})
    return rows, "without a usable response"


def ranked(choice: Choice) -> Chosen:
    """Return one row with all responses and their rewards as ratings."""
    why = "without two responses of different rewards"
    if len({answer.reward for answer in choice.answers}) < 2:
        return [], why
    completions: list[Row] = []
    for answer in choice.answers:
        rating = {"reward": {"Rating": answer.reward}}
        completions.append({"response": answer.message, "annotations": rating})
    return [{"sample": "all", "completions": completions}], why


def conditioned(choice: Choice) -> Chosen:
    """Return one row for each response, with the text that states its reward."""
    assert choice.stated is not None
    rows: list[Row] = []
    for answer in choice.answers[: choice.config.per_prompt]:
        stated = choice.stated(answer.reward)
        rows.append({**choice.completion(answer), "condition": stated})
    return rows, "without a usable response"


def self_play(choice: Choice) -> Chosen:
    """Return pairs of the row's own response and a response of the model."""
    own = choice.own
    if own is None or not own.strip():
        return [], "without a response in the data"
    others = [answer for answer in choice.answers if answer.text.strip() != own.strip()]
    rows: list[Row] = []
    for answer in others[: choice.config.per_prompt]:
        chosen = [{"role": "assistant", "content": own}]
        rows.append({"sample": answer.sample, "chosen": chosen, "rejected": answer.message})
    return rows, "without a response that differs from the data"


SELECTORS: dict[str, Callable[[Choice], Chosen]] = {
    "best": best,
    "correct": correct,
    "pairs": pairs,
    "labelled": labelled,
    "ranked": ranked,
    "conditioned": conditioned,
    "self_play": self_play,
}
"""The selections of ``select.keep``, except ``all``."""


def stating(config: ConditionConfig, rewards: Sequence[float]) -> Callable[[float], str]:
    """Return a function that states a reward as text.

    A label names the quantile of a reward: its mid-rank among ``rewards``, so that equal rewards
    have one label.

    Args:
        config: the settings ``select.condition``.
        rewards: all rewards of the rows, ``[n]``, in any order.
    """
    ordered = sorted(rewards)

    def state(reward: float) -> str:
        if not config.labels:
            text = f"{reward:.{config.digits}f}"
        else:
            below = bisect.bisect_left(ordered, reward)
            not_above = bisect.bisect_right(ordered, reward)
            # In integers, so that no rounding moves a reward over a border.
            place = len(config.labels) * (below + not_above) // (2 * len(ordered))
            text = config.labels[place]
        return config.template.replace("{reward}", text)

    return state


def with_condition(
    messages: Sequence[Mapping[str, Any]], text: str, where: str
) -> list[dict[str, Any]]:
    """Return ``messages`` with the text that states the reward.

    Args:
        messages: the messages of a prompt.
        text: the text.
        where: ``prompt`` puts it before the last message of the user, ``system`` at the end of the
            system message, which is made if there is none.
    """
    copies = [dict(message) for message in messages]
    if where == "prompt":
        last = copies[-2] if len(copies) > 1 and ends_with_assistant(copies) else copies[-1]
        last["content"] = joined_content(text + "\n", last["content"])
    elif copies[0]["role"] == "system":
        copies[0]["content"] = joined_content(copies[0]["content"], "\n" + text)
    else:
        copies.insert(0, {"role": "system", "content": text})
    return copies
