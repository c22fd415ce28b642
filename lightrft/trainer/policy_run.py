"""A run that trains a policy: it evaluates responses and exports the policy."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrft.distributed.collectives import all_reduce_metrics
from lightrft.distributed.process_group import run_on_all_ranks
from lightrft.engines.base import Engine
from lightrft.engines.constrained.grammars import check_column
from lightrft.models.actor import Actor
from lightrft.models.loading.save_model import save_model
from lightrft.models.lora import can_merge
from lightrft.observability.events import RolloutsEvent
from lightrft.observability.metrics import Metrics
from lightrft.rewards.success import Success
from lightrft.roles import Roles, TrainableModel
from lightrft.rollout.collate import attached
from lightrft.rollout.collect import check_scored
from lightrft.rollout.evaluation import evaluate, reached
from lightrft.rollout.logprob_check import CheckedEngine, unequal_weight
from lightrft.rollout.shown_samples import examples, sample_rows, table
from lightrft.strategy.base import Strategy
from lightrft.trainer.checks.context_limits import check_lengths, longest
from lightrft.trainer.saved_policy import POLICY, save_checked, write_policy
from lightrft.trainer.training_loop import TrainingRun, with_whole_weights
from lightrft.types import Prompt, Rollout
from lightrft.utils.atomic_files import whole_folder
from lightrft.utils.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PolicyRun(TrainingRun):
    """A run that trains the policy of ``roles``, and evaluates it on ``eval_prompts``."""

    roles: Roles
    eval_prompts: Sequence[Prompt]

    @property
    def costs(self) -> frozenset[str]:
        """Names of the terms that are costs of responses."""
        return frozenset()

    @property
    def strategy(self) -> Strategy:
        """See ``TrainingRun.strategy``."""
        return self.roles.strategy

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """See ``TrainingRun.trained``."""
        return self.roles.trained

    @property
    def success(self) -> Success:
        """See ``TrainingRun.success``."""
        return Success(self.config.reward, self.config.eval.threshold, self.costs)

    def check_evaluation(self) -> None:
        """Raise an error if the eval set has prompts without a reward, or too long ones, or if it
        lacks the column of constraints.
        """
        if not self.eval_prompts:
            return
        sampling = self.config.eval.sampling
        check_column(self.eval_prompts, sampling, "eval.sampling", "eval.data")
        self.roles.scorer.check_sources(prompt.data_source for prompt in self.eval_prompts)
        check_lengths(
            self.roles.actor,
            self.roles.engine,
            self.config.engine,
            longest(self.eval_prompts),
            sampling,
            "eval.sampling",
            "eval.data",
        )

    def publish(self) -> None:
        """Send the weights to the engine."""
        self.roles.publish(self.step)

    def publish_update(self) -> Metrics:
        """See ``TrainingRun.publish_update``."""
        if not self.samples:
            return Metrics()
        if self.roles.published != self.step:
            with self.session.timers("weights"):
                self.publish()
        return all_reduce_metrics(self.roles.counts(), self.session.ranks)

    def wait_until_idle(self) -> None:
        """Wait until engine and scorer are idle."""
        return

    @property
    def evaluates(self) -> bool:
        """Evaluations have something to measure."""
        return bool(self.eval_prompts) or self.validates

    def evaluate(self) -> Metrics:
        """Return metrics of the held-out examples and of responses to the eval set."""
        metrics = TrainingRun.evaluate(self)
        if self.eval_prompts:
            metrics.merge(evaluate_responses(self))
        return metrics

    def reached(self, values: Mapping[str, float]) -> bool:
        """Return whether the accuracy has reached ``eval.stop_at``."""
        return reached(self.config.eval, values)

    def export(self) -> int:
        """Write the policy as a Hugging Face folder ``model/`` and return its step."""
        return export(self)

    def close(self) -> None:
        """See ``TrainingRun.close``."""
        TrainingRun.close(self)
        self.roles.close()

    def show(
        self,
        rollouts: Sequence[Rollout],
        failures: Counter[str],
        **columns: Sequence[object],
    ) -> None:
        """Give the responses that a step sampled to callbacks, warnings, people and files.

        Args:
            rollouts: All rollouts of the step.
            failures: Responses that were not scored, by the reason.
            columns: Further fields of the rollouts in their file, see ``write_rollouts``.
        """
        done, logs, folder = self.step + 1, self.config.log, self.session.folder
        self.health.blame("rollout/frac_reward_failed", failures)
        for reason, count in failures.most_common(3):
            log.info("step %d: %d responses were not scored: %s", done, count, reason)
        self.health.examples |= examples(rollouts, self.config.reward)
        self.session.fire(RolloutsEvent, done, rollouts=rollouts)
        if logs.samples:
            self.session.observer.note(table(done, rollouts, logs.samples))
            folder.show_samples(sample_rows(rollouts, logs.samples))
        if logs.rollouts_every and done % logs.rollouts_every == 0:
            files = attached(rollouts)
            folder.write_rollouts(done, rollouts, name="step", attached=files, **columns)

    def write_model(self, path: Path) -> None:
        """See ``TrainingRun.write_model``."""
        merge = can_merge(self.roles.actor)

        def write(actor: Actor) -> None:
            roles = self.roles
            with whole_folder(path) as temporary:
                save_model(
                    actor, roles.tokenizer, temporary, processor=roles.processor, merge=merge
                )

        with_whole_weights(self, lambda: Actor.load(self.roles.actor.config), write)


def export(run: PolicyRun) -> int:
    """Write the policy as a Hugging Face folder ``model/`` and return its step.

    It is the best checkpoint if the run names a metric, else the current policy. Sharded weights
    are gathered into a copy on rank 0.
    """
    roles, path, ranks = run.roles, run.session.path / "model", run.session.ranks
    merge = can_merge(roles.actor)
    if not merge:
        log.warning(
            "the weights are quantised, so %s holds the adapters alone; lightrft export adds them "
            "to these weights, and lightrft merge to those that were not quantised",
            path,
        )
    best, step = run.session.best_checkpoint(run.step)
    if best is not None:

        def write() -> None:
            if ranks.rank == 0:
                config, weights = roles.actor.config, best / POLICY
                write_policy(config, weights, path, roles.tokenizer, roles.processor, merge=merge)

        run_on_all_ranks(ranks, write)
        return step

    def save(actor: Actor) -> None:
        save_checked(actor, path, roles.tokenizer, roles.processor, merge=merge)

    with_whole_weights(run, lambda: Actor.load(roles.actor.config), save)
    return step


def current_engine(run: PolicyRun) -> Engine:
    """Return the engine of ``run`` with the current weights.

    Runs that train without sampling send weights only here. In one process, the engine compares the
    log-probs of its first responses with the trainer's.

    Raises:
        ModelError: The engine has other weights than it received.
    """
    roles = run.roles
    if roles.engine.shares_weights:
        return roles.engine
    if roles.published != run.step:
        run.publish()
        if name := unequal_weight(roles.engine_fingerprint, roles.weights()):
            raise ModelError(
                f"weights of version {run.step} were not transferred: the engine holds another "
                f"{name!r} than the trainer"
            )
    if roles.strategy.ranks.size > 1:
        return roles.engine
    return CheckedEngine(roles.engine, roles.actor, run.config.engine, was_sent=True)


def evaluate_responses(run: PolicyRun) -> Metrics:
    """Generate responses to the eval set with the current policy, write them and return metrics."""
    # The scorer is shared, and asynchronous generation would mix its responses with these.
    run.wait_until_idle()
    engine = current_engine(run)
    with run.roles.generation_mode():
        found = evaluate(
            engine,
            run.roles.scorer,
            run.eval_prompts,
            run.config.eval,
            run.seed,
            ranks=run.roles.strategy.ranks,
            reward=run.config.reward,
            costs=run.costs,
        )
    # Before the check, so that the responses show why none was scored.
    run.session.folder.write_rollouts(
        run.step, found.rollouts, name="eval", attached=attached(found.rollouts)
    )
    check_scored(found.rollouts, f"to the eval prompts at step {run.step}")
    run.health.blame("eval/failed", Counter(r.failed for r in found.rollouts if r.failed))
    run.health.examples |= examples(found.rollouts, run.config.reward, evaluated=True)
    return found.metrics
