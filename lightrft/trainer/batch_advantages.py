"""Compute the shaped rewards, advantages and returns of a batch, as settings choose them."""

from __future__ import annotations

from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES, WHITENINGS
from lightrft.algorithms.constrained.lagrangian import constrained_advantages, cost_view
from lightrft.algorithms.nonfinite_tokens import readable, rewarded
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.reward_shaping import token_rewards, with_rewards
from lightrft.algorithms.token_ops import require_column
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.distillation.targets import add_distillation_reward
from lightrft.types import Batch


def with_shaped_rewards(
    batch: Batch, config: RLConfig, controls: Controllers, requirements: Requirements
) -> tuple[Batch, Tensor]:
    """Shape the rewards, and drop responses whose reward is not finite before or after that.

    A NaN reward would make every advantage of its group NaN. Tokens with a log-prob that is not
    finite count as not sampled.

    Args:
        batch: the batch of the step.
        config: settings of the run.
        controls: reward scale.
        requirements: what the algorithm reads.

    Returns:
        The remaining responses and their indices ``[K]`` in ``batch``.
    """
    scored = rewarded(batch)
    if len(scored) < len(batch):
        batch = batch.select(scored)
    batch = readable(batch, requirements)
    batch = with_rewards(
        batch,
        config.algorithm,
        config.sampling.max_new_tokens,
        controls.rewards,
        controls.terms,
    )
    # Again: shaping can make a finite reward infinite.
    shaped = rewarded(batch)
    if len(shaped) < len(batch):
        batch = batch.select(shaped)
    return batch, scored[shaped]


def advantages_from(batch: Batch, config: RLConfig, controls: Controllers) -> Batch:
    """Compute token rewards, advantages and returns from shaped rewards, in float64.

    Args:
        batch: the batch with shaped rewards.
        config: settings of the run.
        controls: KL coefficient and multipliers.
    """
    algorithm, settings = config.algorithm, config.algorithm.advantage
    in_reward = controls.kl.coef if algorithm.kl.where == "reward" else 0.0

    def estimate(given: Batch, kl_coef: float) -> tuple[Tensor, Tensor]:
        rewards = token_rewards(given, algorithm.kl.estimator, kl_coef)
        return ADVANTAGES[settings.name](given, rewards, settings, **settings.options)

    advantages, returns = estimate(batch, in_reward)
    if settings.bootstrap_truncated:
        # The critic would otherwise never learn this value, and values would drift.
        batch = batch.replace(final_returns=batch.rewards)
    if algorithm.lagrangian.costs:
        multipliers = controls.lagrangian.moved(require_column(batch.costs))
        views = [cost_view(batch, i) for i in range(len(multipliers))]
        # A KL added to costs and taken off rewards keeps its coefficient in their combination.
        by_cost = [estimate(view, -in_reward) for view in views]
        advantages = constrained_advantages(
            advantages, [cost for cost, _ in by_cost], [m.value for m in multipliers]
        )
        batch = batch.replace(cost_returns=by_cost[0][1].float())
    # After whitening, which would change the weight of the teacher against the reward.
    whitened = WHITENINGS[settings.normalize](advantages, batch, settings.eps)
    advantages = add_distillation_reward(whitened, batch, algorithm.distill)
    if settings.clip is not None:
        advantages = advantages.clamp(-settings.clip, settings.clip)
    return batch.replace(advantages=advantages.float(), returns=returns.float())
