"""Losses and advantages under the specification's public names, as loops over Python floats, from their papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Numbers = Sequence[float]
Rectangle = Sequence[Numbers]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mean(numbers: Numbers) -> float:
    return sum(numbers) / len(numbers)


def log_softmax(logits: Numbers) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


def over_rows(mask: Rectangle, token_loss: Callable[[int, int], float]) -> float:
    """Mean over rows of the mean over the counted tokens of a row; rows without any are left out."""
    rows = []
    for i, marks in enumerate(mask):
        losses = [token_loss(i, t) for t, mark in enumerate(marks) if mark]
        if losses:
            rows.append(mean(losses))
    return mean(rows) if rows else 0.0


def ppo(new: Rectangle, old: Rectangle, adv: Rectangle, mask: Rectangle, eps: float) -> float:
    """-min(r A, clip(r, 1 - eps, 1 + eps) A). arXiv 1707.06347, eq. 7."""

    def loss(i: int, t: int) -> float:
        ratio, a = math.exp(new[i][t] - old[i][t]), adv[i][t]
        return -min(ratio * a, min(max(ratio, 1 - eps), 1 + eps) * a)

    return over_rows(mask, loss)


def cpgd(new: Rectangle, old: Rectangle, adv: Rectangle, mask: Rectangle, eps: float) -> float:
    """-A logp, logp at most old + log(1 + eps) where A > 0 and at least old + log(1 - eps) elsewhere. arXiv 2505.12504."""

    def loss(i: int, t: int) -> float:
        logp, a = new[i][t], adv[i][t]
        if a > 0:
            logp = min(logp, old[i][t] + math.log(1 + eps))
        else:
            logp = max(logp, old[i][t] + math.log(1 - eps))
        return -a * logp

    return over_rows(mask, loss)


def value(
    now: Rectangle, old: Rectangle, returns: Rectangle, mask: Rectangle, eps: float | None
) -> float:
    """The larger of the plain and the clipped squared error, halved. PPO's code."""

    def loss(i: int, t: int) -> float:
        error = (now[i][t] - returns[i][t]) ** 2
        if eps is not None:
            clipped = old[i][t] + min(max(now[i][t] - old[i][t], -eps), eps)
            error = max(error, (clipped - returns[i][t]) ** 2)
        return error / 2

    return over_rows(mask, loss)


def pairwise(chosen: Numbers, rejected: Numbers, margin: float = 0.0) -> float:
    """-log sigma(c - r - m). arXiv 2307.09288, eq. 2."""
    return mean([-math.log(sigmoid(c - r - margin)) for c, r in zip(chosen, rejected, strict=True)])


def hps(chosen: Numbers, rejected: Numbers) -> float:
    """Cross-entropy of the classes [chosen, rejected], label chosen. arXiv 2303.14420."""
    return mean([-log_softmax([c, r])[0] for c, r in zip(chosen, rejected, strict=True)])


def dpo(pc: Numbers, pr: Numbers, rc: Numbers, rr: Numbers, beta: float, smooth: float) -> float:
    """-(1 - e) log sigma(b h) - e log sigma(-b h). arXiv 2305.18290, eq. 7; cDPO, eq. 3."""
    losses = []
    for a, b, c, d in zip(pc, pr, rc, rr, strict=True):
        h = beta * ((a - b) - (c - d))
        losses.append(-(1 - smooth) * math.log(sigmoid(h)) - smooth * math.log(sigmoid(-h)))
    return mean(losses)


def ipo(pc: Numbers, pr: Numbers, rc: Numbers, rr: Numbers, beta: float) -> float:
    """(h - 1 / (2 beta))^2. arXiv 2310.12036, eq. 17."""
    zipped = zip(pc, pr, rc, rr, strict=True)
    return mean([((a - b) - (c - d) - 1 / (2 * beta)) ** 2 for a, b, c, d in zipped])


def kto(
    chosen: Numbers,
    rejected: Numbers,
    kl_chosen: float,
    kl_rejected: float,
    beta: float,
    w: Numbers,
) -> float:
    """w_D (1 - sigma(b (d - z))) and w_U (1 - sigma(b (z - d))), d log-ratios, z = max(0, KL). arXiv 2402.01306, eq. 7."""
    zc, zr = max(0.0, kl_chosen), max(0.0, kl_rejected)
    good = [w[0] * (1 - sigmoid(beta * (d - zc))) for d in chosen]
    bad = [w[1] * (1 - sigmoid(beta * (zr - d))) for d in rejected]
    return mean(good + bad)


def next_token(logits: Sequence[Rectangle], labels: Sequence[Sequence[int]]) -> float:
    """Mean of -log p(label t + 1) at place t over the labels that are not -100."""
    losses = []
    for row, own in zip(logits, labels, strict=True):
        for t in range(len(own) - 1):
            if own[t + 1] != -100:
                losses.append(-log_softmax(row[t])[own[t + 1]])
    return mean(losses)


def distilled(
    student: Sequence[Rectangle], teacher: Sequence[Rectangle], labels: Sequence[Sequence[int]]
) -> float:
    """Mean of -sum_v p_T(v) log p_S(v) over the labels that are not -100."""
    losses = []
    for i, own in enumerate(labels):
        for t, label in enumerate(own):
            if label != -100:
                target = [math.exp(x) for x in log_softmax(teacher[i][t])]
                losses.append(
                    -sum(p * q for p, q in zip(target, log_softmax(student[i][t]), strict=True))
                )
    return mean(losses)


def pooled(
    states: Rectangle,
    query: Numbers,
    k: Rectangle,
    v: Rectangle,
    heads: int,
    bias_at_end: float = 0.0,
) -> list[float]:
    """Attention of one query to all states of a row, head by head, without projections of query and output."""
    width, length = len(query), len(states)
    size = width // heads
    project = [[sum(w * x for w, x in zip(row, s, strict=True)) for row in k] for s in states]
    values = [[sum(w * x for w, x in zip(row, s, strict=True)) for row in v] for s in states]
    result = []
    for head in range(heads):
        own = range(head * size, (head + 1) * size)
        logits = [
            sum(query[j] * project[t][j] for j in own) / math.sqrt(size) + bias_at_end * t / length
            for t in range(length)
        ]
        weights = [math.exp(x) for x in log_softmax(logits)]
        result += [sum(w * values[t][j] for t, w in enumerate(weights)) for j in own]
    return result


def group_baseline(rewards: Numbers, size: int, name: str) -> list[float]:
    """Rewards of neighbours less the mean of the others (RLOO), less the mean, or standardized (GRPO)."""
    result = []
    for start in range(0, len(rewards), size):
        own = rewards[start : start + size]
        center = mean(own)
        deviation = math.sqrt(sum((x - center) ** 2 for x in own) / (size - 1))
        for i, x in enumerate(own):
            others = [y for j, y in enumerate(own) if j != i]
            if name == "rloo":
                result.append(x - mean(others))
            elif name == "reinforce_baseline":
                result.append(x - center)
            else:
                result.append((x - center) / (deviation + 1e-9))
    return result


def discounted(rewards: Rectangle, mask: Rectangle, gamma: float) -> list[list[float]]:
    """sum_{s >= t} gamma^(s - t) r_s over the actions of a row."""
    return gae(rewards, [[0.0] * len(row) for row in rewards], mask, gamma, 1.0)


def gae(
    rewards: Rectangle, values: Rectangle, mask: Rectangle, gamma: float, lam: float
) -> list[list[float]]:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}. arXiv 1506.02438, eq. 16."""
    result = []
    for r, v, marks in zip(rewards, values, mask, strict=True):
        row, following, carried = [0.0] * len(r), 0.0, 0.0
        for t in reversed(range(len(r))):
            if marks[t]:
                carried = r[t] + gamma * following - v[t] + gamma * lam * carried
                row[t], following = carried, v[t]
        result.append(row)
    return result
