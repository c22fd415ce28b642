"""Distance between policy and reference at sampled tokens, and what steers the coefficients of KL and entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightrft.algorithms.token_ops import bounded
from lightrft.config.algorithm import EntropyConfig, KLConfig
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Estimator = Callable[[Tensor, Tensor], Tensor]
KL_ESTIMATORS: Registry[Estimator] = Registry("KL estimator")


@KL_ESTIMATORS.register("k1", formula="d", latex=r"d", paper="Schulman 2020, Approximating KL Divergence")
def k1(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Unbiased, of either sign. As a loss its expected gradient is zero."""
    return logprobs - ref


@KL_ESTIMATORS.register("k2", formula="d^2 / 2", latex=r"\tfrac{1}{2}d^2", paper="Schulman 2020, Approximating KL Divergence")
def k2(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Biased; as a loss its expected gradient is that of KL(policy, reference)."""
    return (logprobs - ref).square() / 2


@KL_ESTIMATORS.register("k3", formula="exp(-d) - 1 + d", latex=r"e^{-d}-1+d", paper="Schulman 2020; arXiv 2402.03300, eq. 4")
def k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Unbiased and never negative; as a loss its expected gradient is that of KL(reference, policy)."""
    d = logprobs - ref
    return torch.expm1(bounded(-d)) + d


@KL_ESTIMATORS.register(
    "k3_straight",
    formula="sg(exp(-d) - 1 + d) + d^2 / 2 - sg(d^2 / 2)",
    latex=r"\operatorname{sg}\big(e^{-d}-1+d\big)+\tfrac12d^2-\operatorname{sg}\big(\tfrac12d^2\big)",
    paper="the value of k3 and the gradient of k2, as verl's k3+; Schulman 2020, Approximating KL Divergence",
)
def k3_straight(logprobs: Tensor, ref: Tensor) -> Tensor:
    """The unbiased value of ``k3``; as a loss its expected gradient is that of KL(policy, reference), as that of ``k2``."""
    value, slope = k3(logprobs, ref).detach(), k2(logprobs, ref)
    return value + (slope - slope.detach())


def capped_k3(old: Tensor, logprobs: Tensor, cap: float) -> Tensor:
    """``[N]``: ``sg(min(r - 1, cap)) log r``, ``r = pi / pi_old``: the gradient of ``k3(old, logprobs)``, which is ``r - 1``, bounded from
    above (CPGD, arXiv 2505.12504). Its value is not that of the KL."""
    gap = logprobs - old
    return torch.expm1(bounded(gap.detach())).clamp(max=cap) * gap


@dataclass(slots=True)
class KLController:
    """The coefficient in force; ``adaptive`` is arXiv 1909.08593, section 2.2. ``step`` counts the steps behind."""

    config: KLConfig
    coef: float
    step: int = 0

    @staticmethod
    def of(config: KLConfig) -> KLController:
        return KLController(config, config.coef)

    def update(self, kl: float, samples: int) -> None:
        """Move the coefficient after ``samples`` answers whose mean KL, summed over their tokens, was ``kl`` nats."""
        if self.config.controller == "adaptive":
            error = min(max(kl / self.config.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * samples / self.config.horizon

    def advance(self) -> None:
        """A step is behind: ``linear`` and ``cosine`` go from ``coef`` to ``final`` in ``steps`` steps and stay there."""
        self.step += 1
        config = self.config
        if config.controller in SCHEDULES and config.steps is not None:
            left = SCHEDULES[config.controller](min(1.0, self.step / config.steps))
            self.coef = config.final + (config.coef - config.final) * left


SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@dataclass(slots=True)
class EntropyController:
    """The coefficient of the entropy bonus; with a ``target`` that of Skywork-OR1, arXiv 2505.22312, section 4.2."""

    config: EntropyConfig
    coef: float

    @staticmethod
    def of(config: EntropyConfig) -> EntropyController:
        return EntropyController(config, config.coef)

    def in_force(self, entropy: float | None) -> float:
        """The coefficient where the policy's entropy is ``entropy`` nats a token: with a target, 0 above it."""
        target = self.config.target
        return self.coef if target is None or (entropy is not None and entropy <= target) else 0.0

    def update(self, entropy: float | None) -> None:
        """Move the coefficient by ``rate``: up where the entropy was below the target, down where above, never below 0."""
        target = self.config.target
        if target is not None and entropy is not None:
            self.coef = max(0.0, self.coef + self.config.rate * ((entropy < target) - (entropy > target)))
