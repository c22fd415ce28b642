"""Check the contract of a reward function, in a separate process and under a time limit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightrft.rewards.registry import FOREIGN, REWARDS, Reward, load_reward
from lightrft.rewards.sandbox.trial import TrialOutcome, calls_on, try_rewards
from lightrft.types import Prompt, Rollout
from lightrft.utils.contract_result import CheckResult
from lightrft.utils.errors import ConfigError

TEXTS = ("42", "The answer is \\boxed{42}.", "I do not know.")


@dataclass(frozen=True, slots=True)
class Case:
    """Responses that a reward function is called on.

    Attributes:
        check: Short name of the check.
        asks: The requirement, in words.
        texts: The responses.
        times: Number of calls on each response. All must give the same numbers.
    """

    check: str
    asks: str
    texts: tuple[str, ...]
    times: int = 1


CASES = (
    Case(
        "number",
        "gives a finite number, or a dict with one named reward or score, for right and wrong "
        "responses",
        TEXTS,
    ),
    Case("empty response", "scores a response without any text", ("", " ", "\n")),
    Case("long response", "scores 100,000 characters within the time limit", ("1 + " * 25_000,)),
    Case(
        "odd characters",
        "scores what no one would type",
        ("\x00\x1b[2J", "\U0001f600" * 5, "{}%s\\frac{", "\ufffd"),
    ),
    Case("repeatable", "gives the same response the same number again", TEXTS, times=2),
)
"""The checks, in display order."""


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
OTHER_ARGUMENTS = ("group", "data")
"""Names of the argument of functions that are no rewards: filters, and losses of reward models."""


def is_reward(name: str) -> bool:
    """Return whether ``name`` is a registered reward or a function of a rollout.

    Its first parameter is named ``rollout`` or ``rollouts``, or it is the only one that must be
    given and is not named as that of another kind. A reward function of another framework is one
    too, so that it gets the message of such a function.
    """
    if ":" not in name:
        return name in REWARDS
    try:
        function = REWARDS[name]
        parameters = list(inspect.signature(function).parameters.values())
    except (ConfigError, TypeError, ValueError):  # reported where the function is looked up again
        return False
    if not parameters or parameters[0].name in ("rollout", "rollouts"):
        return bool(parameters)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in VARIADIC]
    if FOREIGN.keys() & required:
        return True
    return len(required) == 1 and required[0] not in OTHER_ARGUMENTS


def reward_verdicts(name: str, options: Mapping[str, object], limit: float) -> list[CheckResult]:
    """Run every check on a reward function.

    Args:
        name: A registered name, or ``package.module:function``.
        options: Options of the function.
        limit: Seconds for each call.

    Raises:
        RewardError: If the function does not exist, or does not take a rollout and its options.
    """
    reward = load_reward(name, options)
    found: list[CheckResult] = []
    while left := CASES[len(found) :]:
        found += _verdicts(reward, left, limit)
    return found


def _verdicts(reward: Reward, cases: Sequence[Case], limit: float) -> Iterator[CheckResult]:
    """Yield the results of the first of ``cases`` and of those that the same process could run.

    Args:
        reward: The function.
        cases: The checks.
        limit: Seconds for each call.
    """
    calls = [calls_on(reward, [_rollout(text) for text in case.texts]) for case in cases]
    all_calls = [call for each, case in zip(calls, cases) for call in each * case.times]
    outcomes = try_rewards([(reward.name, dict(reward.options))], all_calls, limit)
    begin = 0
    for each, case in zip(calls, cases):
        end = begin + len(each) * case.times
        own = outcomes[begin:end]
        is_whole = len(own) == end - begin
        # A call that ends the process, or comes too late, leaves none for the checks after it.
        if case is not cases[0] and not is_whole:
            return
        yield CheckResult(case.check, case.asks, _broken(reward, case, own, len(each), limit))
        if not is_whole:
            return
        begin = end


def _broken(
    reward: Reward, case: Case, outcomes: Sequence[TrialOutcome], once: int, limit: float
) -> str:
    """Return the violation; empty if the check passes.

    Args:
        reward: The function.
        case: The responses.
        outcomes: Those of the calls that were made.
        once: The number of calls for all responses.
        limit: Seconds for each call.
    """
    for index, outcome in enumerate(outcomes):
        if not outcome.problem:
            continue
        # The check has a limit of its own, so naming the setting would mislead.
        text = outcome.problem.replace("reward.timeout =", "the limit of")
        if not reward.batched:
            response = case.texts[index % len(case.texts)]
            text += f" on the response {response[:40]!r}"
        if outcome.trace:
            text += f"\n{outcome.trace}"
        return text
    if len(outcomes) < once * case.times:
        return f"only {len(outcomes)} calls within {limit:g} s"
    for one, other in zip(outcomes[:once], outcomes[once:]):
        if one.values != other.values:
            gave = f"gave {_shown(one.values)}, then {_shown(other.values)}"
            return f"{gave}: a run could not be repeated"
    return ""


def _rollout(text: str) -> Rollout:
    """Return a response of one token per character."""
    tokens = [ord(character) for character in text]
    prompt = Prompt("check", [1], "What is 6 * 7?", label="42", reference="42")
    sampled = [True] * len(tokens)
    logprobs = [0.0] * len(tokens)
    versions = [0] * len(tokens)
    return Rollout(prompt, tokens, sampled, logprobs, versions, "stop", seed=0, text=text)


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
