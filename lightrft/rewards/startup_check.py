"""The rewards of a run, tried on real rows with made-up responses before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.rewards.registry import load_reward
from lightrft.rewards.sandbox.trial import Outcome, calls_on, try_rewards
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import RewardError

log = logging.getLogger(__name__)

ROWS = 10
"""Rows that rewards are tried on."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The calls of one term: on the response to each row, or on all of them at once where the function is batched."""

    term: RewardTerm
    rollouts: Sequence[Rollout]


def check_rewards(config: RewardConfig, prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Score made-up responses to some of ``prompts`` with the rewards in force for them.

    Raises ``RewardError`` with the function's own traceback when every call of a term fails. When some fail, that is a warning.
    """
    for trial, outcomes in tried(config, made_up([prompts[i] for i in spread(len(prompts))], tokenizer)):
        problems = [outcome for outcome in outcomes if outcome.problem]
        if problems:
            text = failure_text(trial.term.function, problems, len(outcomes))
            if len(problems) == len(outcomes):
                raise RewardError(text)
            log.warning("%s", text)


def spread(count: int) -> list[int]:
    """Return the places of ``ROWS`` rows, or of all where there are fewer, evenly over ``count`` rows."""
    rows = min(ROWS, count)
    return [i * count // rows for i in range(rows)]


def failure_text(name: str, problems: Sequence[Outcome], calls: int) -> str:
    """Say how often a reward failed, and show the first failure."""
    first = problems[0]
    share = f"{len(problems)} of {calls} made-up responses to rows of the data"
    return f"reward {name!r} failed on {share}. The first failure:\n{first.trace}\n{first.problem}"


def tried(config: RewardConfig, rollouts: Sequence[Rollout]) -> Iterator[tuple[Trial, list[Outcome]]]:
    """Yield each term with the outcomes of its calls on the ``rollouts`` that it scores."""
    for trial in _trials(config, rollouts):
        reward = load_reward(trial.term.function, trial.term.options)
        calls = calls_on(reward, trial.rollouts)
        yield trial, try_rewards([(reward.name, dict(reward.options))], calls, config.deadline)


def _trials(config: RewardConfig, rollouts: Sequence[Rollout]) -> Iterator[Trial]:
    """Yield each term once, with the rollouts whose data source it is for."""
    lists = {source: terms for source, terms in config.per_source.items() if terms}
    for source, terms in {"": config.terms, **lists}.items():
        own = [r for r in rollouts if (r.prompt.data_source if r.prompt.data_source in lists else "") == source]
        yield from (Trial(term, own) for term in terms if own)


def made_up(prompts: Sequence[Prompt], tokenizer: Any) -> list[Rollout]:
    """Return a response to each of ``prompts``: its row's own answer, nothing, and a wrong number in turn."""
    texts = (lambda p: answer_of(p) or "42", lambda _: "", lambda _: "I think that the answer is \\boxed{-17}.")
    return [answered(prompt, texts[i % len(texts)](prompt), tokenizer, i + 1) for i, prompt in enumerate(prompts)]


def answer_of(prompt: Prompt) -> str | None:
    """Return the answer that a row has itself: its reference, else its label."""
    own = prompt.reference if isinstance(prompt.reference, str) else prompt.label
    return None if own is None or isinstance(own, dict | list) else str(own)


def answered(prompt: Prompt, text: str, tokenizer: Any, sample: int = 0) -> Rollout:
    """Return a rollout that says ``text``, as number ``sample`` of those to ``prompt``."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    zeros = [0.0] * len(tokens)
    return Rollout(
        prompt, tokens, [True] * len(tokens), zeros, [0] * len(tokens), "stop", seed=sample + 1, sample=sample, text=text
    )
