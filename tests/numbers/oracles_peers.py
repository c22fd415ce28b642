"""Methods of 2025 and 2026 from their papers, as slow loops in float64; earlier ones are in the other ``oracles`` files.

Losses are to be minimised. A length is the number of sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.numbers.oracles import Case, empty_rows
from tests.numbers.oracles_corrections import inside, per_sampled, weight
from tests.numbers.scalars import Rows, Scalar, clip, detach, deviation, exp, log, mean, number


def binary_kl(p: float, q: float) -> float:
    """KL of two coins that show the sampled token with probability p and q. DPPO, arXiv 2602.04879."""
    return sum(
        a * log(a / b) if b > 0 else float("inf") for a, b in ((p, q), (1 - p, 1 - q)) if a > 0
    )


def dppo_kl(case: Case, advantages: Rows, low: float, high: float) -> Rows:
    """-rho A; 0 where the policy has moved with A and ``binary_kl`` is above ``high`` (A > 0) or ``low`` (A < 0). DPPO, Binary KL."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            now, old, a = case.logprobs[i][t], case.old[i][t], advantages[i][t]
            p, q = exp(old), exp(number(now))
            far = binary_kl(p, q)
            dropped = (a > 0 and q > p and far > high) or (a < 0 and q < p and far > low)
            rows[i][t] = 0.0 if dropped else -exp(now - old) * a
    return rows


def topr(
    case: Case,
    advantages: Rows,
    up: tuple[float, float] = (1.0, 1.0),
    down: tuple[float, float] = (0.0, 1.0),
) -> Rows:
    """-sg(clip(pi / mu, a, b)) A log pi, pi / mu of the whole response; (a, b) = ``up`` where A >= 0, else ``down``.
    TOPR, arXiv 2503.14286, eq. 8."""
    rows = empty_rows(case)
    for i in range(len(case)):
        ratio = exp(sum(number(case.logprobs[i][t]) - case.old[i][t] for t in case.sampled(i)))
        for t in case.sampled(i):
            a = advantages[i][t]
            rows[i][t] = -clip(ratio, *(up if a >= 0 else down)) * a * case.logprobs[i][t]
    return rows


def mirror_descent(case: Case, rewards: Sequence[float], tau: float) -> Scalar:
    """mean_i (R_i - mean R - tau log(pi / pi_old))^2 / (2 tau), the mean over responses with sampled tokens; mean R over the group.
    Kimi k1.5, arXiv 2501.12599, eq. 2, with the mean reward for tau log Z as in section 2.3.2. 1 / (2 tau) makes its gradient eq. 3."""
    baseline = {
        i: mean([rewards[j] for j in members])
        for members in case.groups().values()
        for i in members
    }
    each = []
    for i in range(len(case)):
        if case.sampled(i):
            gap = sum(case.logprobs[i][t] - case.old[i][t] for t in case.sampled(i))
            each.append((rewards[i] - baseline[i] - tau * gap) ** 2 / (2 * tau))
    return mean(each) if each else 0.0


def released_remax(case: Case, scores: Sequence[float], coef: float) -> Scalar:
    """The mean over sampled tokens of -(A_i - coef (log pi - log pi_ref)) log pi, where the factor carries no gradient: the loss of the
    authors' code, in which the KL of a token is no part of the return of the tokens before it. ReMax, arXiv 2310.10505."""
    each = []
    for i in range(len(case)):
        for t in case.sampled(i):
            now = case.logprobs[i][t]
            each.append(-(scores[i] - coef * detach(now - case.ref[i][t])) * now)
    return mean(each) if each else 0.0


def straight_through_k3(logprob: Scalar, ref: Scalar) -> Scalar:
    """The value of k3 and the gradient of k2, d = log pi - log pi_ref."""
    d = logprob - ref
    return detach(exp(-d) - 1 + d) + d**2 / 2 - detach(d**2 / 2)


def rejected_by_divergence(case: Case, level: str, kind: str, limit: float) -> Rows:
    """1 where D <= limit, else 0; D is k2 or k3 of KL(sampler, old policy) from tokens of the sampler: of the token, or the sum, mean
    or maximum over its response."""

    def estimate(i: int, t: int) -> float:
        d = number(case.old[i][t]) - number(case.behavior[i][t])
        return d**2 / 2 if kind == "k2" else exp(d) - 1 - d

    def far(i: int, t: int) -> float:
        every = [estimate(i, s) for s in case.sampled(i)]
        return {"token": estimate(i, t), "sum": sum(every), "mean": mean(every), "max": max(every)}[
            level
        ]

    return per_sampled(case, lambda i, t: inside(far(i, t), 0.0, limit))


def truncated_and_normalised(case: Case, level: str, low: float, high: float) -> Rows:
    """clip(w, low, high) over its mean: that of all sampled tokens at token level, else that of the responses that have one."""
    rows = per_sampled(case, lambda i, t: clip(weight(case, i, t, level), low, high))
    spoken = [case.sampled(i) for i in range(len(case))]
    every = [
        rows[i][t] for i, at in enumerate(spoken) for t in (at if level == "token" else at[:1])
    ]
    middle = mean(every) if every else 1.0
    return per_sampled(case, lambda i, t: rows[i][t] / middle if middle > 1e-8 else rows[i][t])


def optimal_token_baseline(
    case: Case, token_rewards: Rows, energy: Rows, eps: float, zero_tail: bool = True
) -> Rows:
    """A_t = G_t - B_t, B_t = sum_i G_it W_it / (sum_i W_it + eps) over the responses of the group that have a t-th sampled token,
    W_t = sum_{s<=t} w_s, w = 1 - 2 pi + sum pi^2. arXiv 2602.07078.

    B_t is 0 for a group of one and, with ``zero_tail``, where one response alone is that long. Equal G give exactly 0.
    """
    rows = empty_rows(case)
    for members in case.groups().values():
        togo = {
            i: [
                sum(token_rewards[i][s] for s in case.sampled(i)[k:])
                for k in range(len(case.sampled(i)))
            ]
            for i in members
        }
        work = {
            i: [
                sum(energy[i][s] for s in case.sampled(i)[: k + 1])
                for k in range(len(case.sampled(i)))
            ]
            for i in members
        }
        for i in members:
            for k, t in enumerate(case.sampled(i)):
                there = [j for j in members if len(togo[j]) > k]
                alone = len(members) == 1 or (zero_tail and len(there) == 1)
                even = all(togo[j][k] == togo[i][k] for j in there)
                total = sum(work[j][k] for j in there) + eps
                baseline = (
                    0.0
                    if alone
                    else togo[i][k]
                    if even
                    else sum(togo[j][k] * work[j][k] for j in there) / total
                )
                rows[i][t] = togo[i][k] - baseline
    return rows


def gigpo(
    case: Case,
    rewards: Sequence[float],
    rules: tuple[float, float, float],
    steps: Rows,
    states: Rows,
    std: bool = True,
) -> Rows:
    """A = A_episode + omega A_step, ``rules`` = (gamma, omega, eps). A_episode: the response in its group, A_step: the discounted return
    of its step among all steps of the group that were taken in an equal state; each less its mean, over std + eps with ``std``.
    The reward comes at the end of the last step. GiGPO, arXiv 2505.10978, eq. 3, 6, 7 and 8."""
    gamma, omega, eps = rules

    def scaled(x: float, group: list[float]) -> float:
        if all(y == group[0] for y in group):
            return 0.0
        return (x - mean(group)) / (deviation(group, unbiased=True) + eps if std else 1.0)

    rows = empty_rows(case)
    for members in case.groups().values():
        taken = {i: sorted({int(steps[i][t]) for t in case.sampled(i)}) for i in members}
        back = {
            (i, s): gamma ** (len(taken[i]) - 1 - k) * rewards[i]
            for i in members
            for k, s in enumerate(taken[i])
        }
        state = {(i, int(steps[i][t])): int(states[i][t]) for i in members for t in case.sampled(i)}
        for i in members:
            whole = scaled(rewards[i], [rewards[j] for j in members])
            for t in case.sampled(i):
                at = (i, int(steps[i][t]))
                alike = [back[other] for other in back if state[other] == state[at]]
                rows[i][t] = whole + omega * scaled(back[at], alike)
    return rows


def m2po_released(
    case: Case, advantages: Rows, tau: float, floor_low: float, floor_high: float
) -> list[list[bool]]:
    """What the clip of the authors' released code leaves, https://github.com/Infini-AI-Lab/M2PO: bounds exp(-+c), not inside the floors;
    c is the largest |log ratio| of a token where clipping could act such that, with all of those held to c, their mean square is
    below tau. Tokens on the bound itself are kept here; that code, which takes 1e-12 off c^2, clips them."""

    def gap(i: int, t: int) -> float:
        return number(case.logprobs[i][t]) - case.behavior[i][t]

    places = [(i, t) for i in range(len(case)) for t in case.sampled(i)]
    acting = [gap(i, t) ** 2 for i, t in places if gap(i, t) * advantages[i][t] > 0]
    width = float("inf")
    if acting and mean(acting) > tau:
        fitting = [c for c in acting if sum(min(x, c) for x in acting) < tau * len(acting)]
        width = max(fitting, default=0.0) ** 0.5
    kept = [[False] * length for length in case.lengths]
    for i, t in places:
        ratio, a = exp(gap(i, t)), advantages[i][t]
        above = a > 0 and ratio > 1 + floor_high and gap(i, t) > width
        below = a < 0 and ratio < 1 - floor_low and gap(i, t) < -width
        kept[i][t] = not (above or below)
    return kept


def batch_normalised(case: Case, process: Rows) -> Rows:
    """Process rewards over the largest absolute sum of this and later ones, plus 1e-6. PRIME's released code, ``prime_norm``."""
    sums = [
        abs(sum(process[i][s] for s in case.sampled(i) if s >= t))
        for i in range(len(case))
        for t in case.sampled(i)
    ]
    return [[x / (max(sums, default=0.0) + 1e-6) for x in row] for row in process]
