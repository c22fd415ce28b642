"""Responses as lines of text, for people who watch a run."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from lightrft.config.reward import RewardConfig
from lightrft.observability.trackers import Sample
from lightrft.rewards.rules.answers import extracted
from lightrft.rewards.success import Success
from lightrft.types import Prompt, Rollout

TEXT = 160
"""Most characters of a text that a warning shows. Of a response it is the end, with the answer."""
ANSWER = 60
"""Most characters of an answer that a rule reads."""
WIDTH = 70
"""Width of the lines in a warning. The name of its level may stand before them."""


def by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts of each prompt, in the order of their first rollouts."""
    groups: dict[int, list[Rollout]] = {}
    for one in rollouts:
        groups.setdefault(id(one.prompt), []).append(one)
    return list(groups.values())


def examples(
    rollouts: Sequence[Rollout], reward: RewardConfig, *, evaluated: bool = False
) -> dict[str, str]:
    """Return a response to show with the warning of each metric, for metrics that have one.

    Args:
        rollouts: All rollouts of a step or of an evaluation.
        reward: How they are scored.
        evaluated: They are of an evaluation.
    """
    scored = [one for one in rollouts if one.reward is not None]
    cut = next((one for one in rollouts if one.finish_reason == "length"), None)
    failed = next((one for one in rollouts if one.failed), None)
    if evaluated:
        found = {"eval/truncated": cut, "eval/failed": failed}
    else:
        found = {
            "response/clip_ratio": cut,
            "rollout/frac_reward_failed": failed,
            "rollout/frac_reward_zero_std": _of_equal_rewards(scored),
            "rollout/steps_reward_zero": next(iter(scored), None),
        }
    return {metric: _example(one, reward) for metric, one in found.items() if one is not None}


def equal_outcomes(rollouts: Sequence[Rollout], success: Success) -> Iterator[str]:
    """Yield a warning for each data source whose responses all have one outcome.

    Args:
        rollouts: All rollouts of an evaluation.
        success: The rule for right responses.
    """
    by_source: dict[str, list[Rollout]] = {}
    for one in rollouts:
        if one.reward is not None and not one.failed:
            by_source.setdefault(one.prompt.data_source, []).append(one)
    for source, scored in by_source.items():
        values = {success.outcome_of(one) for one in scored}
        name = success.term(source)
        if len(scored) == 1 or len(values) > 1 or name is None:
            continue
        functions = {term.label: term.function for term in success.reward.terms_of(source)}
        where = f" to prompts of {source!r}" if len(by_source) > 1 else ""
        yield (
            f"reward {functions.get(name, name)!r} is {_number(values.pop())} for all {len(scored)} "
            f"responses{where}. Does it read the responses and the labels? For example:\n"
            f"{_example(scored[0], success.reward)}"
        )


def _example(one: Rollout, reward: RewardConfig) -> str:
    return "\n".join(f"  {line}" for line in evidence(one, reward, WIDTH - 2))


def _of_equal_rewards(scored: Sequence[Rollout]) -> Rollout | None:
    """Return a response of a group with equal rewards, if there is one."""
    groups = [group for group in by_prompt(scored) if len(group) > 1]
    return next((group[0] for group in groups if len({one.reward for one in group}) == 1), None)


def evidence(one: Rollout, reward: RewardConfig, width: int) -> list[str]:
    """Return lines with prompt, response, label and reward, and what its rules read from it.

    Args:
        one: The response.
        reward: How it is scored.
        width: Width of the lines in characters.
    """
    fields = {"prompt": shortened(repr(asked(one.prompt)), TEXT), "response": _end(one.text)}
    facts = []
    if one.prompt.label is not None:
        facts.append(f"label {shortened(repr(one.prompt.label), TEXT)}")
    text, terms = one.prompt.begun + one.text, reward.terms_of(one.prompt.data_source)
    for name, answer in extracted(terms, text, one.prompt.columns).items():
        shown = "nothing" if answer is None else shortened(repr(answer), ANSWER)
        facts.append(f"{name} reads {shown}")
    if one.reward is not None or one.failed:
        facts.append(f"reward {_number(one.reward)}{_terms(one)}")
    if facts:
        fields["result"] = ", ".join(facts)
    lines = []
    for name, text in fields.items():
        lines += textwrap.wrap(
            text,
            max(width, 40),
            initial_indent=f"{name:<10}",
            subsequent_indent=" " * 10,
            break_on_hyphens=False,
        )
    return lines


def asked(prompt: Prompt) -> str:
    """Return the question of a prompt: the last message of its user, without a template."""
    said = [one.get("content") for one in prompt.request if one.get("role") == "user"]
    return said[-1] if said and isinstance(said[-1], str) else prompt.text


def _end(text: str) -> str:
    return repr(text) if len(text) <= TEXT else f"...{text[-TEXT:]!r}"


def _terms(one: Rollout) -> str:
    shown = ", ".join(f"{name} {_number(value)}" for name, value in one.terms.items())
    return f" ({shown})" if len(one.terms) > 1 else ""


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def table(
    step: int,
    rollouts: Sequence[Rollout],
    prompts: int,
    width: int | None = None,
    unit: str = "step",
) -> str:
    """Return the best and the worst response to some prompts, as lines.

    Args:
        step: Number of the step.
        rollouts: All rollouts of the step.
        prompts: Number of prompts.
        width: Width of the terminal in characters; None asks the terminal.
        unit: Name of what ``step`` counts.
    """
    width = width or shutil.get_terminal_size().columns
    lines = []
    for ends in best_and_worst(rollouts, prompts):
        prompt = next(iter(ends.values())).prompt
        label = "" if prompt.label is None else f" (label {prompt.label!r})"
        lines.append(shortened(f"{unit} {step}: {asked(prompt)!r}{label}", width))
        for name, one in ends.items():
            is_scored = one.reward is not None or one.failed
            number = _number(one.reward) if is_scored else ""
            start = f"  {name:<5} {number:>6}{_terms(one)}  "
            lines.append(shortened(f"{start}{one.text!r}", width))
    return "\n".join(lines)


def sample_rows(rollouts: Sequence[Rollout], prompts: int) -> list[Sample]:
    """Return the best and the worst response to some prompts, for trackers.

    Args:
        rollouts: All rollouts of the step.
        prompts: Number of prompts.
    """
    return [
        {
            "prompt": one.prompt.text,
            "label": "" if one.prompt.label is None else str(one.prompt.label),
            "which": name,
            "reward": "" if one.reward is None else float(one.reward),
            "terms": ", ".join(f"{term} {_number(value)}" for term, value in one.terms.items()),
            "response": one.text,
        }
        for ends in best_and_worst(rollouts, prompts)
        for name, one in ends.items()
    ]


def best_and_worst(rollouts: Sequence[Rollout], prompts: int) -> list[dict[str, Rollout]]:
    """Return the ``best`` and ``worst`` response to each of some prompts.

    A single response has the name "". Responses without a reward are left out where some have one.

    Args:
        rollouts: All rollouts of the step.
        prompts: Number of prompts.
    """
    found = []
    scored = [one for one in rollouts if one.reward is not None]
    for group in by_prompt(scored or rollouts)[:prompts]:
        ordered = sorted(group, key=lambda one: one.reward or 0.0)
        ends = {"best": ordered[-1], "worst": ordered[0]} if ordered[1:] else {"": ordered[0]}
        found.append(ends)
    return found


def shortened(line: str, width: int) -> str:
    """Return ``line`` in ``width`` characters, without its middle if it is longer."""
    if len(line) <= width:
        return line
    left = (width - 3) * 2 // 3
    return f"{line[:left]}...{line[len(line) - (width - 3 - left) :]}"
