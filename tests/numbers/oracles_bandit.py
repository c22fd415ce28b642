"""A bandit whose preferences are known, and the policies that DPO, IPO and KTO must reach on it.

One prompt has K responses of one token: the arms. All pairs and their probabilities can be written
down, so a loss has its expectation in closed form. The policies below minimise that expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Numbers = Sequence[float]


@dataclass(frozen=True)
class Bandit:
    """A reference distribution and the distribution that preference data is sampled from.

    ``preferences[a][b]`` is the probability that arm a is preferred to arm b: 1/2 for a = b, and
    the two orders sum to 1.
    """

    reference: list[float]
    sampler: list[float]
    preferences: list[list[float]]

    def __len__(self) -> int:
        return len(self.reference)


def bradley_terry(reference: Numbers, rewards: Numbers, sampler: Numbers | None = None) -> Bandit:
    """Build the bandit whose preferences are sigmoid(r_a - r_b). The default sampler is uniform."""
    uniform = [1 / len(rewards)] * len(rewards)
    preferences = [[1 / (1 + math.exp(b - a)) for b in rewards] for a in rewards]
    return Bandit(list(reference), list(sampler or uniform), preferences)


def pairs(bandit: Bandit) -> Iterator[tuple[int, int, float]]:
    """Yield (chosen, rejected, probability) of two different arms sampled one after the other.

    The probabilities sum to less than 1: pairs of an arm with itself say nothing.
    """
    for a in range(len(bandit)):
        for b in range(len(bandit)):
            if a != b:
                sampled = bandit.sampler[a] * bandit.sampler[b]
                # Sampled in either order, a is preferred.
                yield a, b, 2 * sampled * bandit.preferences[a][b]


def expected_pair_loss(
    loss: Callable[..., Any], log_ratios: Sequence[Any], bandit: Bandit, beta: float
) -> Any:
    """Return the expectation of a pair loss of ``oracles_preference`` at log pi/ref of each arm."""
    total: Any = 0
    for chosen, rejected, probability in pairs(bandit):
        value = loss(log_ratios[chosen], log_ratios[rejected], 0, 0, 1, 1, beta)
        total = total + probability * value
    return total


def tilted(reference: Numbers, exponents: Numbers) -> list[float]:
    """Return the distribution proportional to reference times e^exponent."""
    top = max(exponents)
    masses = [p * math.exp(x - top) for p, x in zip(reference, exponents, strict=True)]
    return [mass / sum(masses) for mass in masses]


def dpo_optimum(reference: Numbers, rewards: Numbers, beta: float) -> list[float]:
    """Return pi* proportional to ref e^(r / beta), for a ``bradley_terry`` bandit, any sampler.

    arXiv 2305.18290, eq. 4. Every pair that is sampled makes beta (x_a - x_b) = r_a - r_b, with
    x = log pi/ref.
    """
    return tilted(reference, [r / beta for r in rewards])


def ipo_optimum(bandit: Bandit, tau: float) -> list[float]:
    """Return pi* proportional to ref e^(p(a over sampler) / tau), arXiv 2310.12036, section 4.

    The derivative of E (x_w - x_l - 1/(2 tau))^2 is 0 where x_a - mean x = (p_a - 1/2) / tau, with
    p_a = sum_b sampler_b preferences[a][b]. Any preferences, also cyclic ones.
    """
    win_rates = [
        sum(m * p for m, p in zip(bandit.sampler, row, strict=True)) for row in bandit.preferences
    ]
    return tilted(bandit.reference, [rate / tau for rate in win_rates])


# KTO: responses of ``sampler``, each desirable with a probability of its own


def expected_kto_loss(
    loss: Callable[..., Any],
    log_ratios: Sequence[Any],
    sampler: Numbers,
    desirable: Numbers,
    beta: float,
    lambdas: tuple[float, float] = (1.0, 1.0),
) -> Any:
    """Return the expectation of ``oracles_preference.kto`` with z = 0.

    z is 0 where the data comes from the reference: mismatched pairs of a single prompt have the
    mean log pi/ref = -KL(ref, pi) <= 0. Also where an arm that is sampled has no mass left.
    """
    total: Any = 0
    for x, m, share in zip(log_ratios, sampler, desirable, strict=True):
        liked = loss(x, 0, True, 0, beta, *lambdas)
        disliked = loss(x, 0, False, 0, beta, *lambdas)
        total = total + m * (share * liked + (1 - share) * disliked)
    return total


def kto_pulls(
    sampler: Numbers, desirable: Numbers, lambdas: tuple[float, float] = (1.0, 1.0)
) -> list[float]:
    """Return c_a = sampler_a (lambda_D g_a - lambda_U (1 - g_a)) of each arm.

    The expected loss is a constant minus sum_a c_a sigmoid(beta x_a), since
    1 - sigmoid(-beta x) = sigmoid(beta x).
    """
    rows = zip(sampler, desirable, strict=True)
    return [m * (lambdas[0] * g - lambdas[1] * (1 - g)) for m, g in rows]


def kto_optimum(
    reference: Numbers,
    sampler: Numbers,
    desirable: Numbers,
    beta: float,
    lambdas: tuple[float, float] = (1.0, 1.0),
) -> list[float]:
    """Return the policy that minimises the expected KTO loss with z = 0, for 0 < beta <= 1.

    An arm with a pull <= 0 gets nothing. For the others sum c sigmoid(beta log(pi/ref)) is concave
    in pi, so that c beta s (1 - s) / pi is the same for all of them: a price, found by bisection.
    """
    pulls = kto_pulls(sampler, desirable, lambdas)
    if not 0 < beta <= 1 or max(pulls) <= 0:
        raise ValueError(f"needs 0 < beta <= 1 and an arm with a pull, not {beta} and {pulls}")

    def demand(c: float, ref: float, log_price: float) -> float:
        def log_value(log_pi: float) -> float:
            z = beta * (log_pi - math.log(ref))
            logistic_slope = -abs(z) - 2 * math.log1p(math.exp(-abs(z)))
            return math.log(c * beta) + logistic_slope - log_pi

        return math.exp(bisect(log_value, -700.0, 0.0, log_price))

    def demands(log_price: float) -> list[float]:
        rows = zip(pulls, reference, strict=True)
        return [demand(c, ref, log_price) if c > 0 else 0.0 for c, ref in rows]

    log_price = bisect(lambda price: sum(demands(price)), -700.0, 700.0, 1.0)
    found = demands(log_price)
    return [mass / sum(found) for mass in found]


def kto_optimum_at_beta_one(reference: Numbers, desirable: Numbers) -> list[float]:
    """Return ``kto_optimum`` for beta = 1, equal lambdas and sampler = reference, without a search.

    With s (1 - s) / pi = ref / (pi + ref)^2 the price gives pi_a = ref_a (k sqrt(2 g_a - 1) - 1),
    or 0 where that is negative. k makes the sum 1. Arms leave in the order of their g.
    """
    kept = sorted(
        (a for a in range(len(reference)) if desirable[a] > 0.5), key=lambda a: -desirable[a]
    )
    roots = {a: math.sqrt(2 * desirable[a] - 1) for a in kept}
    while True:
        k = (1 + sum(reference[a] for a in kept)) / sum(reference[a] * roots[a] for a in kept)
        if k * roots[kept[-1]] > 1:
            break
        kept.pop()
    return [reference[a] * (k * roots[a] - 1) if a in kept else 0.0 for a in range(len(reference))]


def bisect(falling: Callable[[float], float], low: float, high: float, target: float) -> float:
    """Return the x in [low, high] at which a falling function is ``target``, or the nearer end."""
    for _ in range(100):
        middle = (low + high) / 2
        if falling(middle) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def total_variation(p: Numbers, q: Numbers) -> float:
    """Return half the sum of |p - q|."""
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
