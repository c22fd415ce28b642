"""Keep the state of a run besides weights: current coefficients and running statistics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from lightrft.algorithms.constrained.lagrangian import LagrangianController
from lightrft.algorithms.kl import EntropyController, KLController
from lightrft.algorithms.reward_shaping import including_terms
from lightrft.algorithms.running_stats import RunningStats
from lightrft.algorithms.token_ops import TokenRows, require_column
from lightrft.config.algorithm import AlgorithmConfig, LagrangianConfig, NormalizeConfig
from lightrft.observability.metrics import Last, Mean, Metrics
from lightrft.types import Batch


@dataclass(slots=True)
class Controllers:
    """Coefficients and statistics, saved with the run.

    A step reads them first and updates them last.

    Attributes:
        kl: Coefficient of the KL term.
        entropy: Coefficient of the entropy bonus.
        normalize: The settings ``algorithm.normalize``.
        rewards: Statistics of the outcomes of earlier steps.
        returns: Statistics of the returns of earlier steps.
        terms: Statistics of each term of the reward in earlier steps, by name.
        lagrangian: Multipliers of costs.
    """

    kl: KLController
    entropy: EntropyController
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)
    rewards: RunningStats = field(default_factory=RunningStats)
    returns: RunningStats = field(default_factory=RunningStats)
    terms: dict[str, RunningStats] = field(default_factory=dict)
    lagrangian: LagrangianController = field(
        default_factory=lambda: LagrangianController.of(LagrangianConfig())
    )

    @staticmethod
    def of(algorithm: AlgorithmConfig) -> Controllers:
        """Build the initial state of a run."""
        return Controllers(
            KLController.of(algorithm.kl),
            EntropyController.of(algorithm.entropy),
            algorithm.normalize,
            lagrangian=LagrangianController.of(algorithm.lagrangian),
        )

    def values(self, spoken: Tensor) -> Tensor:
        """Convert the outputs of the critic to the scale of rewards."""
        if not self.normalize.values:
            return spoken
        return self.returns.natural(spoken, self.normalize.eps)

    def for_critic(self, batch: Batch) -> Batch:
        """Return ``batch`` with returns and old values on the critic's scale.

        The returns use the new scale, on which the critic predicts from now on. The values are
        converted back to the scale on which the critic predicted them.
        """
        if not self.normalize.values or batch.returns is None or batch.values is None:
            return batch
        eps = self.normalize.eps
        seen = self._returns_with(batch)
        found = batch.replace(
            returns=seen.standardised(batch.returns, eps),
            values=self.returns.standardised(batch.values, eps),
        )
        if batch.final_values is None or batch.final_returns is None:
            return found
        return found.replace(
            final_returns=seen.standardised(batch.final_returns, eps),
            final_values=self.returns.standardised(batch.final_values, eps),
        )

    def _returns_with(self, batch: Batch) -> RunningStats:
        if batch.returns is None:
            return self.returns
        return self.returns.including(batch.returns[batch.mask])

    def update_from_batch(self, batch: Batch, *, frozen: bool = False) -> Metrics:
        """Report the current coefficients and update them from ``batch``.

        Args:
            batch: The batch of the step.
            frozen: The policy was not trained in this step. Coefficients that react to the policy
                then do not change.
        """
        metrics = Metrics()
        # Before the update below: it reports the coefficient that this step has used.
        if self.kl.config.used:
            metrics.add("policy/kl_coef", Mean(self.kl.coef))
        if batch.old_logprobs is not None and batch.ref_logprobs is not None:
            distance = TokenRows.of(batch).sum(batch.old_logprobs - batch.ref_logprobs).mean()
            metrics.add("policy/kl_per_answer", Mean(distance))
            if not frozen:
                self.kl.update(float(distance), len(batch))
        # A schedule counts every step of the run, trained or not.
        self.kl.advance()
        if self.entropy.config.target is not None:
            entropy = mean_entropy(batch)
            metrics.add("policy/entropy_coef", Mean(self.entropy.current_coef(entropy)))
            if not frozen:
                self.entropy.update(entropy)
        if self.normalize.rewards != "none" and batch.outcomes is not None:
            self.rewards = self.rewards.including(batch.outcomes)
            metrics.merge(_of("reward/seen", self.rewards))
        if self.normalize.terms == "running":
            self.terms = including_terms(self.terms, batch)
            for name, seen in self.terms.items():
                metrics.merge(_of(f"reward/{name}/seen", seen))
        if self.normalize.values:
            # Only now: the values of this step were converted with the earlier statistics.
            self.returns = self._returns_with(batch)
            metrics.merge(_of("critic/seen", self.returns))
        metrics.merge(self._update_multipliers(batch, frozen))
        return metrics

    def _update_multipliers(self, batch: Batch, frozen: bool) -> Metrics:
        """Report the multipliers that this step has used and, unless frozen, keep them."""
        metrics, costs = Metrics(), self.lagrangian.config.costs
        if not costs:
            return metrics
        columns = require_column(batch.costs)
        for i, (cost, used) in enumerate(zip(costs, self.lagrangian.moved(columns), strict=True)):
            # One cost needs no name; several have theirs.
            name = "" if len(costs) == 1 else f"/{cost.name}"
            metrics.add(f"lagrangian/lambda{name}", Last(used.value))
            metrics.add(f"lagrangian/cost{name}", Mean(columns[:, i].mean()))
            metrics.add(f"lagrangian/cost_window{name}", Last(used.mean_cost))
        if not frozen:
            self.lagrangian.update(columns)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return coefficients and statistics as plain data."""
        coefficients = {
            "kl_coef": self.kl.coef,
            "kl_step": self.kl.step,
            "entropy_coef": self.entropy.coef,
        }
        state = {**coefficients, "rewards": asdict(self.rewards), "returns": asdict(self.returns)}
        if self.lagrangian.config.costs:
            state["lagrangian"] = self.lagrangian.state_dict()
        if self.normalize.terms == "running":
            state["terms"] = {name: asdict(seen) for name, seen in self.terms.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self.kl.coef, self.kl.step = state["kl_coef"], state["kl_step"]
        self.entropy.coef = state["entropy_coef"]
        self.rewards = RunningStats(**state["rewards"])
        self.returns = RunningStats(**state["returns"])
        if self.lagrangian.config.costs:
            self.lagrangian.load_state_dict(state["lagrangian"])
        if self.normalize.terms == "running":
            self.terms = {name: RunningStats(**seen) for name, seen in state["terms"].items()}


def _of(name: str, seen: RunningStats) -> Metrics:
    return Metrics({f"{name}_mean": Last(seen.mean), f"{name}_std": Last(seen.deviation())})


def mean_entropy(batch: Batch) -> float | None:
    """Return the mean entropy of the policy before the update, in nats per token.

    Returns ``None`` if the entropy was not measured or nothing was sampled.
    """
    if batch.entropy is None or not batch.mask.any():
        return None
    return float(batch.entropy[batch.mask].double().mean())
