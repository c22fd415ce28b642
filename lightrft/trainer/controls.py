"""What a run carries from step to step besides weights: coefficients in force and running moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightrft.config import AlgorithmConfig
from lightrft.trainer.kl import EntropyController, KLController
from lightrft.trainer.rows import Rows
from lightrft.types import Batch
from lightrft.utils.metrics import Mean, Metrics


@dataclass(slots=True)
class Controls:
    """Saved with the run; a step reads them at its start and steers them at its end."""

    kl: KLController
    entropy: EntropyController

    @staticmethod
    def of(algorithm: AlgorithmConfig) -> Controls:
        return Controls(kl=KLController.of(algorithm.kl), entropy=EntropyController.of(algorithm.entropy))

    def steer(self, batch: Batch) -> Metrics:
        """Report what was in force and move it by what ``batch`` shows."""
        metrics = Metrics({"policy/kl_coef": Mean(self.kl.coef)}) if self.kl.config.used else Metrics()
        if batch.old_logprobs is not None and batch.ref_logprobs is not None:
            distance = Rows.of(batch).sum(batch.old_logprobs - batch.ref_logprobs).mean()
            metrics.add("policy/kl_per_answer", Mean(distance))
            self.kl.update(float(distance), len(batch))
        self.kl.advance()
        if self.entropy.config.target is not None:
            entropy = mean_entropy(batch)
            metrics.add("policy/entropy_coef", Mean(self.entropy.in_force(entropy)))
            self.entropy.update(entropy)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl.coef, "kl_step": self.kl.step, "entropy_coef": self.entropy.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.coef, self.kl.step = state["kl_coef"], state["kl_step"]
        self.entropy.coef = state["entropy_coef"]


def mean_entropy(batch: Batch) -> float | None:
    """Nats a token of the policy before the update; ``None`` where it was not measured or nothing was sampled."""
    if batch.entropy is None or not batch.mask.any():
        return None
    return float(batch.entropy[batch.mask].double().mean())
