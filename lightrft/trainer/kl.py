"""Distance between policy and reference at sampled tokens, and what steers its coefficient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.config import KLConfig
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
    return torch.expm1(-d) + d


@dataclass(slots=True)
class KLController:
    """The coefficient in force; ``adaptive`` is arXiv 1909.08593, section 2.2."""

    config: KLConfig
    coef: float

    @staticmethod
    def of(config: KLConfig) -> KLController:
        return KLController(config, config.coef)

    def update(self, kl: float, samples: int) -> None:
        """Move the coefficient after ``samples`` answers whose mean KL, summed over their tokens, was ``kl`` nats."""
        if self.config.controller == "adaptive":
            error = min(max(kl / self.config.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * samples / self.config.horizon
