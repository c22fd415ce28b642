"""Losses of the second circle of methods, from their papers, as slow loops in float64; the first are in ``oracles``.

All are to be minimised. Where the paper bounds or weighs with a number that carries no gradient, ``detach`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.numbers.distributions import log_softmax
from tests.numbers.oracles import (
    Case,
    Mask,
    aggregate_sequence_sum,
    aggregate_token,
    cpgd,
    empty_rows,
    gspo,
    ppo,
    unclipped,
)
from tests.numbers.scalars import Rows, Scalar, detach, exp, least, log, mean

# Policy losses


def sequence_gate(log_weight: Scalar, k: float, lam: float) -> float:
    """phi(w) = w^k exp(lam - lam w), so that phi(1) = 1; ``log_weight`` is log w. VESPO, arXiv 2602.10693."""
    x = float(detach(log_weight))
    return exp(lam + k * x - lam * exp(x))


def vespo(
    case: Case,
    advantages: Rows,
    up: tuple[float, float] = (2.0, 3.0),
    down: tuple[float, float] = (3.0, 2.0),
) -> Rows:
    """-sg(phi(w)) A log pi, w = exp(sum over the sampled tokens of log r), (k, lam) = ``up`` where A >= 0, ``down`` where A < 0.
    VESPO, arXiv 2602.10693."""
    rows = empty_rows(case)
    for i in range(len(case)):
        log_weight = sum(case.logprobs[i][t] - case.old[i][t] for t in case.sampled(i))
        for t in case.sampled(i):
            gate = sequence_gate(log_weight, *(up if advantages[i][t] >= 0 else down))
            rows[i][t] = -gate * advantages[i][t] * case.logprobs[i][t]
    return rows


def dppo_keeps(now: Scalar, behavior: float, a: float, low: float, high: float) -> bool:
    """False where the probability of the sampled token has already moved with A by more than ``high`` (up) or ``low`` (down)."""
    moved = exp(float(detach(now))) - exp(behavior)
    return not ((a > 0 and moved > high) or (a < 0 and moved < -low))


def dppo(case: Case, advantages: Rows, low: float, high: float, kl_coef: float = 0.0) -> Rows:
    """-rho A where ``dppo_keeps``, rho = exp(log pi - log pi_behavior); the binary total variation of the sampled token decides.
    The sampler is the old policy. DPPO, arXiv 2602.04879. ``kl_coef`` (log rho)^2, on dropped tokens too, is prime-rl's.
    """
    rows = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            now, behavior, a = case.logprobs[i][t], case.behavior[i][t], advantages[i][t]
            pull = -exp(now - behavior) * a if dppo_keeps(now, behavior, a, low, high) else 0.0
            rows[i][t] = pull + kl_coef * (now - behavior) ** 2
    return rows


def luspo(case: Case, advantages: Sequence[float], low: float, high: float) -> Scalar:
    """GSPO with each response's loss times its length: mean over responses of the token SUM. LUSPO, arXiv 2602.05261."""
    return aggregate_sequence_sum(case, gspo(case, advantages, low, high))


def drift(now: Scalar, old: float) -> Scalar:
    """r - 1 - log r, the k3 estimate of KL(old, new) from a token of old; its gradient is r - 1. Schulman 2020."""
    return exp(now - old) - 1 - (now - old)


def capped_drift(now: Scalar, old: float, cap: float) -> Scalar:
    """sg(min(r - 1, cap)) log r: ``drift`` with its gradient r - 1 bounded from above, so that a large ratio pulls back, but not
    without bound. Its value is not that of the KL. CPGD, arXiv 2505.12504.

    Bounding r inside ``drift`` instead would leave the gradient -1 beyond the bound, which pushes the ratio further up.
    """
    return detach(least(exp(now - old) - 1, cap)) * (now - old)


def cpgd_with_drift(
    case: Case, advantages: Rows, low: float, high: float, coef: float, cap: float | None
) -> Rows:
    """Clipped log-ratio plus coef * the policy drift KL(old, new); ``cap`` None: the plain k3. CPGD, arXiv 2505.12504."""
    rows = cpgd(case, advantages, low, high)
    for i in range(len(case)):
        for t in case.sampled(i):
            now, old = case.logprobs[i][t], case.old[i][t]
            rows[i][t] = rows[i][t] + coef * (
                drift(now, old) if cap is None else capped_drift(now, old, cap)
            )
    return rows


def gated(case: Case, rows: Rows, kept: Mask) -> Rows:
    """A loss with no value and no gradient where ``kept`` is false; the denominators still count those tokens."""
    out = empty_rows(case)
    for i in range(len(case)):
        for t in case.sampled(i):
            out[i][t] = rows[i][t] if kept[i][t] else 0.0
    return out


def clip_cov(case: Case, advantages: Rows, low: float, high: float, chosen: Mask) -> Rows:
    """PPO, and nothing on the tokens ``chosen`` (see ``oracles_token_masks``). Entropy mechanism, arXiv 2505.22617."""
    return gated(case, ppo(case, advantages, low, high), [[not c for c in row] for row in chosen])


def kl_cov(case: Case, advantages: Rows, beta: float, chosen: Mask) -> Rows:
    """-r A, plus beta |log r| on the tokens ``chosen`` (see ``oracles_token_masks``). Entropy mechanism, arXiv 2505.22617.
    At r = 1 the penalty has no gradient."""
    rows = unclipped(case, advantages)
    for i in range(len(case)):
        for t in case.sampled(i):
            d = case.logprobs[i][t] - case.old[i][t]
            if chosen[i][t]:
                rows[i][t] = rows[i][t] + beta * (d * 0 if d == 0 else d if d > 0 else -d)
    return rows


# Terms beside the policy loss


def ptx(policy_loss: Scalar, pretraining: Rows, coef: float) -> Scalar:
    """policy loss + coef * mean over pretraining texts of -sum log pi. InstructGPT, arXiv 2203.02155, Eq. 2."""
    return policy_loss + coef * (-mean([sum(row) for row in pretraining]) if pretraining else 0.0)


def ptx_by_token(policy_loss: Scalar, pretraining: Rows, coef: float) -> Scalar:
    """The variant of the frameworks: the mean over all pretraining tokens, in place of one sum per text."""
    every = [x for row in pretraining for x in row]
    return policy_loss + coef * (-mean(every) if every else 0.0)


def positive_nll(case: Case, correct: Sequence[bool]) -> Scalar:
    """-log pi, the mean over all sampled tokens of the correct responses; 0 when there are none. To be added with a weight mu.
    VAPO, arXiv 2504.05118."""
    every = [case.logprobs[i][t] for i in range(len(case)) if correct[i] for t in case.sampled(i)]
    return -mean(every) if every else 0.0


def whole_loss(case: Case, rows: Rows, correct: Sequence[bool], mu: float) -> Scalar:
    """Token mean of the policy loss plus mu times the NLL of correct responses. VAPO, arXiv 2504.05118."""
    return aggregate_token(case, rows) + mu * positive_nll(case, correct)


def implicit_prm_loss(case: Case, beta: float, outcomes: Sequence[float]) -> Scalar:
    """-o log sigma(x) - (1 - o) log sigma(-x), x = beta * sum over sampled tokens of (log pi_phi - log pi_ref), mean over
    responses; ``case.logprobs`` are pi_phi's, an outcome is in [0, 1]. PRIME, arXiv 2502.01456.
    A response without sampled tokens has nothing to learn from and does not count.
    """
    each = []
    for i in range(len(case)):
        if case.sampled(i):
            x = beta * sum(case.logprobs[i][t] - case.ref[i][t] for t in case.sampled(i))
            each.append(outcomes[i] * softplus(-x) + (1 - outcomes[i]) * softplus(x))
    return mean(each) if each else 0.0


def softplus(x: Scalar) -> Scalar:
    """log(1 + e^x) = -log sigma(-x)."""
    return x + log(1 + exp(-x)) if x > 0 else log(1 + exp(x))


# Divergences of two distributions at one position, from their logits

Divergence = Callable[[Sequence[Scalar], Sequence[float], float], Scalar]


def divergence(p: Sequence[Scalar], q: Sequence[Scalar]) -> Scalar:
    """KL(p, q) from two lists of log-probabilities."""
    return sum(exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def reverse_kl(
    student: Sequence[Scalar], teacher: Sequence[float], temperature: float = 1.0
) -> Scalar:
    """KL(student, teacher), mode seeking; both at ``temperature``. MiniLLM, arXiv 2306.08543."""
    return divergence(log_softmax(student, temperature), log_softmax(teacher, temperature))


def forward_kl(
    student: Sequence[Scalar], teacher: Sequence[float], temperature: float = 1.0
) -> Scalar:
    """KL(teacher, student), mean seeking. Distilling the knowledge in a neural network, arXiv 1503.02531."""
    return divergence(log_softmax(teacher, temperature), log_softmax(student, temperature))


def jsd(
    student: Sequence[Scalar], teacher: Sequence[float], beta: float, temperature: float = 1.0
) -> Scalar:
    """beta KL(teacher, m) + (1 - beta) KL(student, m), m = beta teacher + (1 - beta) student. GKD, arXiv 2306.13649.
    At beta = 0 and at beta = 1 it is 0; JSD / beta tends to the forward KL as beta does to 0."""
    p, q = log_softmax(teacher, temperature), log_softmax(student, temperature)
    m = [log(beta * exp(a) + (1 - beta) * exp(b)) for a, b in zip(p, q, strict=True)]
    return beta * divergence(p, m) + (1 - beta) * divergence(q, m)


def jsd_with_limits(
    student: Sequence[Scalar], teacher: Sequence[float], beta: float, temperature: float = 1.0
) -> Scalar:
    """The variant of the frameworks: beta = 0 means the forward KL and beta = 1 the reverse one, not their vanishing limits."""
    if beta == 0:
        return forward_kl(student, teacher, temperature)
    return (
        reverse_kl(student, teacher, temperature)
        if beta == 1
        else jsd(student, teacher, beta, temperature)
    )
