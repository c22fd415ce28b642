"""List the phases that learn from a batch, in order. A step runs all of them, and a replay some.

The shaped rewards, advantages and returns are computed here, as settings choose them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from lightrft.algorithms.advantages import ADVANTAGES, WHITENINGS
from lightrft.algorithms.constrained.lagrangian import constrained_advantages, cost_view
from lightrft.algorithms.nonfinite_tokens import readable, rewarded
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.reward_shaping import token_rewards, with_rewards
from lightrft.algorithms.token_ops import require_column
from lightrft.config.verbs import RLConfig
from lightrft.engines.base import never_stop
from lightrft.learner.controllers import Controllers
from lightrft.learner.distillation.targets import add_distillation_reward, with_teacher
from lightrft.learner.forward_passes import (
    MicroBatches,
    compute_logprobs,
    map_micro_batches,
    sampled_distribution,
)
from lightrft.learner.policy_update import (
    TokenLosses,
    UpdateSettings,
    actor_frozen,
    advance_schedules,
    update,
)
from lightrft.learner.process_reward import with_process_rewards
from lightrft.models.critic import Critic
from lightrft.models.sampled_distribution import Distribution
from lightrft.observability.metrics import Metrics, Sum
from lightrft.observability.timers import Timers
from lightrft.roles import Roles
from lightrft.rollout.accounting import CollectedRollouts
from lightrft.rollout.logprob_check import replay_metrics
from lightrft.types import Batch, rows_of


@dataclass(slots=True, kw_only=True)
class StepContext:
    """The models, settings and progress that the phases of one step share.

    Attributes:
        roles: Models, engine and scorer of the run.
        config: Settings of the run.
        requirements: What the algorithm reads.
        controllers: Coefficients and statistics that change during the run.
        step: Number of completed steps; also the version of the policy.
        timers: Measures the phases.
        metrics: Metrics of the step. Phases add theirs.
        stopped: Returns True once the run is asked to stop.
        collected: The rollouts of the batch, which count responses that a phase drops. ``None`` in
            a replay.
    """

    roles: Roles
    config: RLConfig
    requirements: Requirements
    controllers: Controllers
    step: int = 0
    timers: Timers = field(default_factory=Timers)
    metrics: Metrics = field(default_factory=Metrics)
    stopped: Callable[[], bool] = never_stop
    collected: CollectedRollouts | None = None

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens of a micro-batch."""
        return self.config.train.micro_batch_tokens

    @property
    def distribution(self) -> Distribution:
        """Return the distribution of log-probs, as responses are sampled."""
        return sampled_distribution(self.roles, self.config.sampling)

    @property
    def update_settings(self) -> UpdateSettings:
        """Return the settings of the optimizer steps."""
        config = self.config
        return UpdateSettings(
            algorithm=config.algorithm,
            requirements=self.requirements,
            train=config.train,
            temperature=self.distribution,
            max_new_tokens=config.sampling.max_new_tokens,
            seed=config.run.seed,
            warmup_steps=config.critic.warmup_steps,
            log_entropy=config.log.entropy,
        )

    def advance_schedules(self) -> None:
        """Advance the learning-rate schedules of policy and critics by a step without a batch."""
        train = self.config.train
        optimizer_steps = train.ppo_epochs * train.num_mini_batches
        advance_schedules(self.roles, self.config.critic.warmup_steps, self.step, optimizer_steps)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step.

    Attributes:
        name: Its name in ``time/...`` and in ``replay``.
        about: What it computes, for the documentation.
        run: Maps the batch and the context to the batch with more columns.
    """

    name: str
    about: str
    run: Callable[[Batch, StepContext], Batch]


def run_phases(batch: Batch, context: StepContext, phases: Iterable[Phase]) -> Batch:
    """Run ``phases`` on ``batch`` until no response is left.

    Args:
        batch: The batch of the step.
        context: What the phases share.
        phases: Some of ``PHASES``, in order.
    """
    for phase in phases:
        if not len(batch):
            break
        with context.timers(phase.name):
            batch = phase.run(batch, context)
    return batch


def with_policy(batch: Batch, context: StepContext) -> Batch:
    """Add the old log-probs, and the policy's entropy or energy, if something reads them.

    Args:
        batch: The batch of the step.
        context: What the phases share.
    """
    roles, algorithm, train = context.roles, context.config.algorithm, context.config.train
    needs, distribution = context.requirements, context.distribution
    context.metrics.merge(replay_metrics(roles, batch, distribution))
    if algorithm.old_logprobs == "rollout":
        batch = batch.replace(old_logprobs=batch.behavior_logprobs)
    wanted = {name: MicroBatches() for name in ("entropy", "energy") if name in needs.needs}
    if not wanted and not needs.old_logprobs(train.ppo_epochs * train.num_mini_batches):
        return batch

    def score(part: Batch, index: Tensor) -> Tensor:
        scores = roles.actor.score(
            part,
            temperature=distribution,
            entropy="entropy" in wanted,
            energy="energy" in wanted,
        )
        for name, column in wanted.items():
            column.put(rows_of(batch.lengths, index), getattr(scores, name))
        return scores.logprobs

    logprobs = map_micro_batches(batch, score, roles, context.max_tokens)
    old = logprobs if algorithm.old_logprobs == "policy" else batch.old_logprobs
    # Each rank fills in the rows of its micro-batches and leaves 0 elsewhere: the sum gathers them.
    group = roles.strategy.data_parallel_group
    columns = {name: group.sum(parts.column(batch.tokens)) for name, parts in wanted.items()}
    return batch.replace(old_logprobs=old, **columns)


def with_reference(batch: Batch, context: StepContext) -> Batch:
    """Add reference log-probs ``[N]``, if something reads them.

    Args:
        batch: The batch of the step.
        context: What the phases share.
    """
    reference = context.roles.reference
    if reference is None or not context.requirements.reference:
        return batch
    # As sampled, so that the KL compares the distributions of both models.
    logprobs = compute_logprobs(
        reference, batch, context.roles, context.max_tokens, context.distribution
    )
    return batch.replace(ref_logprobs=logprobs)


def with_teacher_columns(batch: Batch, context: StepContext) -> Batch:
    """Add what the teacher says of the tokens, if there is one.

    Args:
        batch: The batch of the step.
        context: What the phases share.
    """
    distill = context.config.algorithm.distill
    return with_teacher(batch, context.roles, distill, context.max_tokens, context.distribution)


def with_values(batch: Batch, context: StepContext) -> Batch:
    """Add the critics' values before each token, in units of the reward.

    With ``bootstrap_truncated``, also add the values after the last token. Without a critic,
    ``batch`` is returned unchanged. A second critic gives the values of a cost.

    Args:
        batch: The batch of the step.
        context: What the phases share.
    """
    roles, max_tokens = context.roles, context.max_tokens
    final = context.config.algorithm.advantage.bootstrap_truncated
    if roles.critic is not None:
        critic, unit = roles.critic.model, context.controllers.values
        values, after = critic_values(critic, batch, roles, max_tokens, final, unit)
        batch = batch.replace(values=values, final_values=after)
    if roles.cost_critic is not None:
        # Returns are never normalised next to costs, so its outputs have the unit of the cost.
        values, after = critic_values(roles.cost_critic.model, batch, roles, max_tokens, final)
        batch = batch.replace(cost_values=values, cost_final_values=after)
    return batch


def critic_values(
    critic: Critic,
    batch: Batch,
    roles: Roles,
    max_tokens: int,
    final: bool,
    unit: Callable[[Tensor], Tensor] = Tensor.detach,
) -> tuple[Tensor, Tensor | None]:
    """Return a critic's values before each token ``[N]`` and after the last ones ``[B]``.

    Args:
        critic: The critic.
        batch: The batch of the step.
        roles: Gives the strategy.
        max_tokens: Largest number of tokens of a micro-batch.
        final: Compute the values after the last tokens, which are None otherwise.
        unit: Converts the outputs to the unit of rewards.
    """
    parts = MicroBatches()

    def score(part: Batch, index: Tensor) -> Tensor:
        values, after = critic.values(part, final=final)
        if after is not None:
            parts.put(index, unit(after))
        return unit(values)

    values = map_micro_batches(batch, score, roles, max_tokens)
    if not final:
        return values, None
    return values, roles.strategy.data_parallel_group.sum(parts.column(len(batch)))


def with_token_rewards(batch: Batch, context: StepContext) -> Batch:
    """Count tokens that are not finite as not sampled, and add rewards of a process reward model.

    Args:
        batch: The batch of the step.
        context: What the phases share.
    """
    # Before the model takes its step: it must not learn from tokens that are not finite.
    finite = readable(batch, context.requirements)
    lost = int(batch.mask.sum()) - int(finite.mask.sum())
    context.metrics.add("policy/nonfinite_tokens", Sum(lost))
    return with_process_rewards(
        finite,
        context.roles,
        context.config.prm,
        context.max_tokens,
        context.distribution,
        context.metrics,
    )


def with_advantage_columns(batch: Batch, context: StepContext) -> Batch:
    """Add shaped rewards, token rewards, advantages and returns.

    Responses whose reward is not finite are dropped.

    Args:
        batch: The batch of the step.
        context: What the phases share.
    """
    config, controllers = context.config, context.controllers
    batch, kept = with_shaped_rewards(batch, config, controllers, context.requirements)
    if context.collected is not None:
        context.collected.keep(kept.tolist())
    return advantages_from(batch, config, controllers) if len(batch) else batch


def update_models(
    batch: Batch, context: StepContext, token_losses: TokenLosses | None = None
) -> Batch:
    """Take the optimizer steps of policy and critics. Return ``batch`` as it is.

    Args:
        batch: The batch of the step, with advantages.
        context: What the phases share.
        token_losses: Replaces the policy loss of ``algorithm``. ``None`` does not.
    """
    roles, controllers, step = context.roles, context.controllers, context.step
    settings = replace(context.update_settings, token_losses=token_losses)
    context.metrics.merge(update(roles, batch, settings, controllers, step))
    # After the update, which must see the coefficients that the rewards were shaped with.
    frozen = actor_frozen(roles, context.config.critic.warmup_steps, step)
    context.metrics.merge(controllers.update_from_batch(batch, frozen=frozen))
    return batch


PHASES = (
    Phase("logprobs", "old log-probs of the policy, its entropy and energy", with_policy),
    Phase("reference", "log-probs of the reference", with_reference),
    Phase("teacher", "log-probs or distributions of the teacher", with_teacher_columns),
    Phase("values", "values of the critics", with_values),
    Phase("prm", "a step of the process reward model, and its token rewards", with_token_rewards),
    Phase("advantages", "shaped rewards, advantages and returns", with_advantage_columns),
    Phase("update", "optimizer steps of policy and critics, and coefficients", update_models),
)
"""The phases that learn from a batch, in order. Each skips what the algorithm does not read."""


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
