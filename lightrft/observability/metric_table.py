"""The metrics of a step and of an evaluation: over what each is a mean, and its meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

TRAINED = "trained tokens of responses that can get a gradient"
ALL_TRAINED = "trained tokens"
SCORED = "scored responses"
RESPONSES = "responses"
BATCH = "responses of the batch"
GROUPS = "groups of at least two scored responses, before filters and where they are trained"
STEP = "one number"
SUM = "sum"
PROMPTS = "eval prompts whose data source has an outcome"
EVAL = "responses to the eval set"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric, or one family of metrics.

    Attributes:
        name: Its name, with ``<...>`` for a part that varies, and ``</...>`` for one that may be
            absent.
        over: The set that it is a mean over, or another reduction.
        meaning: Its meaning, in Markdown.
        when: The steps that lack it. Empty if every step has it.
    """

    name: str
    over: str
    meaning: str
    when: str = ""


_NO_GRADIENT = "no response can get a gradient"
_NO_BATCH = "nothing is trained"
METRICS: tuple[MetricRow, ...] = (
    MetricRow(
        "seconds", STEP, "seconds that the run has taken, without pauses between its processes"
    ),
    MetricRow("tokens_per_second", STEP, "sampled tokens by `time/step`", "nothing is sampled"),
    MetricRow("reward/mean", SCORED, "reward, before shaping", "no response is scored"),
    MetricRow("reward/std", SCORED, "standard deviation of the reward", "no response is scored"),
    MetricRow("reward/max", "largest", "largest reward", "no response is scored"),
    MetricRow("reward/min", "smallest", "smallest reward", "no response is scored"),
    MetricRow("reward/seen", STEP, "number of rewards that normalization has seen", _NO_BATCH),
    MetricRow("reward/<term>", "scored responses with the term", "a term, without its weight"),
    MetricRow("response/length", RESPONSES, "length in tokens"),
    MetricRow("response/max_length", "largest", "longest response, in tokens"),
    MetricRow("response/clip_ratio", RESPONSES, "share that `sampling.max_new_tokens` cut"),
    MetricRow(
        "response/reflections",
        RESPONSES,
        "number of words by which a response looks back: let me think, let me reconsider, "
        "actually, wait, correction, mistake, wrong, rethink",
    ),
    MetricRow(
        "response/repetition",
        RESPONSES,
        "share of the substrings of a response that occurred in it before",
        "without `log.repetition`",
    ),
    MetricRow(
        "rollout/entropy",
        "sampled tokens of all responses",
        "minus the log-prob of the sampler: an estimate of the entropy that it samples with, in "
        "every step and without a forward pass",
    ),
    MetricRow("rollout/frac_reward_failed", RESPONSES, "share without a reward; not trained on"),
    MetricRow("rollout/frac_reward_zero_std", GROUPS, "share with equal rewards"),
    MetricRow(
        "rollout/frac_reward_zero_std_trained",
        GROUPS,
        "share with equal rewards that has a gradient nevertheless, by a shaping or a baseline",
    ),
    MetricRow("rollout/frac_dropped", "sampled tokens", "share in dropped groups"),
    MetricRow("rollout/baseline", "greedy responses", "reward of the greedy responses", "none"),
    MetricRow("rollout/groups", SUM, "groups trained on"),
    MetricRow("rollout/rounds", SUM, "rounds of generation"),
    MetricRow("rollout/num_failed", SUM, "responses that were not scored"),
    MetricRow("rollout/num_aborted", SUM, "responses that were cut off"),
    MetricRow("rollout/num_ungraded", SUM, "responses that take too long to grade"),
    MetricRow(
        "rollout/steps_reward_zero",
        STEP,
        "newest steps in a row without any reward",
        "no response is scored",
    ),
    MetricRow("rollout/steps_not_trained", STEP, "newest steps in a row that learned nothing"),
    MetricRow("rollout/tokens_<kind>", SUM, "tokens sampled, trained, filtered, failed, carried"),
    MetricRow(
        "rollout/tokens_filtered/<reason>", SUM, "filtered tokens by reason", "none for this reason"
    ),
    MetricRow("rollout/dropped/<reason>", SUM, "dropped groups by reason", "none for this reason"),
    MetricRow("rollout/draft_acceptance", "drafted tokens", "share accepted", "no drafts"),
    MetricRow("rollout/drafted_tokens", SUM, "drafted tokens", "no drafts"),
    MetricRow("rollout/compile<...>", STEP, "compiled decoding so far", "not compiled"),
    MetricRow("policy/loss", STEP, "the loss, as `algorithm.aggregation` divides it", _NO_BATCH),
    MetricRow("policy/frac_rows_with_advantage", BATCH, "share with one"),
    MetricRow(
        "policy/advantage_clip_fraction",
        "tokens of the batch",
        "share whose advantage is at a bound of `algorithm.advantage.clip`",
        "without it",
    ),
    MetricRow("policy/frac_rows_with_loss", BATCH, "share in the loss"),
    MetricRow(
        "policy/clip_fraction",
        ALL_TRAINED,
        "share whose gradient is clipped; tokens without a gradient are not clipped",
    ),
    MetricRow("policy/token_mask", ALL_TRAINED, "weight of the token masks", "without masks"),
    MetricRow(
        "policy/entropy",
        TRAINED,
        "entropy of the policy; responses without a gradient are not run, so `rollout/entropy` is "
        "the one over all responses",
        _NO_GRADIENT,
    ),
    MetricRow("policy/ratio", TRAINED, "new probability by old", _NO_GRADIENT),
    MetricRow("policy/weight", TRAINED, "weight of a token in the loss", _NO_GRADIENT),
    MetricRow("policy/correction", TRAINED, "importance weight", _NO_GRADIENT),
    MetricRow("policy/<name>", TRAINED, "further numbers of the policy loss", _NO_GRADIENT),
    MetricRow("policy/old_kl", TRAINED, "KL of the policy from the old one", _NO_GRADIENT),
    MetricRow("policy/kl", TRAINED, "KL of the policy from the reference", _NO_GRADIENT),
    MetricRow("policy/teacher_kl", TRAINED, "log-prob minus the teacher's", _NO_GRADIENT),
    MetricRow("policy/divergence", TRAINED, "divergence from the teacher", _NO_GRADIENT),
    MetricRow(
        "policy/rollout_logprob_diff",
        TRAINED,
        "distance of the old log-prob from the sampler's",
        _NO_GRADIENT,
    ),
    MetricRow("policy/positive_nll", "trained tokens of right responses", "minus the log-prob"),
    MetricRow("policy/nonfinite_tokens", SUM, "tokens whose log-prob is not finite"),
    MetricRow(
        "policy/router_aux_loss",
        "tokens of the optimizer step",
        "load-balancing loss of experts, before its coefficient; not part of `policy/loss` or "
        "`loss`",
        "`model.router_aux_loss_coef` is 0",
    ),
    MetricRow("policy/kl_coef", STEP, "coefficient of the KL term", _NO_BATCH),
    MetricRow("policy/kl_per_answer", BATCH, "KL of a whole response from the reference"),
    MetricRow("policy/entropy_coef", STEP, "coefficient of the entropy bonus", _NO_BATCH),
    *(
        MetricRow(f"{who}/{name}", over, meaning, _NO_BATCH if over == STEP else "")
        for who in ("policy", "critic", "cost_critic", "prm")
        for name, over, meaning in (
            ("grad_norm", "largest", "norm of the gradient, before it is clipped"),
            ("lr", STEP, "learning rate of the last optimizer step"),
            ("skipped_steps", SUM, "optimizer steps with a gradient that is not finite"),
            ("optimizer_steps", SUM, "optimizer steps taken"),
        )
    ),
    *(
        MetricRow(f"{who}/{name}", over, meaning, _NO_BATCH if over == STEP else "")
        for who in ("critic", "cost_critic")
        for name, over, meaning in (
            ("loss", STEP, "loss of the critic"),
            ("values", ALL_TRAINED, "value"),
            ("returns", ALL_TRAINED, "target of the value"),
            ("seen", STEP, "number of targets that normalization has seen"),
        )
    ),
    MetricRow("prm/loss", STEP, "cross-entropy of the outcomes of responses", _NO_BATCH),
    MetricRow("prm/accuracy", BATCH, "share whose outcome it tells"),
    MetricRow("lagrangian/cost</name>", BATCH, "a cost; with several costs, of this name"),
    MetricRow("lagrangian/cost_window</name>", "responses of the window", "a cost", _NO_BATCH),
    MetricRow("lagrangian/lambda</name>", STEP, "multiplier of a cost", _NO_BATCH),
    MetricRow("curriculum/<name>", "prompts of the data", "what the curriculum has seen"),
    MetricRow("staleness/mean", ALL_TRAINED, "age of the weights that sampled, in steps"),
    MetricRow("staleness/max", "largest", "age of the weights that sampled, in steps"),
    MetricRow("eval/accuracy", PROMPTS, "share of right responses"),
    MetricRow("eval/accuracy_<end>", PROMPTS, "95 % interval and standard error"),
    MetricRow(
        "eval/outcome_values",
        "largest",
        "values of the outcome term on one side of `eval.threshold`; with more than one it is a "
        "score, and `eval/accuracy` is the share that reaches the threshold",
        "the outcome is a built-in rule, or `reward.success` or `eval.threshold` is set",
    ),
    MetricRow("eval/pass", PROMPTS, "share with a right response", "`eval.samples` is 1"),
    MetricRow("eval/pass@<k>", PROMPTS, "any of k responses is right", "`eval.samples` is 1"),
    MetricRow("eval/pass^<k>", PROMPTS, "all of k responses are right", "`eval.samples` is 1"),
    MetricRow("eval/reward", "scored responses to the eval set", "reward"),
    MetricRow("eval/length", EVAL, "length in tokens"),
    MetricRow("eval/truncated", EVAL, "share that `eval.sampling.max_new_tokens` cut"),
    MetricRow("eval/failed", SUM, "responses that could not be scored; they are wrong"),
    MetricRow("eval/media_errors", SUM, "prompts whose media are gone"),
    MetricRow("eval/terms/<term>", "scored responses to the eval set", "a term of the reward"),
    MetricRow("hub/failed", SUM, "models that were not pushed to the hub", "no push is due"),
    MetricRow("time/<phase>", SUM, "seconds of a phase", "the phase does not run"),
    MetricRow(
        "perf/mfu",
        STEP,
        "model FLOPs utilization: FLOPs that the updates need by the model's formula, over "
        "`time/update` and the peak of the device; of the first rank",
        "the peak is neither known nor set by `log.peak_tflops`, or nothing is trained",
    ),
    MetricRow(
        "gpu/utilization",
        "samples, one each second",
        "share of the time in which a kernel runs; of the first rank's GPU",
        "no CUDA, or the package `nvidia-ml-py` is missing (extra `gpu`)",
    ),
    MetricRow("gpu/memory_used", STEP, "GiB in use on the first rank's GPU", "no CUDA"),
    MetricRow("gpu/memory_peak", "largest", "GiB of the first rank's tensors", "no CUDA"),
)
"""Metrics of ``rl`` and of evaluations. A mean of several optimizer steps is over their tokens."""


def metric_row(name: str) -> MetricRow | None:
    """Return the row of a metric, or ``None`` if the table lacks it."""
    return next((row for row, pattern in _patterns() if pattern.fullmatch(name)), None)


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[MetricRow, re.Pattern[str]]]:
    # Exact names first: ``reward/<term>`` fits ``reward/mean``, too.
    rows = sorted(METRICS, key=lambda row: ("<" in row.name, -len(row.name)))
    return [(row, re.compile(_pattern(row.name))) for row in rows]


def _pattern(name: str) -> str:
    parts = re.split("(<[^>]*>)", name)
    varied = {"</": ".*", "<": ".+"}
    return "".join(
        next((varied[mark] for mark in varied if part.startswith(mark)), re.escape(part))
        for part in parts
    )
