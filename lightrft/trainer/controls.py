"""What a run carries from step to step besides weights: coefficients in force and running moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightrft.config import AlgorithmConfig
from lightrft.trainer.kl import KLController
from lightrft.trainer.rows import Rows
from lightrft.types import Batch
from lightrft.utils.metrics import Mean, Metrics


@dataclass(slots=True)
class Controls:
    """Saved with the run; a step reads them at its start and steers them at its end."""

    kl: KLController

    @staticmethod
    def of(algorithm: AlgorithmConfig) -> Controls:
        return Controls(kl=KLController.of(algorithm.kl))

    def steer(self, batch: Batch) -> Metrics:
        """Report what was in force and move it by what ``batch`` shows."""
        metrics = Metrics({"policy/kl_coef": Mean(self.kl.coef)}) if self.kl.config.used else Metrics()
        if batch.old_logprobs is not None and batch.ref_logprobs is not None:
            distance = Rows.of(batch).sum(batch.old_logprobs - batch.ref_logprobs).mean()
            metrics.add("policy/kl_per_answer", Mean(distance))
            self.kl.update(float(distance), len(batch))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.coef = state["kl_coef"]
