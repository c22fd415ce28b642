"""Limit the mean cost of responses by Lagrange multipliers, as in Safe RLHF (arXiv 2310.12773)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrft.algorithms.token_ops import require_column
from lightrft.config.algorithm import LagrangianConfig
from lightrft.types import Batch
from lightrft.utils.lazy_imports import Tensor
from lightrft.utils.registry import About

PAPER = "Safe RLHF, arXiv 2310.12773, section 3.3 and appendix B"
UNEVEN_ADVANTAGES = frozenset({"pass_at_k", "maxrl", "raft", "rft"})
"""Advantages whose sign does not change with the sign of the reward.

They raise the best responses, and would not lower the costly ones as much.
"""
CONSTRAINED = About(
    "A <- (A - sum_k lambda_k A_C,k) / (1 + sum_k lambda_k)",
    r"\hat A\leftarrow\frac{\hat A-\sum_k\lambda_k\hat A_{C,k}}{1+\sum_k\lambda_k}",
    PAPER,
)
MULTIPLIER = About(
    "log lambda_k <- min(log lambda_k + lr lambda_k (J_k - threshold_k), log max),  J_k = mean "
    "C_k of the last responses",
    r"\ln\lambda_k\leftarrow\min\big(\ln\lambda_k+\alpha\lambda_k(J_k-d_k),\ln\lambda_{\max}\big)",
    PAPER,
)


def constrained_advantages(
    rewards: Tensor, costs: Sequence[Tensor], multipliers: Sequence[float]
) -> Tensor:
    """Combine the advantages of the reward and of the costs, ``[N]``.

    The division keeps the size of a policy gradient when a multiplier grows.

    Args:
        rewards: ``[N]``. Advantages of the reward.
        costs: Advantages ``[N]`` of each cost.
        multipliers: Multiplier of each cost, 0 or more.
    """
    combined = rewards
    for cost, multiplier in zip(costs, multipliers, strict=True):
        combined = combined - multiplier * cost
    return combined / (1 + math.fsum(multipliers))


def next_log_multiplier(log_multiplier: float, excess: float, lr: float, largest: float) -> float:
    """Take one step of gradient descent on ``-excess * exp(log_multiplier)``.

    Args:
        log_multiplier: Logarithm of the multiplier.
        excess: Mean cost less its threshold.
        lr: Learning rate of the logarithm.
        largest: Upper bound of the multiplier.
    """
    moved = log_multiplier + lr * math.exp(log_multiplier) * excess
    return min(moved, math.log(largest))


def cost_view(batch: Batch, index: int) -> Batch:
    """Return ``batch`` with a cost and its values and returns in the columns of the reward.

    Args:
        batch: Has ``costs [B, K]``.
        index: Number of the cost.
    """
    costs = require_column(batch.costs)[:, index].double()
    return batch.replace(
        rewards=costs,
        outcomes=costs,
        values=batch.cost_values,
        final_values=batch.cost_final_values,
        returns=batch.cost_returns,
        final_returns=None if batch.final_returns is None else costs,
    )


@dataclass(frozen=True, slots=True)
class Multiplier:
    """The multiplier of one cost.

    Attributes:
        log: Logarithm of the multiplier.
        costs: Costs of the latest responses, oldest first.
    """

    log: float
    costs: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """Return the multiplier."""
        return math.exp(self.log)

    @property
    def mean_cost(self) -> float:
        """Return the mean cost of the latest responses. There must be one."""
        return math.fsum(self.costs) / len(self.costs)


@dataclass(slots=True)
class LagrangianController:
    """The multipliers of all costs.

    A step first moves the multipliers by the costs of its batch, then combines advantages with
    them.

    Attributes:
        config: The settings ``algorithm.lagrangian``.
        multipliers: The multiplier of each cost, in the order of ``config.costs``.
        step: Number of completed steps that trained the policy.
    """

    config: LagrangianConfig
    multipliers: tuple[Multiplier, ...] = field(default_factory=tuple)
    step: int = 0

    @staticmethod
    def of(config: LagrangianConfig) -> LagrangianController:
        """Build the controller with the initial multipliers."""
        initial = Multiplier(math.log(config.init))
        return LagrangianController(config, tuple(initial for _ in config.costs))

    def moved(self, costs: Tensor) -> tuple[Multiplier, ...]:
        """Return the multipliers after the costs ``[B, K]`` of a batch, and change nothing."""
        config = self.config
        found = []
        columns = costs.double().unbind(1)
        for limit, old, column in zip(config.costs, self.multipliers, columns, strict=True):
            fresh = column.tolist()
            # A batch counts as a whole, also if it is larger than the window.
            kept = max(config.window, len(fresh))
            new = Multiplier(old.log, (*old.costs, *fresh)[-kept:])
            if self.step >= config.delay_steps and new.costs:
                excess = new.mean_cost - limit.threshold
                log = next_log_multiplier(old.log, excess, config.lr, config.max)
                new = Multiplier(log, new.costs)
            found.append(new)
        return tuple(found)

    def update(self, costs: Tensor) -> None:
        """Move the multipliers by the costs ``[B, K]`` of a batch that has trained the policy."""
        self.multipliers = self.moved(costs)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "step": self.step,
            "multipliers": [{"log": m.log, "costs": list(m.costs)} for m in self.multipliers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self.step = state["step"]
        self.multipliers = tuple(
            Multiplier(saved["log"], tuple(saved["costs"])) for saved in state["multipliers"]
        )
