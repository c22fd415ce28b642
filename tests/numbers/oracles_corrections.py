"""Weights that make up for a sampler that is not the policy that is trained, as slow loops in float64.

A weight multiplies the loss of a token and carries no gradient. d_t = log pi_old - log pi_behavior of a sampled token; the weight
of a token is exp(d_t), of a response exp(sum d) (``sequence``) or exp(mean d) (``geometric``), the same on each of its sampled
tokens. A response without sampled tokens has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.numbers.oracles import Case, clipped, empty_rows
from tests.numbers.scalars import Rows, clip, exp, mean, number

LEVELS = ("token", "sequence", "geometric")


def gap(case: Case, i: int, t: int) -> float:
    return number(case.old[i][t]) - number(case.behavior[i][t])


def weight(case: Case, i: int, t: int, level: str) -> float:
    """exp(d_t), exp(sum d) or exp(mean d)."""
    every = [gap(case, i, s) for s in case.sampled(i)]
    return exp(
        {
            "token": lambda: gap(case, i, t),
            "sequence": lambda: sum(every),
            "geometric": lambda: mean(every),
        }[level]()
    )


def per_sampled(case: Case, rule: Callable[[int, int], float]) -> Rows:
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            rows[i][t] = rule(i, t)
    return rows


def truncated(case: Case, level: str, high: float, low: float = 0.0) -> Rows:
    """clamp(w, low, high). Truncated importance sampling: Yao et al. 2025, Your efficient RL framework secretly brings you
    off-policy training; IMPALA, arXiv 1802.01561, at token level; at sequence level the product over the response."""
    return per_sampled(case, lambda i, t: clip(weight(case, i, t, level), low, high))


def masked(case: Case, level: str, low: float, high: float) -> Rows:
    """w where low <= w <= high, else 0. At token level IcePop (Ring-1T, arXiv 2510.18855); at sequence level masked importance
    sampling (Liu et al. 2025, When speed kills stability)."""
    return per_sampled(
        case, lambda i, t: inside(weight(case, i, t, level), low, high) * weight(case, i, t, level)
    )


def icepop(case: Case, low: float, high: float) -> Rows:
    """``masked`` at token level."""
    return masked(case, "token", low, high)


def rejected(case: Case, level: str, low: float, high: float) -> Rows:
    """1 where low <= w <= high, else 0: dropped or untouched, never weighed."""
    return per_sampled(case, lambda i, t: inside(weight(case, i, t, level), low, high))


def masked_by_sequence(
    case: Case, level: str, low: float, high: float, cap: float | None = None
) -> Rows:
    """Token weights exp(d_t) on responses whose weight at ``level`` is in [low, high], 0 on the others. ``cap`` None is what the
    frameworks compute, weights without a bound; with it they are min(exp(d_t), cap), which is what one of them says it does."""

    def rule(i: int, t: int) -> float:
        token = weight(case, i, t, "token")
        return inside(weight(case, i, t, level), low, high) * (
            token if cap is None else min(token, cap)
        )

    return per_sampled(case, rule)


def inside(w: float, low: float, high: float) -> float:
    return 1.0 if low <= w <= high else 0.0


def off_policy_sequence_mask(case: Case, advantages: Sequence[float], delta: float) -> Rows:
    """0 on a response with A < 0 and mean(log pi_behavior - log pi) > delta, else 1; log pi of the current policy.
    DeepSeek-V3.2, arXiv 2512.02556."""

    def rule(i: int, t: int) -> float:
        far = mean(
            [number(case.behavior[i][s]) - number(case.logprobs[i][s]) for s in case.sampled(i)]
        )
        return 0.0 if advantages[i] < 0 and far > delta else 1.0

    return per_sampled(case, rule)


def decoupled_ppo(
    case: Case, advantages: Rows, low: float, high: float, cap: float | None = None
) -> Rows:
    """exp(log pi_prox - log pi_behavior) * PPO-clip of exp(log pi - log pi_prox), pi_prox = ``case.old``: clipped around the
    proximal policy, weighed for the sampler. AReaL, arXiv 2505.24298; Batch size-invariance, arXiv 2110.00641.
    ``cap``: tokens with a larger weight are left out."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            w = weight(case, i, t, "token")
            if cap is None or w <= cap:
                rows[i][t] = w * clipped(
                    exp(case.logprobs[i][t] - case.old[i][t]), advantages[i][t], low, high
                )
    return rows


def version_share(behavior: int, proximal: int, current: int) -> float:
    """(v_prox - v_behavior) / (v_current - v_behavior), in [0, 1]; 0 for a token of the current version. AReaL, proximal
    log-prob approximation."""
    if current <= behavior:
        return 0.0
    return clip((proximal - behavior) / (current - behavior), 0.0, 1.0)


def interpolated_proximal(case: Case, versions: Sequence[int], proximal: int, current: int) -> Rows:
    """log pi_behavior + alpha (log pi - log pi_behavior), alpha = ``version_share`` of the response's version; no gradient.
    AReaL, proximal log-prob approximation: no forward of the proximal policy is run."""

    def rule(i: int, t: int) -> float:
        alpha = version_share(versions[i], proximal, current)
        return case.behavior[i][t] + alpha * (number(case.logprobs[i][t]) - case.behavior[i][t])

    return per_sampled(case, rule)
