"""Every formula once more, from the papers, as slow loops over single tokens in float64.

Nothing here is shared with the package, and nothing is vectorised: this is what the package is held to. ``Case.with_leaves``
makes one input 0-d tensors, and ``scalars.gradients`` then differentiates the loop itself.

Letters: B responses, ``Rows`` a ragged list ``[B][lengths[i]]``. A function that returns ``Rows`` returns 0.0 where the policy
sampled nothing; only the sampled places mean anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.numbers.scalars import (
    Rows,
    Scalar,
    clip,
    detach,
    deviation,
    exp,
    greatest,
    least,
    leaves,
    mean,
    number,
    sigmoid,
)

Mask = list[list[bool]]


@dataclass
class Case:
    """A global batch as plain lists. ``mask[i][t]``: the policy sampled token t of response i. ``values[i][t]`` is the value of
    the state before that token, ``final_values[i]`` of the state after the last one. ``prompt_of[i]`` is the group of response i.
    """

    lengths: list[int]
    prompt_of: list[int]
    mask: Mask
    logprobs: Rows
    old: Rows
    behavior: Rows
    ref: Rows
    values: Rows
    rewards: list[float]
    truncated: list[bool]
    final_values: list[float]

    def __len__(self) -> int:
        return len(self.lengths)

    def sampled(self, i: int) -> list[int]:
        """Positions of response i that the policy sampled."""
        return [t for t in range(self.lengths[i]) if self.mask[i][t]]

    def groups(self) -> dict[int, list[int]]:
        """The responses of each prompt."""
        found: dict[int, list[int]] = {}
        for i in range(len(self)):
            found.setdefault(self.prompt_of[i], []).append(i)
        return found

    def with_leaves(self, name: str) -> Case:
        """A copy whose rows ``name`` are 0-d tensors that record gradients."""
        return dataclasses.replace(self, **{name: leaves(getattr(self, name))})


def empty_rows(case: Case) -> Rows:
    return [[0.0] * n for n in case.lengths]


def on_sampled(case: Case, per_response: Sequence[Scalar]) -> Rows:
    """One number per response, on each of its sampled tokens."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            rows[i][t] = per_response[i]
    return rows


def flat(rows: Rows) -> list[float]:
    return [number(x) for row in rows for x in row]


# Advantages of whole responses: rewards [B] -> advantages [B]
# A group of one has no baseline: its advantage is 0 by our convention. A group of equal rewards is exactly 0.


def per_group(
    case: Case, rule: Callable[[float, list[float], list[int]], float], rewards: Sequence[float]
) -> list[float]:
    """``rule(reward, rewards of the group, sampled tokens of each member)`` for each response."""
    out = [0.0] * len(case)
    for members in case.groups().values():
        group, sizes = [rewards[j] for j in members], [len(case.sampled(j)) for j in members]
        if len(members) > 1 and any(r != group[0] for r in group):
            for i in members:
                out[i] = rule(rewards[i], group, sizes)
    return out


def grpo(case: Case, rewards: Sequence[float], eps: float) -> list[float]:
    """(R - mean) / (std + eps), std over n-1. DeepSeekMath, arXiv 2402.03300, section 4.1.2."""
    return per_group(
        case,
        lambda r, group, _: (r - mean(group)) / (deviation(group, unbiased=True) + eps),
        rewards,
    )


def dr_grpo(case: Case, rewards: Sequence[float]) -> list[float]:
    """R - mean. Understanding R1-Zero-like training, arXiv 2503.20783."""
    return per_group(case, lambda r, group, _: r - mean(group), rewards)


def rloo(case: Case, rewards: Sequence[float]) -> list[float]:
    """R minus the mean of the other rewards. Back to Basics, arXiv 2402.14740, section 3.1."""
    return per_group(case, lambda r, group, _: r - (sum(group) - r) / (len(group) - 1), rewards)


def opo(case: Case, rewards: Sequence[float]) -> list[float]:
    """R minus the length-weighted mean reward; length = sampled tokens. On-Policy RL with Optimal Baseline, arXiv 2505.23585.
    A group without any sampled token has no token to carry an advantage: 0."""

    def rule(r: float, group: list[float], sizes: list[int]) -> float:
        if sum(sizes) == 0:
            return 0.0
        return r - sum(n * x for n, x in zip(sizes, group, strict=True)) / sum(sizes)

    return per_group(case, rule, rewards)


def maxrl(case: Case, rewards: Sequence[float], eps: float) -> list[float]:
    """(R - mean) / (mean + eps), for rewards in [0, 1]. Maximum-likelihood reinforcement learning."""
    return per_group(case, lambda r, group, _: (r - mean(group)) / (mean(group) + eps), rewards)


# Advantages of single tokens


def returns(case: Case, token_rewards: Rows, gamma: float) -> Rows:
    """G_t = sum_{s >= t} gamma^(s-t) r_s over sampled tokens: a token that the policy did not sample is no step.
    REINFORCE, Williams 1992; REINFORCE++, arXiv 2501.03262."""
    rows = empty_rows(case)
    for i in range(len(case)):
        steps = case.sampled(i)
        for k, t in enumerate(steps):
            rows[i][t] = sum(
                gamma ** (m - k) * token_rewards[i][steps[m]] for m in range(k, len(steps))
            )
    return rows


def gae(
    case: Case, token_rewards: Rows, gamma: float, lam: float, bootstrap: bool = False
) -> tuple[Rows, Rows]:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t. GAE, arXiv 1506.02438, Eq. 16; and A + V.

    Steps are the sampled tokens alone. After the last one the value is 0, or with ``bootstrap`` ``final_values`` where the answer was cut.
    """
    advantages, targets = empty_rows(case), empty_rows(case)
    for i in range(len(case)):
        steps = case.sampled(i)
        v = [case.values[i][t] for t in steps] + [
            case.final_values[i] if bootstrap and case.truncated[i] else 0.0
        ]
        delta = [token_rewards[i][t] + gamma * v[k + 1] - v[k] for k, t in enumerate(steps)]
        for k, t in enumerate(steps):
            advantages[i][t] = sum(
                (gamma * lam) ** (m - k) * delta[m] for m in range(k, len(steps))
            )
            targets[i][t] = advantages[i][t] + v[k]
    return advantages, targets


def whiten(case: Case, rows: Rows, unbiased: bool, eps: float, stabilizer: str = "std+eps") -> Rows:
    """(A - mean) / std over all sampled tokens of the global batch.

    ``stabilizer``, how eps enters: ``std+eps`` A/(std + eps); ``var+eps`` A/sqrt(var + eps); ``var>=eps`` A/sqrt(max(var, eps)).
    Equal advantages become exactly 0.
    """
    xs = [rows[i][t] for i in range(len(case)) for t in case.sampled(i)]
    out, std = empty_rows(case), deviation(xs, unbiased)
    if std == 0:
        return out
    scale = {
        "std+eps": std + eps,
        "var+eps": math.sqrt(std**2 + eps),
        "var>=eps": math.sqrt(max(std**2, eps)),
    }[stabilizer]
    for i in range(len(case)):
        for t in case.sampled(i):
            out[i][t] = (rows[i][t] - mean(xs)) / scale
    return out


def reinforce_pp(
    case: Case,
    token_rewards: Rows,
    gamma: float,
    unbiased: bool,
    eps: float,
    stabilizer: str = "std+eps",
) -> Rows:
    """Returns of token rewards (KL inside), whitened over the global batch. REINFORCE++, arXiv 2501.03262."""
    return whiten(case, returns(case, token_rewards, gamma), unbiased, eps, stabilizer)


def reinforce_pp_baseline(
    case: Case, rewards: Sequence[float], unbiased: bool, eps: float, stabilizer: str = "std+eps"
) -> Rows:
    """R - group mean on every sampled token, whitened over the global batch. REINFORCE++ with baseline, arXiv 2501.03262."""
    return whiten(case, on_sampled(case, dr_grpo(case, rewards)), unbiased, eps, stabilizer)


# Rewards of tokens


def kl_estimate(logprob: Scalar, ref: Scalar, kind: str) -> Scalar:
    """k1, k2, k3 of KL(pi, ref) at one sampled token. Schulman, Approximating KL divergence, 2020."""
    d = logprob - ref
    return {"k1": lambda: d, "k2": lambda: d * d / 2, "k3": lambda: exp(-d) - 1 + d}[kind]()


def weighted_kl_estimate(logprob: Scalar, old: Scalar, ref: Scalar, kind: str) -> Scalar:
    """(pi / pi_old) k, with gradient through the ratio. DeepSeek-V3.2, arXiv 2512.02556 (there with k3)."""
    return exp(logprob - old) * kl_estimate(logprob, ref, kind)


def kl_rows(case: Case, kind: str, weighted: bool = False) -> Rows:
    """The KL term of the loss: estimates between ``logprobs`` and ``ref``."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            now, old, ref = case.logprobs[i][t], case.old[i][t], case.ref[i][t]
            rows[i][t] = (
                weighted_kl_estimate(now, old, ref, kind)
                if weighted
                else kl_estimate(now, ref, kind)
            )
    return rows


def token_rewards(
    case: Case,
    rewards: Sequence[float],
    kl_coef: float,
    kind: str,
    reward_clip: tuple[float, float] | None = None,
) -> Rows:
    """-kl_coef * k(old, ref) on each sampled token, plus the clipped outcome on the last of them.
    InstructGPT, arXiv 2203.02155, section 3.5; Fine-tuning from human preferences, arXiv 1909.08593, Eq. 2."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            rows[i][t] = -kl_coef * kl_estimate(case.old[i][t], case.ref[i][t], kind)
        if case.sampled(i):
            outcome = rewards[i] if reward_clip is None else clip(rewards[i], *reward_clip)
            rows[i][case.sampled(i)[-1]] += outcome
    return rows


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Soft overlong punishment: 0, then falling over the last ``buffer`` tokens, then -1. DAPO, arXiv 2503.14476, Eq. 13."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return factor * (max_length - buffer - length) / buffer
    return -factor


def adaptive_kl(value: float, current: float, target: float, samples: int, horizon: int) -> float:
    """The next KL coefficient. Fine-tuning from human preferences, arXiv 1909.08593, section 2.2."""
    return value * (1 + clip(current / target - 1, -0.2, 0.2) * samples / horizon)


# Policy losses of single tokens, to be minimised


def per_token(case: Case, advantages: Rows, rule: Callable[[Scalar, float, float], Scalar]) -> Rows:
    """``rule(logprob, old, advantage)`` on each sampled token."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            rows[i][t] = rule(case.logprobs[i][t], case.old[i][t], advantages[i][t])
    return rows


def clipped(ratio: Scalar, a: float, low: float, high: float) -> Scalar:
    return -least(ratio * a, clip(ratio, 1 - low, 1 + high) * a)


def ppo(
    case: Case,
    advantages: Rows,
    low: float,
    high: float,
    dual: float | None = None,
    ratio_cap: float | None = None,
) -> Rows:
    """PPO, arXiv 1707.06347, Eq. 7; low != high: DAPO, arXiv 2503.14476, Eq. 8. ``dual``: dual-clip PPO, arXiv 1912.09729.
    ``ratio_cap`` > 1 + high bounds the ratio for negative advantages too (two-sided clipping): INTELLECT-2, arXiv 2505.07291."""

    def rule(now: Scalar, old: float, a: float) -> Scalar:
        ratio = exp(now - old)
        inside = clip(ratio, 1 - low, 1 + high)
        bounded = ratio if ratio_cap is None else least(ratio, ratio_cap)
        loss = -least(bounded * a, inside * a)
        return least(loss, -dual * a) if dual is not None and a < 0 else loss

    return per_token(case, advantages, rule)


def unclipped(case: Case, advantages: Rows) -> Rows:
    """-r A: the importance-weighted policy gradient (conservative policy iteration), arXiv 1707.06347, Eq. 6."""
    return per_token(case, advantages, lambda now, old, a: -exp(now - old) * a)


def reinforce(case: Case, advantages: Rows) -> Rows:
    """-A log pi. Williams 1992."""
    return per_token(case, advantages, lambda now, old, a: -a * now)


def cispo(case: Case, advantages: Rows, low: float, high: float) -> Rows:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi. MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5."""
    return per_token(
        case,
        advantages,
        lambda now, old, a: -detach(clip(exp(now - old), 1 - low, 1 + high)) * a * now,
    )


def cispo_absolute(case: Case, advantages: Rows, cap: float) -> Rows:
    """The variant that bounds the ratio from above only, by ``cap`` itself: -sg(min(r, cap)) A log pi."""
    return per_token(
        case, advantages, lambda now, old, a: -detach(least(exp(now - old), cap)) * a * now
    )


def cpgd(case: Case, advantages: Rows, low: float, high: float) -> Rows:
    """Clipped log-ratio, without the policy drift: -min(ln r A, clip(ln r, ln(1-low), ln(1+high)) A). arXiv 2505.12504."""

    def rule(now: Scalar, old: float, a: float) -> Scalar:
        return -least((now - old) * a, clip(now - old, math.log(1 - low), math.log(1 + high)) * a)

    return per_token(case, advantages, rule)


def cpgd_of_logprobs(case: Case, advantages: Rows, low: float, high: float) -> Rows:
    """The variant on log-probs in place of log-ratios: the same gradient, the loss lower by A log pi_old."""

    def rule(now: Scalar, old: float, a: float) -> Scalar:
        return -a * (
            least(now, old + math.log(1 + high))
            if a > 0
            else greatest(now, old + math.log(1 - low))
        )

    return per_token(case, advantages, rule)


def sapo(case: Case, advantages: Rows, tau_pos: float, tau_neg: float) -> Rows:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A. Soft adaptive policy optimization, arXiv 2511.20347."""

    def rule(now: Scalar, old: float, a: float) -> Scalar:
        tau = tau_pos if a > 0 else tau_neg
        return -a * (4 / tau) * sigmoid(tau * (exp(now - old) - 1))

    return per_token(case, advantages, rule)


def sequence_ratio(case: Case, i: int) -> Scalar:
    """s_i = exp(mean over sampled tokens of log r). GSPO, arXiv 2507.18071, Eq. 7."""
    return exp(mean([case.logprobs[i][t] - case.old[i][t] for t in case.sampled(i)]))


def gspo(case: Case, advantages: Sequence[float], low: float, high: float) -> Rows:
    """-min(s A, clip(s) A), A ``[B]``; each sampled token carries the loss of its response. GSPO, arXiv 2507.18071, Eq. 5."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            rows[i][t] = clipped(sequence_ratio(case, i), advantages[i], low, high)
    return rows


def gspo_token(case: Case, advantages: Rows, low: float, high: float) -> Rows:
    """s_{i,t} = sg(s_i) pi / sg(pi), clipped token by token. GSPO-token, arXiv 2507.18071, Eq. 13 and 14."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            now = case.logprobs[i][t]
            ratio = detach(sequence_ratio(case, i)) * exp(now - detach(now))
            rows[i][t] = clipped(ratio, advantages[i][t], low, high)
    return rows


def gmpo(case: Case, advantages: Sequence[float], low: float, high: float) -> Rows:
    """-A exp(mean z), z = a min(a d, a clip(d, -low, high)), d = log r, a = sign A, A ``[B]``; low and high in log space.
    Each sampled token carries the loss of its response. Geometric-mean policy optimization, arXiv 2507.20673, Eq. 4."""
    rows = empty_rows(case)
    for i in range(len(case)):
        sign = (advantages[i] > 0) - (advantages[i] < 0)
        z = []
        for t in case.sampled(i):
            d = case.logprobs[i][t] - case.old[i][t]
            z.append(sign * least(sign * d, sign * clip(d, -low, high)))
        for t in case.sampled(i):
            rows[i][t] = -advantages[i] * exp(mean(z))
    return rows


def value_loss(case: Case, old_values: Rows, targets: Rows, value_clip: float | None) -> Rows:
    """1/2 max((V - G)^2, (clip(V, V_old +- eps) - G)^2). PPO2's critic loss; see arXiv 2005.12729, section 3."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            v, old, target = case.values[i][t], old_values[i][t], targets[i][t]
            loss = (v - target) ** 2
            if value_clip is not None:
                loss = greatest(loss, (clip(v, old - value_clip, old + value_clip) - target) ** 2)
            rows[i][t] = loss / 2
    return rows


# Aggregation: the rows of the GLOBAL batch -> one number
# Nothing sampled anywhere gives 0.


def aggregate(case: Case, rows: Rows, mode: str, max_length: int = 0) -> Scalar:
    """By name: token, sequence, sequence_sum, constant, prompt."""
    if mode == "constant":
        return aggregate_constant(case, rows, max_length)
    modes = {"token": aggregate_token, "sequence": aggregate_sequence}
    return (modes | {"sequence_sum": aggregate_sequence_sum, "prompt": aggregate_prompt})[mode](
        case, rows
    )


def aggregate_token(case: Case, rows: Rows) -> Scalar:
    """Sum over all sampled tokens / their number. DAPO, arXiv 2503.14476, Eq. 8."""
    every = [rows[i][t] for i in range(len(case)) for t in case.sampled(i)]
    return mean(every) if every else 0.0


def aggregate_sequence(case: Case, rows: Rows) -> Scalar:
    """Mean over responses of their token mean; one without sampled tokens does not count. GRPO, arXiv 2402.03300, Eq. 3."""
    each = [
        mean([rows[i][t] for t in case.sampled(i)]) for i in range(len(case)) if case.sampled(i)
    ]
    return mean(each) if each else 0.0


def aggregate_sequence_sum(case: Case, rows: Rows) -> Scalar:
    """Mean over responses of their token sum; a response without sampled tokens does not count."""
    each = [sum(rows[i][t] for t in case.sampled(i)) for i in range(len(case)) if case.sampled(i)]
    return mean(each) if each else 0.0


def aggregate_constant(case: Case, rows: Rows, max_length: int) -> Scalar:
    """Sum / (B * max_length), B all responses, the empty ones too. Dr. GRPO, arXiv 2503.20783."""
    return sum(rows[i][t] for i in range(len(case)) for t in case.sampled(i)) / (
        len(case) * max_length
    )


def aggregate_prompt(case: Case, rows: Rows) -> Scalar:
    """Mean over prompts of the token mean inside the prompt; a prompt without sampled tokens does not count."""
    each = []
    for members in case.groups().values():
        inside = [rows[i][t] for i in members for t in case.sampled(i)]
        if inside:
            each.append(mean(inside))
    return mean(each) if each else 0.0
