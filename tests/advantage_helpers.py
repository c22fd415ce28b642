"""Both parts of the phase ``advantages`` in one call, without a run."""

from __future__ import annotations

from lightrft.algorithms.requirements import Requirements
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.trainer.phases import advantages_from, with_shaped_rewards
from lightrft.types import Batch


def with_advantages(
    batch: Batch, config: RLConfig, controls: Controllers, requirements: Requirements
) -> Batch:
    """Add shaped rewards, advantages and returns. Responses without a finite reward are dropped."""
    shaped, _ = with_shaped_rewards(batch, config, controls, requirements)
    return advantages_from(shaped, config, controls)
