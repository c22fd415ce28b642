"""LightRFT's controllers of the KL coefficient, over ``algorithms.kl``."""

from __future__ import annotations

from lightrft.algorithms.kl import KLController
from lightrft.config.algorithm import KLConfig


class FixedKLController:
    """A coefficient that stays.

    Args:
        kl_coef: The coefficient, 0 or more.
    """

    def __init__(self, kl_coef: float) -> None:
        self._controller = KLController.of(KLConfig(where="reward", coef=kl_coef))

    @property
    def value(self) -> float:
        """The current coefficient."""
        return self._controller.coef

    @value.setter
    def value(self, coef: float) -> None:
        self._controller.coef = coef

    def update(self, current: float, n_steps: int) -> None:
        """Move the coefficient, if the controller does.

        Args:
            current: Mean KL of the responses, in nats.
            n_steps: Number of responses.
        """
        self._controller.update(float(current), n_steps)


class AdaptiveKLController(FixedKLController):
    """A coefficient that steers the KL to a target (arXiv 1909.08593, section 2.2).

    Args:
        init_kl_coef: The first coefficient, 0 or more.
        target: KL to steer to, in nats. Positive.
        horizon: Number of responses over which the coefficient is corrected.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        self.target = target
        self.horizon = horizon
        self._controller = KLController.of(
            KLConfig(
                where="reward",
                coef=init_kl_coef,
                controller="adaptive",
                target=target,
                horizon=horizon,
            )
        )
