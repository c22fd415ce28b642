"""Advantages of the second circle of methods, from their papers, as slow loops in float64; the first are in ``oracles``.

Unless a function says otherwise, a group of one and a group of equal rewards have exactly 0: they have no baseline, or no signal.
A length is the number of sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.numbers.oracles import (
    Case,
    dr_grpo,
    empty_rows,
    gae,
    grpo,
    on_sampled,
    per_group,
    returns,
    rloo,
)
from tests.numbers.scalars import Rows, deviation, mean

# Of whole responses: rewards [B] -> advantages [B]


def pass_at_k(case: Case, rewards: Sequence[float], eps: float | None = None) -> list[float]:
    """The best response of a group gets R_(1) - R_(2), the others 0; with ``eps`` over (std + eps), std over n-1.
    Two equal best ones leave 0 for everybody. Policy gradient of max@k, arXiv 2503.19595."""

    def rule(r: float, group: list[float], sizes: list[int]) -> float:
        first, second = sorted(group, reverse=True)[:2]
        gap = first - second if r == first else 0.0
        return gap if eps is None else gap / (deviation(group, unbiased=True) + eps)

    return per_group(case, rule, rewards)


def lite_ppo(case: Case, rewards: Sequence[float], unbiased: bool, eps: float) -> list[float]:
    """(R - mean of the group) / (std + eps), std over the rewards of the whole global batch.
    Tricks or traps, arXiv 2508.08221."""
    return [
        a / (deviation(rewards, unbiased) + eps) if a != 0 else 0.0 for a in dr_grpo(case, rewards)
    ]


def gdpo(
    case: Case,
    terms: Sequence[Sequence[float]],
    weights: Sequence[float],
    unbiased: bool,
    eps: float,
) -> list[float]:
    """Each reward term ``[B]`` as in GRPO inside its group, their weighted sum, then (A - mean) / (std + eps) over the responses
    of the global batch. GDPO, arXiv 2601.05242. ``unbiased`` is about the batch; sums that are all equal become 0.
    """
    each = [grpo(case, term, eps) for term in terms]
    total = [sum(w * a[i] for w, a in zip(weights, each, strict=True)) for i in range(len(case))]
    std = deviation(total, unbiased)
    return [0.0 if std == 0 else (x - mean(total)) / (std + eps) for x in total]


def gpg(case: Case, rewards: Sequence[float], eps: float | None = None) -> list[float]:
    """alpha (R - mean) / F, alpha = B / (responses of groups whose rewards are not all equal). F is 1, or std + eps (over n-1)
    when ``eps`` is given. GPG, arXiv 2504.02546: alpha makes up for groups that carry no gradient."""
    plain = dr_grpo(case, rewards) if eps is None else grpo(case, rewards, eps)
    groups = [[rewards[j] for j in members] for members in case.groups().values()]
    live = sum(len(group) for group in groups if any(r != group[0] for r in group))
    return [a * len(case) / live if live else 0.0 for a in plain]


def raft(case: Case, rewards: Sequence[float]) -> list[float]:
    """1 for the best response of a group, 0 for the others: imitation of the best of n. RAFT, arXiv 2304.06767, Algorithm 1.
    Its arg max is one response: the first of those that tie. No baseline is taken away, so a group of one gets 1 too."""
    out = [0.0] * len(case)
    for members in case.groups().values():
        out[max(members, key=lambda i: (rewards[i], -i))] = 1.0
    return out


def rft(rewards: Sequence[float], threshold: float) -> list[float]:
    """1 where R >= threshold, else 0: imitation of what was right. Rejection sampling fine-tuning, arXiv 2308.01825."""
    return [1.0 if r >= threshold else 0.0 for r in rewards]


def rae(
    rewards: Sequence[float], role_of: Sequence[int], decay: float, start: dict[int, float]
) -> list[float]:
    """R - b of the role, b <- decay b + (1 - decay) R before it is taken away, response by response in the given order.
    SPIRAL, arXiv 2506.24119."""
    baseline, out = dict(start), []
    for r, role in zip(rewards, role_of, strict=True):
        baseline[role] = decay * baseline.get(role, 0.0) + (1 - decay) * r
        out.append(r - baseline[role])
    return out


# Of single tokens


def remax(case: Case, token_rewards: Rows, greedy: Sequence[float], gamma: float = 1.0) -> Rows:
    """Discounted sum of this and later rewards, minus the reward of the greedy answer to the same prompt, ``greedy [B]``, discounted
    from the last sampled token on. ReMax, arXiv 2310.10505; the discount is its authors'. It needs no group: a group of one has an
    advantage."""
    rows = returns(case, token_rewards, gamma=gamma)
    for i in range(len(case)):
        for k, t in enumerate(case.sampled(i)):
            rows[i][t] -= gamma ** (len(case.sampled(i)) - 1 - k) * greedy[i]
    return rows


def adaptive_lambda(length: int, alpha: float) -> float:
    """1 - 1 / (alpha l). VAPO, arXiv 2504.05118. Below l = 1/alpha it would be negative; we take 0 there."""
    return max(0.0, 1 - 1 / (alpha * length)) if length else 0.0


def vapo(
    case: Case, token_rewards: Rows, gamma: float, alpha: float, bootstrap: bool = False
) -> tuple[Rows, Rows]:
    """GAE with a lambda for each response, ``adaptive_lambda`` of its length; and the targets of the critic, which are of
    lambda = 1 (decoupled GAE). VAPO, arXiv 2504.05118; VC-PPO, arXiv 2503.01491."""
    rows = empty_rows(case)
    for i in range(len(case)):
        lam = adaptive_lambda(len(case.sampled(i)), alpha)
        rows[i] = gae(case, token_rewards, gamma, lam, bootstrap)[0][i]
    return rows, gae(case, token_rewards, gamma, 1.0, bootstrap)[1]


def implicit_rewards(case: Case, reward_model: Rows, beta: float) -> Rows:
    """beta (log pi_phi - log pi_ref) of each sampled token. Free process rewards, arXiv 2412.01981."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            rows[i][t] = beta * (reward_model[i][t] - case.ref[i][t])
    return rows


def other_means(case: Case, process: Rows, i: int) -> list[float]:
    """Mean token reward of each other response of the group of i. One without sampled tokens has none and does not count."""
    others = [j for j in case.groups()[case.prompt_of[i]] if j != i and case.sampled(j)]
    return [mean([process[j][t] for t in case.sampled(j)]) for j in others]


def prime(case: Case, outcomes: Sequence[float], process: Rows, gamma: float) -> Rows:
    """sum_{s >= t} gamma^(s-t) (r_s - b_i) + RLOO of the outcome; b_i is the mean, over the other responses of the group, of
    their mean token reward. PRIME, arXiv 2502.01456. Without another response that has tokens the first part is 0.

    The paper writes r_phi(y^j) for the baseline; its text says that averaged process rewards make it, which is what this takes.
    """
    centred = empty_rows(case)
    for i in range(len(case)):
        others = other_means(case, process, i)
        for t in case.sampled(i):
            centred[i][t] = process[i][t] - mean(others) if others else 0.0
    rows, outcome = returns(case, centred, gamma), on_sampled(case, rloo(case, outcomes))
    return [
        [a + b for a, b in zip(left, right, strict=True)]
        for left, right in zip(rows, outcome, strict=True)
    ]


def prime_released(
    case: Case, outcomes: Sequence[float], process: Rows, outcome_coef: float, process_coef: float
) -> Rows:
    """The variant of the released code: gamma is 1, and from a token reward r, G/(G-1) r - sum_j mean_j / (G-1) is made, j over the
    whole group, the response itself too: a response whose token rewards are unequal moves away from the paper by
    (r - mean_i) / (G-1). Coefficients weigh the two parts. G counts responses that have tokens."""
    centred = empty_rows(case)
    for i in range(len(case)):
        others = other_means(case, process, i)
        if case.sampled(i) and others:
            size, own = len(others) + 1, mean([process[i][t] for t in case.sampled(i)])
            for t in case.sampled(i):
                centred[i][t] = (
                    process_coef * (process[i][t] * size - own - sum(others)) / (size - 1)
                )
    rows, outcome = (
        returns(case, centred, 1.0),
        on_sampled(case, [outcome_coef * a for a in rloo(case, outcomes)]),
    )
    return [
        [a + b for a, b in zip(left, right, strict=True)]
        for left, right in zip(rows, outcome, strict=True)
    ]


def distilled(case: Case, advantages: Rows | None, teacher: Rows, coef: float) -> Rows:
    """A_t - coef (log pi_old - log pi_teacher) at the sampled token; ``advantages`` None: the teacher alone.
    On-policy distillation: the per-token reverse KL as a reward that no discount carries back (Thinking Machines, 2025)."""
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            rows[i][t] = (advantages[i][t] if advantages else 0.0) - coef * (
                case.old[i][t] - teacher[i][t]
            )
    return rows
