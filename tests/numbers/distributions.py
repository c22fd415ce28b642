"""Distributions, exact KL gradients and the learning rate, from the papers, as slow loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from tests.numbers.scalars import Scalar, clip, exp, gradients, leaves, log, number, tanh

# Exact expected gradients of KL terms on a softmax policy over a few outcomes


def kl_divergence(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def reverse_kl_gradient(logits: Sequence[float], ref_logits: Sequence[float]) -> list[float]:
    """d KL(pi, ref) / d logit_j = pi_j (log(pi_j / ref_j) - KL)."""
    p, q = softmax(logits), softmax(ref_logits)
    return [a * (math.log(a / b) - kl_divergence(p, q)) for a, b in zip(p, q, strict=True)]


def forward_kl_gradient(logits: Sequence[float], ref_logits: Sequence[float]) -> list[float]:
    """d KL(ref, pi) / d logit_j = pi_j - ref_j."""
    return [a - b for a, b in zip(softmax(logits), softmax(ref_logits), strict=True)]


def no_gradient(logits: Sequence[float], ref_logits: Sequence[float]) -> list[float]:
    """E[grad log pi] = 0."""
    return [0.0 for _ in logits]


EXPECTED_KL_GRADIENT = {
    "k1_in_loss": no_gradient,
    "k2_in_loss": reverse_kl_gradient,
    "k3_in_loss": forward_kl_gradient,
    "k1_in_reward": reverse_kl_gradient,
    "weighted_k3_in_loss": reverse_kl_gradient,
}


def enumerated_gradient(
    logits: Sequence[float],
    loss: Callable[[int, Scalar], Scalar],
    sampler: Sequence[float] | None = None,
) -> list[float]:
    """sum_y q(y) d loss(y, log pi(y)) / d logits: the expected gradient with y drawn from ``sampler`` (the policy when None)."""
    q = softmax(logits) if sampler is None else sampler
    total = [0.0] * len(logits)
    for y in range(len(logits)):
        theta = leaves([list(logits)])
        for j, g in enumerate(gradients(loss(y, log_softmax(theta[0])[y]), theta)[0]):
            total[j] += q[y] * g
    return total


# Distributions


def log_softmax(
    logits: Sequence[Scalar], temperature: float = 1.0, softcap: float | None = None
) -> list[Scalar]:
    """log softmax(z / T), z = cap tanh(logits / cap) where there is a cap (Gemma 2, arXiv 2408.00118)."""
    z = [(softcap * tanh(x / softcap) if softcap else x) / temperature for x in logits]
    top = max(number(x) for x in z)
    total = top + log(sum(exp(x - top) for x in z))
    return [x - total for x in z]


def softmax(
    logits: Sequence[Scalar], temperature: float = 1.0, softcap: float | None = None
) -> list[Scalar]:
    return [exp(x) for x in log_softmax(logits, temperature, softcap)]


def entropy(
    logits: Sequence[Scalar], temperature: float = 1.0, softcap: float | None = None
) -> Scalar:
    """-sum p log p, in nats. Shannon 1948."""
    return -sum(exp(x) * x for x in log_softmax(logits, temperature, softcap))


def penalize_repetition(
    logits: Sequence[float], context: Sequence[int], penalty: float
) -> list[float]:
    """Each token seen in ``context``, once: logit / penalty when positive, logit * penalty when negative. CTRL, arXiv 1909.05858,
    section 4.1, in the form of transformers' RepetitionPenaltyLogitsProcessor."""
    return [
        (x * penalty if x < 0 else x / penalty) if v in set(context) else x
        for v, x in enumerate(logits)
    ]


def by_probability(probs: Sequence[float]) -> list[int]:
    """Token ids, the most probable first, equal ones by id."""
    return sorted(range(len(probs)), key=lambda v: (-probs[v], v))


def keep(probs: Sequence[float], kept: Sequence[int]) -> list[float]:
    """``probs`` on ``kept``, renormalised, 0 elsewhere."""
    total = sum(probs[v] for v in kept)
    return [probs[v] / total if v in set(kept) else 0.0 for v in range(len(probs))]


def keep_top_k(probs: Sequence[float], k: int) -> list[float]:
    """Exactly the k most probable; 0 keeps all. Hierarchical neural story generation, arXiv 1805.04833."""
    return keep(probs, by_probability(probs)[:k] if k else range(len(probs)))


def keep_top_p(probs: Sequence[float], p: float) -> list[float]:
    """The smallest set of most probable tokens whose total reaches p. Nucleus sampling, arXiv 1904.09751, Eq. 2 and 3."""
    if p >= 1:
        return list(probs)
    kept: list[int] = []
    for v in by_probability(probs):
        kept.append(v)
        if sum(probs[u] for u in kept) >= p:
            break
    return keep(probs, kept)


def keep_min_p(probs: Sequence[float], min_p: float) -> list[float]:
    """Tokens at least min_p times as probable as the most probable one. Min-p sampling, arXiv 2407.01082."""
    return keep(probs, [v for v in range(len(probs)) if probs[v] >= min_p * max(probs)])


def sampling_distribution(
    logits: Sequence[float],
    context: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """What a token is drawn from: repetition penalty, temperature, top-k, top-p, min-p, in this order, each on what the one
    before left, renormalised. Temperature 0 puts everything on the largest logit (of equal ones, the first)."""
    logits = penalize_repetition(logits, context, repetition_penalty)
    if temperature == 0:
        best = by_probability(logits)[0]
        return [1.0 if v == best else 0.0 for v in range(len(logits))]
    return keep_min_p(keep_top_p(keep_top_k(softmax(logits, temperature), top_k), top_p), min_p)


# Learning rate


def warmup_steps(warmup: float, total: int) -> int:
    """``warmup`` below 1 is a share of ``total``, rounded up (exactly: 0.1 of 30 is 3); from 1 on a number of steps."""
    return math.ceil(Fraction(str(warmup)) * total) if warmup < 1 else int(warmup)


def learning_rate(
    step: int,
    total: int,
    lr: float,
    schedule: str,
    warmup: float,
    floor: float,
    ramp_first: int = 1,
    decay_first: int = 0,
) -> float:
    """The rate of optimizer step ``step`` = 0, 1, ... of ``total``; ``floor`` is a share of ``lr``.

    Over W warm-up steps (step + ramp_first) / W, then constant, linear or one half period of a cosine (SGDR, arXiv 1608.03983,
    Eq. 5) at progress (step + decay_first - W) / (total - W). ``ramp_first`` 1: no step is wasted at rate 0; 0: as transformers'
    schedules. ``decay_first`` 0: the first step after warm-up is at ``lr``, the floor is reached after the last; 1: on the last.
    """
    ramp = warmup_steps(warmup, total)
    if step + ramp_first <= ramp:
        return lr * (step + ramp_first) / ramp
    if schedule == "constant":
        return lr
    progress = 1.0 if total <= ramp else (step + decay_first - ramp) / (total - ramp)
    progress = clip(progress, 0.0, 1.0)
    left = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[schedule]
    return lr * (floor + (1 - floor) * left)
