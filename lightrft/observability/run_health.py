"""Warnings for a run that learns nothing or less than it seems to.

Each rule is one row over the metrics of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rule:
    """Warn where a metric is above a bound.

    Args:
        metric: name of the metric.
        above: the largest value that needs no warning.
        message: the warning. ``{value}`` is the metric, ``{reward}`` the mean reward of the step.
        needs: the rule applies only to algorithms with this need (see ``Requirements.needs``). An
            empty text means all algorithms.
        less: name of a metric to subtract from ``metric``, such as a share that is no problem. An
            empty text subtracts nothing.
    """

    metric: str
    above: float
    message: str
    needs: str = ""
    less: str = ""

    def value(self, values: Values) -> float:
        """Return the number that is compared with ``above``."""
        return values.get(self.metric, 0.0) - values.get(self.less, 0.0)


RULES = (
    Rule(
        "rollout/frac_reward_failed",
        0.0,
        "{value:.1%} of responses got no reward; they are not trained on. Mend what reward.terms "
        "names",
    ),
    Rule(
        "rollout/num_ungraded",
        0,
        "{value:.0f} responses were counted as wrong, since grading them takes too long",
    ),
    Rule(
        "rollout/frac_reward_zero_std",
        0.5,
        "{value:.0%} of groups have equal rewards (mean {reward:.3g}); such a group has no "
        "gradient. The prompts are too easy or too hard for the policy, or the reward is constant",
        needs="groups",
        less="rollout/frac_reward_zero_std_trained",
    ),
    Rule(
        "response/clip_ratio",
        0.25,
        "{value:.0%} of responses were cut at sampling.max_new_tokens, so most of them have no "
        "answer; raise it",
    ),
    Rule(
        "rollout/steps_reward_zero",
        2,
        "every reward was 0 in the last {value:.0f} steps; look at rollouts/ in the run folder: "
        "can the policy reach a reward?",
    ),
    Rule(
        "rollout/steps_not_trained",
        0,
        "steps in a row that learned nothing: {value:.0f}; no response had an advantage, or no "
        "optimizer step was taken. Look at rollout/frac_reward_zero_std and rollout/dropped/... "
        "in metrics.jsonl",
    ),
    Rule(
        "policy/skipped_steps",
        0,
        "{value:.0f} optimizer steps were skipped, since the gradient was not finite; lower "
        "optimizer.lr",
    ),
    Rule(
        "policy/nonfinite_tokens",
        0,
        "{value:.0f} tokens have a log-prob that is not finite; they are not trained on",
    ),
    *(
        Rule(
            f"{data}/nonfinite_tokens",
            0,
            "{value:.0f} tokens of the data have a log-prob that is not finite; they "
            "are not trained on. Can the model give them: is a part of its vocabulary masked?",
        )
        for data in ("sft", "preference", "distill", "ptx")
    ),
    Rule(
        "reward_model/nonfinite_scores",
        0,
        "{value:.0f} scores are not finite; their responses are not trained on",
    ),
    Rule(
        "process_model/nonfinite_scores",
        0,
        "{value:.0f} scores are not finite; their steps are not trained on",
    ),
    Rule(
        "distill/unaligned_share",
        0.5,
        "{value:.0%} of trained tokens have no place in the text of the teacher, whose tokenizer "
        "is another one; they are not compared. Do responses hold special tokens or characters "
        "that the tokenizer does not know?",
    ),
    Rule(
        "policy/old_kl",
        1.0,
        "one update moved the policy by {value:.3g} nats per token; lower optimizer.lr or "
        "train.ppo_epochs",
    ),
    Rule(
        "policy/kl",
        10.0,
        "the policy is {value:.3g} nats per token away from the reference; lower optimizer.lr, "
        "or raise algorithm.kl.coef",
    ),
    Rule(
        "eval/failed",
        0,
        "{value:.0f} eval responses got no reward; they count as wrong. Mend what reward.terms "
        "names",
    ),
    Rule(
        "eval/outcome_values",
        1,
        "the term that is taken for right or wrong has {value:.0f} values on one side of "
        "eval.threshold, so it is a score, and eval/accuracy is the share that reaches the "
        "threshold. Set reward.success to the term or value that says which response is right, or "
        "eval.threshold to the smallest value of a right response; or read eval/reward",
    ),
    Rule(
        "eval/truncated",
        0.25,
        "{value:.0%} of eval responses were cut at eval.sampling.max_new_tokens; raise it",
    ),
)
"""Rules in the order in which they are reported."""


def reward_is_zero(values: Values) -> bool | None:
    """Return whether every reward of a step is 0; None for a step without rewards."""
    if "reward/max" not in values:
        return None
    return values["reward/max"] == 0 and values["reward/min"] == 0


def is_not_trained(values: Values) -> bool | None:
    """Return whether nothing was learned in a step; None for an evaluation before the first step.

    A step learns nothing without an optimizer step or without any gradient. It also learns nothing
    if no response has an advantage, unless another loss trains the model (``OTHER_LESSONS``). The
    remaining terms of the loss only keep the policy close to its present state.
    """
    if not any(name in values for name in STEP_TOKENS):
        return None
    if not any(_of_kind(values, "/optimizer_steps")):
        return True
    if not any(_of_kind(values, "/grad_norm")):
        return True
    if any(name in values for name in OTHER_LESSONS):
        return False
    return values.get("policy/frac_rows_with_advantage", 1.0) == 0


STEP_TOKENS = (
    *("rollout/tokens_sampled", "sft/tokens", "preference/tokens", "distill/tokens"),
    *("reward_model/tokens", "process_model/tokens"),
)
"""Metrics that every step has, and an evaluation does not."""


def _of_kind(values: Values, suffix: str) -> list[float]:
    """Return the values of a metric over all models."""
    return [value for name, value in values.items() if name.endswith(suffix)]


OTHER_LESSONS = ("policy/divergence", "policy/positive_nll", "ptx/nll", "critic/optimizer_steps")
"""Metrics of losses that train a model without the rewards of responses."""


STREAKS: Mapping[str, Callable[[Values], bool | None]] = {
    "rollout/steps_reward_zero": reward_is_zero,
    "rollout/steps_not_trained": is_not_trained,
}
"""Metrics that count the newest steps in a row for which a condition holds."""


@dataclass(slots=True)
class Health:
    """The warnings given so far in a run.

    Args:
        needs: the needs of the algorithm (see ``Requirements.needs``).
        reasons: the most common cause for the warning of a metric.
        examples: lines about a response, to show with the warning of a metric.
    """

    needs: frozenset[str] = frozenset()
    reasons: dict[str, str] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    _streaks: dict[str, int] = field(default_factory=dict)
    _warned: dict[str, float] = field(default_factory=dict)

    @property
    def streaks(self) -> dict[str, int]:
        """Numbers of newest steps in a row above 0, by the metric that counts them."""
        return {name: count for name, count in self._streaks.items() if count}

    def resume(self, row: Values) -> None:
        """Continue the streaks of a run whose newest metrics are ``row``."""
        self._streaks = {name: int(row.get(name, 0)) for name in STREAKS}

    def blame(self, metric: str, causes: Counter[str]) -> None:
        """Remember the most common of ``causes`` for the next warning of ``metric``."""
        if causes:
            self.reasons[metric] = causes.most_common(1)[0][0]

    def count(self, values: Values) -> dict[str, int]:
        """Count the step with the metrics ``values``.

        Return the streak metrics that apply to it.
        """
        counted = {}
        for name, holds in STREAKS.items():
            held = holds(values)
            # Neither continues a streak nor ends it.
            if held is None:
                continue
            self._streaks[name] = self._streaks.get(name, 0) + 1 if held else 0
            counted[name] = self._streaks[name]
        return counted

    def warnings(self, values: Values) -> list[str]:
        """Return the messages for ``values``.

        A rule applies the first time that its metric exceeds the bound, and then each time that the
        value has doubled.
        """
        return [self._message(rule, values) for rule in self._due(values)]

    def _due(self, values: Values) -> Iterable[Rule]:
        for rule in RULES:
            if rule.needs and rule.needs not in self.needs:
                continue
            value = rule.value(values)
            # NaN is above no bound, but it is the worst that a metric can be.
            if math.isnan(value):
                value = math.inf
            last = self._warned.get(rule.metric, 0.0)
            # After an infinite value no value has doubled.
            has_doubled = last < math.inf and value >= 2 * last
            if value > rule.above and has_doubled:
                self._warned[rule.metric] = value
                yield rule

    def _message(self, rule: Rule, values: Values) -> str:
        reward = values.get("reward/mean", 0.0)
        text = rule.message.format(value=rule.value(values), reward=reward)
        text += f" ({rule.metric})"
        if reason := self.reasons.get(rule.metric):
            text += f". Most common cause: {reason}"
        if example := self.examples.get(rule.metric):
            text += f". For example:\n{example}"
        return text
