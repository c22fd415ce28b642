"""Try the rewards of a run on real rows with made-up responses, before training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrft.config.reward import RewardConfig, RewardTerm
from lightrft.rewards.registry import load_reward
from lightrft.rewards.sandbox.trial import TrialOutcome, calls_on, try_rewards
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import RewardError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ROWS = 10
"""Number of rows that rewards are tried on."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The calls of one term: one per response, or one for all if the function is batched."""

    term: RewardTerm
    rollouts: Sequence[Rollout]


def check_rewards(
    config: RewardConfig, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Score made-up responses to some of ``prompts`` with the configured rewards.

    If only some calls of a term fail, log a warning.

    Args:
        config: The settings ``reward``.
        prompts: Rows of the data.
        tokenizer: Encodes the made-up responses.

    Raises:
        RewardError: If every call of a term fails. The message contains the function's own
            traceback. If no call gives the value that ``reward.success`` names.
    """
    some = [prompts[i] for i in spread(len(prompts))]
    for trial, outcomes in tried(config, made_up(some, tokenizer)):
        _check_success(config, trial.term, outcomes)
        problems = [outcome for outcome in outcomes if outcome.problem]
        if not problems:
            continue
        first = problems[0]
        share = f"{len(problems)} of {len(outcomes)} made-up responses to rows of the data"
        text = (
            f"reward {trial.term.function!r} failed on {share}. The first failure:\n"
            f"{first.trace}\n{first.problem}"
        )
        if lacking := sum(rollout.prompt.label is None for rollout in trial.rollouts):
            text += (
                f"\n{lacking} of the rows have no label, which is None for the function; name its "
                "column in data.columns.label"
            )
        # A reward may rightly raise on some rows, and the run then only drops these responses.
        if len(problems) == len(outcomes):
            raise RewardError(text)
        log.warning("%s", text)


def _check_success(
    config: RewardConfig, term: RewardTerm, outcomes: Sequence[TrialOutcome]
) -> None:
    """Raise ``RewardError`` if no call of a term gives the value that ``reward.success`` names.

    A failed call shows no names, so nothing is known where one failed.
    """
    if any(outcome.problem for outcome in outcomes):
        return
    given = {f"{term.label}/{name}" for outcome in outcomes for name in outcome.names}
    known = {term.label} | given
    for name in config.success:
        if name.startswith(f"{term.label}/") and name not in known:
            raise RewardError(
                f"reward.success = {name!r}: {term.function} gives no such value"
                f"{did_you_mean(name, known)}; it gives {', '.join(sorted(known))}"
            )


def spread(count: int) -> list[int]:
    """Return the indices of ``ROWS`` rows, spread evenly over ``count`` rows.

    If there are fewer rows, return all of them.
    """
    rows = min(ROWS, count)
    return [i * count // rows for i in range(rows)]


def tried(
    config: RewardConfig,
    rollouts: Sequence[Rollout],
) -> Iterator[tuple[Trial, list[TrialOutcome]]]:
    """Yield each term with the outcomes of its calls on the ``rollouts`` that it scores."""
    for trial in _trials(config, rollouts):
        reward = load_reward(trial.term.function, trial.term.options)
        calls = calls_on(reward, trial.rollouts)
        specs = [(reward.name, dict(reward.options))]
        yield trial, try_rewards(specs, calls, config.timeout)


def _trials(config: RewardConfig, rollouts: Sequence[Rollout]) -> Iterator[Trial]:
    """Yield each term once, with the rollouts of its data source."""
    lists = {source: terms for source, terms in config.per_source.items() if terms}
    by_source: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        source = rollout.prompt.data_source
        # The empty source stands for all that have no terms of their own.
        by_source.setdefault(source if source in lists else "", []).append(rollout)
    for source, terms in {"": config.terms, **lists}.items():
        if source in by_source:
            yield from (Trial(term, by_source[source]) for term in terms)


def made_up(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Rollout]:
    """Return a made-up response to each prompt.

    In turn it is the label or reference of the row, nothing, and a wrong number.
    """
    rollouts = []
    for i, prompt in enumerate(prompts):
        texts = (answer_of(prompt) or "42", "", "I think that the answer is \\boxed{-17}.")
        rollouts.append(answered(prompt, texts[i % len(texts)], tokenizer, i + 1))
    return rollouts


def answer_of(prompt: Prompt) -> str | None:
    """Return the expected answer of a row: its reference, else its label."""
    own = prompt.reference if isinstance(prompt.reference, str) else prompt.label
    if own is None or isinstance(own, dict | list):
        return None
    return str(own)


def answered(
    prompt: Prompt, text: str, tokenizer: PreTrainedTokenizerBase, sample: int = 0
) -> Rollout:
    """Build a rollout with the response ``text``.

    Args:
        prompt: The prompt.
        text: The response.
        tokenizer: Encodes ``text``.
        sample: Index of the response among the responses to ``prompt``.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)
    zeros = [0.0] * len(tokens)
    return Rollout(
        prompt,
        tokens,
        [True] * len(tokens),
        zeros,
        [0] * len(tokens),
        "stop",
        seed=sample + 1,
        sample=sample,
        text=text,
    )
