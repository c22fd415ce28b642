"""Responses as lines of text, for people who watch a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from lightrft.observability.trackers import Sample
from lightrft.types import Rollout

TEXT = 100
"""Most characters of a response that a warning shows: of its end, where the answer is."""


def by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts of each prompt, in the order of their first rollouts."""
    groups: dict[int, list[Rollout]] = {}
    for one in rollouts:
        groups.setdefault(id(one.prompt), []).append(one)
    return list(groups.values())


def examples(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Return a response to show with the warning of each metric, for metrics that have one.

    Args:
        rollouts: All rollouts of a step.
    """
    scored = [one for one in rollouts if one.reward is not None]
    found = {
        "rollout/frac_reward_zero_std": _first(by_prompt(scored), _has_equal_rewards),
        "response/clip_ratio": _first([[one] for one in scored], _was_cut),
        "rollout/steps_reward_zero": _first([[one] for one in scored], lambda group: True),
    }
    return {
        metric: f"{described(one)}, reward {_number(one.reward)}{_terms(one)}"
        for metric, one in found.items()
        if one is not None
    }


def _first(
    groups: Sequence[list[Rollout]], fits: Callable[[list[Rollout]], bool]
) -> Rollout | None:
    return next((group[0] for group in groups if fits(group)), None)


def _has_equal_rewards(group: list[Rollout]) -> bool:
    return len(group) > 1 and len({one.reward for one in group}) == 1


def _was_cut(group: list[Rollout]) -> bool:
    return group[0].finish_reason == "length"


def described(one: Rollout) -> str:
    """Return the end of a response and its label, on one line."""
    text = one.text if len(one.text) <= TEXT else f"...{one.text[-TEXT:]}"
    label = "" if one.prompt.label is None else f", label {one.prompt.label!r}"
    return f"response {text!r}{label}"


def _terms(one: Rollout) -> str:
    shown = ", ".join(f"{name} {_number(value)}" for name, value in one.terms.items())
    return f" ({shown})" if len(one.terms) > 1 else ""


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def table(step: int, rollouts: Sequence[Rollout], prompts: int, width: int | None = None) -> str:
    """Return the best and the worst response to some prompts, as lines.

    Args:
        step: Number of the step.
        rollouts: All rollouts of the step.
        prompts: Number of prompts.
        width: Width of the terminal in characters; None asks the terminal.
    """
    width = width or shutil.get_terminal_size().columns
    lines = []
    for ends in best_and_worst(rollouts, prompts):
        prompt = next(iter(ends.values())).prompt
        label = "" if prompt.label is None else f" (label {prompt.label!r})"
        lines.append(shortened(f"step {step}: {prompt.text!r}{label}", width))
        for name, one in ends.items():
            start = f"  {name:<5} {_number(one.reward):>6}{_terms(one)}  "
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
            "reward": float(one.reward or 0.0),
            "terms": ", ".join(f"{term} {_number(value)}" for term, value in one.terms.items()),
            "response": one.text,
        }
        for ends in best_and_worst(rollouts, prompts)
        for name, one in ends.items()
    ]


def best_and_worst(rollouts: Sequence[Rollout], prompts: int) -> list[dict[str, Rollout]]:
    """Return the ``best`` and ``worst`` response to each of some prompts.

    A single response has the name "". Responses without a reward are left out.

    Args:
        rollouts: All rollouts of the step.
        prompts: Number of prompts.
    """
    found = []
    for group in by_prompt([one for one in rollouts if one.reward is not None])[:prompts]:
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
