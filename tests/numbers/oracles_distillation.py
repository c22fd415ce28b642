"""Supervised and distillation losses, from the papers, one number at a time.

A student and a teacher are logits over a vocabulary at one position. ``Rows`` are per position.
``tests.numbers.exact`` gives the values and derivatives of these functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpmath import mpf

from tests.numbers.exact import (
    Number,
    absolute,
    constant,
    exp,
    log,
    log_softmax,
    mean,
    order,
)

Numbers = Sequence[Number]
Rows = Sequence[Numbers]


def probabilities(logits: Numbers) -> list[Number]:
    return [exp(x) for x in log_softmax(logits)]


# Divergences of two distributions, given as probabilities


def kl(p: Numbers, q: Numbers) -> Number:
    """Return sum p log(p / q). A term with p = 0 is 0."""
    return sum(a * log(a / b) for a, b in zip(p, q, strict=True) if a != 0)


def divergence(student: Numbers, teacher: Numbers, kind: str, beta: Number = 0.5) -> Number:
    """Return a divergence of two lists of probabilities.

    ``forward_kl``: KL(teacher, student), Hinton et al., arXiv 1503.02531. ``reverse_kl``:
    KL(student, teacher), MiniLLM, arXiv 2306.08543. ``jsd``: GKD, arXiv 2306.13649, eq. 1, with
    m = beta teacher + (1 - beta) student: beta KL(teacher, m) + (1 - beta) KL(student, m).

    The paper's JSD is 0 at beta = 0 and at 1. TRL defines these ends as forward and reverse KL,
    to which JSD / beta and JSD / (1 - beta) tend: see ``gkd``.
    """
    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "reverse_kl":
        return kl(student, teacher)
    pairs = zip(student, teacher, strict=True)
    middle = [beta * b + (1 - mpf(beta)) * a for a, b in pairs]
    return beta * kl(teacher, middle) + (1 - mpf(beta)) * kl(student, middle)


def gkd(student: Numbers, teacher: Numbers, beta: Number) -> Number:
    """Return the generalised JSD with TRL's ends: forward KL at 0, reverse KL at 1."""
    ends = {0: "forward_kl", 1: "reverse_kl"}
    return divergence(student, teacher, ends.get(beta, "jsd"), beta)


def of_logits(student: Numbers, teacher: Numbers, kind: str, beta: Number = 0.5) -> Number:
    """Return the divergence over the whole vocabulary. The teacher has no gradient."""
    fixed = [constant(x) for x in teacher]
    return divergence(probabilities(student), probabilities(fixed), kind, beta)


# The teacher's most probable tokens


def top_tokens(logits: Numbers, k: int) -> list[int]:
    """Return the k most probable tokens. Of equal ones the lower index comes first."""
    return order(logits, descending=True)[:k]


def with_tail(probs: Numbers, kept: Sequence[int]) -> list[Number]:
    """Return the probabilities of ``kept`` and one of all other tokens together."""
    inside = [probs[v] for v in kept]
    outside = [probs[v] for v in range(len(probs)) if v not in set(kept)]
    return [*inside, sum(outside, mpf(0))]


def renormalised(probs: Numbers, kept: Sequence[int]) -> list[Number]:
    """Return the probabilities of ``kept``, divided by their sum."""
    total = sum(probs[v] for v in kept)
    return [probs[v] / total for v in kept]


def top_k_divergence(
    student: Numbers, teacher: Numbers, k: int, kind: str, beta: Number = 0.5, tail: str = "bucket"
) -> Number:
    """Return the divergence on the teacher's k most probable tokens, from logits.

    ``tail`` is ``bucket`` (all others as one outcome: never above the full divergence) or
    ``renormalised`` (both distributions given that the token is one of the k). TRL has both, as
    ``loss_add_tail``. ``partial`` leaves the sums of a KL as they are, without the other tokens: it
    can be negative, and its forward form pushes the student's mass onto the k tokens.
    """
    kept = top_tokens([constant(x) for x in teacher], k)
    p, q = probabilities(student), probabilities([constant(x) for x in teacher])
    if tail == "bucket":
        return divergence(with_tail(p, kept), with_tail(q, kept), kind, beta)
    if tail == "renormalised":
        return divergence(renormalised(p, kept), renormalised(q, kept), kind, beta)
    return divergence([p[v] for v in kept], [q[v] for v in kept], kind, beta)


# Sampled tokens


def sampled_reverse_kl(student_logprob: Number, teacher_logprob: Number) -> Number:
    """Return the estimate of KL(student, teacher) at a token that the student sampled.

    Minus this number is the reward of on-policy distillation.
    """
    return student_logprob - teacher_logprob


def sampled_reverse_kl_loss(student_logprob: Number, teacher_logprob: Number) -> Number:
    """Return the loss whose expected gradient over the student's samples is that of the reverse KL.

    It is the estimate, a constant, times the log-prob, as in TRL's self-distillation.
    """
    estimate = constant(sampled_reverse_kl(student_logprob, teacher_logprob))
    return estimate * student_logprob


# A teacher with another tokenizer


def sorted_distance(student: Numbers, teacher: Numbers) -> Number:
    """Return the L1 distance of sorted probabilities, the shorter list padded with zeros.

    ULD, arXiv 2402.12030: the Wasserstein distance of two distributions with unknown alignment,
    where moving mass costs 1.
    """
    longest = max(len(student), len(teacher))
    sides = [
        [probs[v] for v in order(probs, descending=True)] + [mpf(0)] * (longest - len(probs))
        for probs in (student, teacher)
    ]
    return sum(absolute(a - b) for a, b in zip(*sides, strict=True))


def uld(student: Rows, teacher: Rows) -> Number:
    """Return ULD's distance of two responses, from logits: the mean over min(lengths) positions.

    The paper sums over positions. The authors' script and TRL's GOLD take the mean.
    """
    size = min(len(student), len(teacher))
    terms = []
    for t in range(size):
        fixed = probabilities([constant(x) for x in teacher[t]])
        terms.append(sorted_distance(probabilities(student[t]), fixed))
    return mean(terms)


def aligned_groups(student_ends: Sequence[int], teacher_ends: Sequence[int]) -> list:
    """Return pairs of groups of positions that cover the same bytes.

    ``student_ends`` are the byte offsets at which the student's tokens end. A group ends where both
    tokenizers split the text, as in TRL's GOLD. What is left on either side is one last pair.
    """
    common = set(student_ends) & set(teacher_ends)
    groups = []
    for ends in (student_ends, teacher_ends):
        side: list[list[int]] = [[]]
        for position, end in enumerate(ends):
            side[-1].append(position)
            if end in common:
                side.append([])
        groups.append(side if side[-1] else side[:-1])
    student, teacher = groups
    longest = max(len(student), len(teacher))
    student += [[]] * (longest - len(student))
    teacher += [[]] * (longest - len(teacher))
    return list(zip(student, teacher, strict=True))


def merged(rows: Rows, tokens: Sequence[int], group: Sequence[int], kind: str) -> list[Number]:
    """Return one list of probabilities, which may sum to less than 1, for a group of positions.

    ``observed``: the distribution of the first position times the probabilities of the later
    tokens. ``bayesian``: the distribution of the last position times those of the earlier tokens.
    Both are in TRL's GOLD.
    """
    base = group[0] if kind == "observed" else group[-1]
    others = [t for t in group if t != base]
    factor = mpf(1)
    for t in others:
        factor = factor * rows[t][tokens[t]]
    return [x * factor for x in rows[base]]


# Supervised fine-tuning


def sft_loss(
    logprobs: Rows, token_weights: Rows | None = None, example_weights: Numbers | None = None
) -> Number:
    """Return sum e_i w_it (-log p_it) / sum e_i w_it: the mean over all weighted tokens.

    A weight of 0 leaves a token out. Without weights this is the mean over the tokens of the batch,
    as transformers computes it over accumulated steps.
    """
    total, weight = mpf(0), mpf(0)
    for i, row in enumerate(logprobs):
        for t, logprob in enumerate(row):
            w = mpf(1) if token_weights is None else mpf(token_weights[i][t])
            e = mpf(1) if example_weights is None else mpf(example_weights[i])
            total -= e * w * logprob
            weight += e * w
    return total / weight


def sft_loss_by_example(
    logprobs: Rows, token_weights: Rows | None = None, example_weights: Numbers | None = None
) -> Number:
    """Return the weighted mean over examples of each example's weighted mean over its tokens."""
    means, weights = [], []
    for i, row in enumerate(logprobs):
        own = None if token_weights is None else [token_weights[i]]
        means.append(sft_loss([row], own))
        weights.append(mpf(1) if example_weights is None else mpf(example_weights[i]))
    return sum(w * x for w, x in zip(weights, means, strict=True)) / sum(weights)
