"""Safe RLHF (arXiv 2310.12773) by hand, in plain floats."""

from __future__ import annotations

import math


def gae(rewards, values, final, gamma, lam):
    """Advantages and returns of one response, from its last token to its first."""
    advantages, following, trace = [], final, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        trace = reward + gamma * following - value + gamma * lam * trace
        advantages.insert(0, trace)
        following = value
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def combined(reward, costs, multipliers):
    """(A_R - sum lambda A_C) / (1 + sum lambda) at each token."""
    found = []
    for t, advantage in enumerate(reward):
        pull = sum(m * cost[t] for m, cost in zip(multipliers, costs, strict=True))
        found.append((advantage - pull) / (1 + sum(multipliers)))
    return found


def multipliers(batches, threshold, init, lr, largest, delay, window):
    """The multiplier of each step, by the gradient of -(J - d) exp(log lambda) in log lambda."""
    log, seen, found = math.log(init), [], []
    for step, costs in enumerate(batches):
        seen = (seen + costs)[-max(window, len(costs)) :]
        if step >= delay:
            gradient = -(sum(seen) / len(seen) - threshold) * math.exp(log)
            log -= lr * gradient
            log = min(log, math.log(largest))
        found.append(math.exp(log))
    return found


def limited_bandit(reference, rewards, costs, threshold, beta):
    """The multiplier and the policy of largest reward - beta KL(policy, reference) whose cost is ``threshold``.

    With the division by 1 + lambda, which leaves the KL out, it maximises (r - lambda c) / (1 + lambda) - beta KL.
    """

    def policy(multiplier):
        tilt = [
            math.log(p) + (r - multiplier * c) / (1 + multiplier) / beta
            for p, r, c in zip(reference, rewards, costs, strict=True)
        ]
        weights = [math.exp(t - max(tilt)) for t in tilt]
        return [w / sum(weights) for w in weights]

    low, high = 0.0, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        cost = sum(p * c for p, c in zip(policy(middle), costs, strict=True))
        low, high = (middle, high) if cost > threshold else (low, middle)
    return high, policy(high)
