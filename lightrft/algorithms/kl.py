"""Estimate the KL divergence to the reference, and control the KL and entropy coefficients.

In the formulas, ``d`` is the log-ratio of policy to reference at a sampled token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightrft.algorithms.token_ops import clamp_log_ratio
from lightrft.config.algorithm import EntropyConfig, KLConfig
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry, other_names

Estimator = Callable[[Tensor, Tensor], Tensor]
KL_ESTIMATORS: Registry[Estimator] = Registry(
    "KL estimator", other_names({"kl": "k1", "mse": "k2", "low_var_kl": "k3"})
)


@KL_ESTIMATORS.register(
    "k1", formula="d", latex=r"d", paper="Schulman 2020, Approximating KL Divergence"
)
def k1(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Estimate the KL without bias; the estimate may be negative.

    As a loss its expected gradient is 0.
    """
    return logprobs - ref


@KL_ESTIMATORS.register(
    "k2",
    formula="d^2 / 2",
    latex=r"\tfrac{1}{2}d^2",
    paper="Schulman 2020, Approximating KL Divergence",
)
def k2(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Estimate the KL with a bias.

    As a loss its expected gradient is the gradient of KL(policy, reference).
    """
    return (logprobs - ref).square() / 2


@KL_ESTIMATORS.register(
    "k3",
    formula="exp(-d) - 1 + d",
    latex=r"e^{-d}-1+d",
    paper="Schulman 2020; arXiv 2402.03300, eq. 4",
)
def k3(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Estimate the KL without bias and never below 0.

    As a loss its expected gradient is the gradient of KL(reference, policy).
    """
    d = logprobs - ref
    # expm1: exp(-d) - 1 would lose every digit at a small d
    return torch.expm1(clamp_log_ratio(-d)) + d


@KL_ESTIMATORS.register(
    "k3_straight",
    formula="sg(exp(-d) - 1 + d) + d^2 / 2 - sg(d^2 / 2)",
    latex=r"\operatorname{sg}\big(e^{-d}-1+d\big)+\tfrac12d^2-\operatorname{sg}\big(\tfrac12d^2\big)",
    paper="the value of k3 and the gradient of k2, as verl's k3+; Schulman 2020, Approximating KL "
    "Divergence",
)
def k3_straight(logprobs: Tensor, ref: Tensor) -> Tensor:
    """Estimate the KL with the value of ``k3`` and the gradient of ``k2``.

    The value is unbiased. As a loss its expected gradient is the gradient of KL(policy, reference).
    """
    value, slope = k3(logprobs, ref).detach(), k2(logprobs, ref)
    # the second summand is 0, and has the gradient of k2
    return value + (slope - slope.detach())


def capped_k3(old: Tensor, logprobs: Tensor, cap: float) -> Tensor:
    """Return ``sg(min(r - 1, cap)) log r``, ``[N]``, with ``r = pi / pi_old``.

    Its gradient is ``r - 1``, as for ``k3(old, logprobs)``, bounded from above (CPGD, arXiv
    2505.12504). Its value is not an estimate of the KL.

    Args:
        old: ``[N]``. Log-probs of the old policy.
        logprobs: ``[N]``. Log-probs of the current policy.
        cap: Largest value of ``r - 1`` in the gradient.
    """
    gap = logprobs - old
    # detached: the gradient is the capped factor times the gradient of the log-prob
    return torch.expm1(clamp_log_ratio(gap.detach())).clamp(max=cap) * gap


@dataclass(slots=True)
class KLController:
    """Coefficient of the KL term, updated over the run.

    ``adaptive`` follows arXiv 1909.08593, section 2.2. ``linear`` and ``cosine`` follow a schedule.

    Attributes:
        config: The settings ``algorithm.kl``.
        coef: The current coefficient.
        step: Number of completed steps.
    """

    config: KLConfig
    coef: float
    step: int = 0

    @staticmethod
    def of(config: KLConfig) -> KLController:
        """Build the controller at its initial coefficient."""
        return KLController(config, config.coef)

    def update(self, kl: float, samples: int) -> None:
        """Update the coefficient of an adaptive controller.

        Args:
            kl: Mean KL of the responses, summed over their tokens, in nats.
            samples: Number of responses.
        """
        if self.config.controller == "adaptive":
            # bounds of the paper: one outlier must not move the coefficient far
            error = min(max(kl / self.config.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * samples / self.config.horizon

    def advance(self) -> None:
        """Count a completed step and follow the schedule.

        ``linear`` and ``cosine`` move from ``coef`` to ``final`` in ``steps`` steps and then stay
        at ``final``.
        """
        self.step += 1
        config = self.config
        if config.controller in SCHEDULES and config.steps is not None:
            # from the step and not from the last coefficient: rounding does not add up
            left = SCHEDULES[config.controller](min(1.0, self.step / config.steps))
            self.coef = config.final + (config.coef - config.final) * left


SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@dataclass(slots=True)
class EntropyController:
    """Coefficient of the entropy bonus.

    With a ``target`` it is controlled as in Skywork-OR1, arXiv 2505.22312, section 4.2.

    Attributes:
        config: The settings ``algorithm.entropy``.
        coef: The current coefficient.
    """

    config: EntropyConfig
    coef: float

    @staticmethod
    def of(config: EntropyConfig) -> EntropyController:
        """Build the controller at its initial coefficient."""
        return EntropyController(config, config.coef)

    def current_coef(self, entropy: float | None) -> float:
        """Return the coefficient to use at an entropy in nats per token.

        With a target, the coefficient is 0 while the entropy is unknown or above the target.
        """
        target = self.config.target
        if target is None:
            return self.coef
        if entropy is not None and entropy <= target:
            return self.coef
        return 0.0

    def update(self, entropy: float | None) -> None:
        """Move the coefficient by ``rate``: up if the entropy is below the target, down if above.

        The coefficient never falls below 0.
        """
        target = self.config.target
        if target is not None and entropy is not None:
            # 1 below the target, -1 above it, 0 at it
            direction = (entropy < target) - (entropy > target)
            self.coef = max(0.0, self.coef + self.config.rate * direction)
