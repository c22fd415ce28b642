"""Run reinforcement learning, from the first step or from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from lightrft.algorithms.requirements import Requirements
from lightrft.config.verbs import RLConfig
from lightrft.datasets.row_warnings import check_held_out
from lightrft.distributed.process_group import ProcessGroup, run_on_all_ranks
from lightrft.distributed.ray_workers import current_allocator
from lightrft.learner.controllers import Controllers
from lightrft.learner.reference_update import load_reference_state, reference_state
from lightrft.learner.sft_step import PretrainingLoss
from lightrft.models.processors import load_processor
from lightrft.observability.events import SettingChange
from lightrft.observability.metrics import Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.run_health import Health
from lightrft.rewards.startup_check import check_rewards
from lightrft.roles import Roles
from lightrft.rollout.accounting import tokens_of
from lightrft.rollout.async_generation import AsyncGenerator, staleness_metrics
from lightrft.rollout.evaluation import load_eval_prompts, prompt_keys
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.rollout.row_check import check_labels, check_named_sources
from lightrft.rollout.serialization import save_batch, with_outcomes
from lightrft.trainer.checks.check_config import check
from lightrft.trainer.checks.context_limits import (
    check_examples,
    check_lengths,
    warn_of_micro_batches,
)
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.phases import StepContext
from lightrft.trainer.policy_run import PolicyRun
from lightrft.trainer.rl_step import StepResult, collect_settings, learn, rl_step
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.training_loop import TrainingRun, run_training
from lightrft.utils.errors import ConfigError, UserError, before_update
from lightrft.workers.build_remote import remote_roles
from lightrft.workers.engine_kinds import check_media, kinds_to_check
from lightrft.workers.local import check_tokenizers, local_roles, local_tokenizer
from lightrft.workers.local_served import check_server_media

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RLRun(PolicyRun):
    """An RL run.

    Steps take prompts from ``stream``, and ``controllers`` carry over between steps.
    """

    config: RLConfig
    requirements: Requirements
    stream: PromptStream
    controllers: Controllers
    async_generator: AsyncGenerator | None = None
    changeable: ClassVar[tuple[str, ...]] = (
        "optimizer.lr",
        "sampling.temperature",
        "algorithm.kl.coef",
    )
    _drawn: dict[str, Any] = field(default_factory=dict)

    @property
    def costs(self) -> frozenset[str]:
        """See ``PolicyRun.costs``."""
        return self.config.algorithm.lagrangian.names

    @property
    def samples(self) -> bool:
        """See ``PolicyRun.samples``."""
        return True

    def begin(self) -> None:
        """See ``TrainingRun.begin``."""
        config, roles = self.config, self.roles
        # A row of a source without reward could otherwise be sampled after hours of training.
        if not config.reward.terms:
            roles.scorer.check_sources(self.stream.dataset.data_sources)
        check_lengths(
            roles.actor,
            roles.async_engine or roles.engine,
            config.engine,
            self.stream.dataset.longest,
            config.sampling,
            "sampling",
            "data",
        )
        warn_of_micro_batches(config.train, self.stream.dataset.longest)
        if isinstance(roles.ptx, PretrainingLoss):
            longest = roles.ptx.dataset.longest
            check_examples(roles.actor, longest, config.ptx.max_tokens, "ptx.max_tokens")

    def start(self) -> None:
        """Start asynchronous generation, with the batches that the checkpoint contains."""
        if self.async_generator is not None:
            self.async_generator.start(self.step, self._drawn)
            self._drawn = {}

    def wait_until_idle(self) -> None:
        """Pause asynchronous generation until engine and scorer are idle."""
        if self.async_generator is not None:
            self.async_generator.wait_until_idle()

    def train_step(self) -> Metrics:
        """Take one step, and report it."""
        if self.async_generator is None:
            result = self.learn_next()
        else:
            result = self.learn_generated(self.async_generator)
        self.report(result)
        return result.metrics

    def with_change(self, name: str, value: Any) -> RLConfig:
        """See ``TrainingRun.with_change``."""
        found = TrainingRun.with_change(self, name, value)
        rollout = self.config.rollout
        if name == "sampling.temperature" and (rollout.staleness or rollout.partial):
            raise ConfigError(
                f"{name} cannot change with rollout.staleness or rollout.partial: responses of the "
                "earlier temperature are under way; leave them out"
            )
        if check(found) != self.requirements:
            raise ConfigError(
                f"{name} = {value!r} changes what the run needs, such as a reference model or "
                "sampling at all; start a new run with it"
            )
        return found

    def change(self, change: SettingChange, *, is_new: bool) -> None:
        """See ``TrainingRun.change``."""
        TrainingRun.change(self, change, is_new=is_new)
        if change.name == "algorithm.kl.coef":
            kl = self.controllers.kl
            kl.config = self.config.algorithm.kl
            if is_new:
                kl.coef = kl.config.coef

    def report(self, result: StepResult) -> None:
        """Show the responses of a step, and write its batch if the settings ask for it."""
        session, every, done = self.session, self.config.log.batches_every, self.step + 1
        collected = result.collected
        self.show(collected.rollouts, collected.failures, advantages=advantages_of(result))
        writes = every and done % every == 0 and session.ranks.rank == 0
        if writes and result.batch is not None:
            save_batch(
                session.path / "batches" / f"step_{done:06d}",
                with_outcomes(result.batch, result.collected),
            )

    def context(self) -> StepContext:
        """Return what the phases of the next step share."""
        return StepContext(
            roles=self.roles,
            config=self.config,
            requirements=self.requirements,
            controllers=self.controllers,
            step=self.step,
            timers=self.session.timers,
            stopped=lambda: bool(self.session.stop),
        )

    def learn_next(self) -> StepResult:
        """Generate a batch and train on it."""
        with self.stream.restore_on_error():
            result = rl_step(self.context(), self.stream)
        if self.config.rollout.partial:
            result.metrics.merge(staleness_metrics(result.batch, self.step))
        return result

    def learn_generated(self, generator: AsyncGenerator) -> StepResult:
        """Train on a batch that was generated asynchronously during earlier steps."""
        with before_update():
            drawn = generator.take(self.step, self.session.timers)
        try:
            result = learn(self.context(), drawn.collected, drawn.probe)
        except UserError as error:
            # The batch is used up, so the state is no longer that of the last whole step.
            error.is_before_update = False
            raise
        result.metrics.merge(staleness_metrics(result.batch, self.step))
        result.metrics.merge(drawn.metrics)
        return result

    def state(self) -> dict[str, Any]:
        """Return the state of prompts, coefficients, PTX data, reference and pending batches."""
        # Must come first: it waits for batches in flight, and may rewind the prompt sampler.
        drawn = {}
        if self.async_generator is not None:
            drawn = {"drawn": self.async_generator.state_dict(self.step)}
        carried = {**self.stream.state_dict(), "controls": self.controllers.state_dict()}
        ptx = {} if self.roles.ptx is None else {"ptx": self.roles.ptx.state_dict()}
        return {**carried, **ptx, **reference_state(self.roles), **drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``."""
        self.stream.load_state_dict(state)
        self.controllers.load_state_dict(state["controls"])
        if self.roles.ptx is not None:
            self.roles.ptx.load_state_dict(state["ptx"])
        load_reference_state(self.roles, state)
        self._drawn = state.get("drawn", {})

    def summary_fields(self) -> dict[str, Any]:
        """Return the algorithm, and the number of tokens of unfinished responses."""
        fields: dict[str, Any] = {"algorithm": self.config.algorithm.preset or "custom"}
        if self.config.rollout.partial:
            fields["tokens_in_flight"] = sum(map(tokens_of, self.stream.partial))
        return fields

    def close(self) -> None:
        """Stop generation first, then close the roles that it uses."""
        # Its thread uses the stream and the roles.
        if self.async_generator is not None:
            self.async_generator.close()
        self.stream.close()
        PolicyRun.close(self)


def run_rl(config: RLConfig, observer: Observer | None = None) -> dict[str, Any]:
    """Train as configured and return the content of ``summary.json``."""
    requirements = check(config)
    return run_training(config, observer, partial(prepare, config, requirements))


def prepare(config: RLConfig, requirements: Requirements, session: RunSession) -> RLRun:
    """Load data and roles of a run, at step 0.

    Args:
        config: settings of the run.
        requirements: what the algorithm reads.
        session: folder, metrics and timers of the run.
    """
    tokenizer = local_tokenizer(config.model)
    check_tokenizers(config, tokenizer)
    processor = load_processor(config.model, tokenizer, config.data.media)
    stream = PromptStream.of(
        config.data, tokenizer, config.run.seed, config.rollout.curriculum, processor
    )
    check_enough(
        "rollout.prompts_per_step", config.rollout.prompts_per_step, len(stream.dataset), "prompts"
    )
    steps = config.train.count_steps(len(stream.dataset), config.rollout.prompts_per_step)
    check_labels(stream.dataset, config.reward, "data.sources")
    prompts = load_eval_prompts(
        config.eval.data,
        tokenizer,
        config.run.seed,
        config.eval.limit,
        processor,
        reward=config.reward,
    )
    check_held_out(stream.dataset.prompt_keys(), prompt_keys(prompts), "eval.data.sources")
    sources = {*stream.dataset.data_sources, *(prompt.data_source for prompt in prompts)}
    check_named_sources(config.reward, sources)
    kinds = kinds_to_check(config.engine, stream.dataset, prompts)
    check_media(config.model, config.engine, kinds)
    controls = Controllers.of(config.algorithm)
    # With scoring workers, reward functions may only be importable on the workers' nodes.
    if not config.launch.ray.scorers:
        first = session.ranks.rank == 0
        run_on_all_ranks(
            session.ranks,
            lambda: (
                check_rewards(config.reward, stream.without_media, tokenizer) if first else None
            ),
        )
    # Must come last: an error after this would leave workers running.
    roles = roles_of(config, requirements, tokenizer, steps, processor, session.ranks)
    engine = roles.async_engine or roles.engine
    try:
        run_on_all_ranks(session.ranks, lambda: check_server_media(engine, kinds))
    except BaseException:
        roles.close()
        raise
    stopped = lambda: bool(session.stop)  # noqa: E731
    return RLRun(
        session=session,
        eval_prompts=prompts,
        roles=roles,
        steps=steps,
        config=config,
        requirements=requirements,
        stream=stream,
        controllers=controls,
        health=Health(requirements.needs),
        async_generator=build_async_generator(roles, config, requirements, stream, steps, stopped),
    )


def build_async_generator(
    roles: Roles,
    config: RLConfig,
    requirements: Requirements,
    stream: PromptStream,
    steps: int,
    stopped: Callable[[], bool],
) -> AsyncGenerator | None:
    """Build the asynchronous generator, or return None without ``rollout.staleness``.

    Args:
        roles: roles of the run.
        config: settings of the run.
        requirements: what the algorithm reads.
        stream: source of prompts.
        steps: number of steps of the run.
        stopped: returns True once the run is asked to stop.
    """
    if not config.rollout.staleness:
        return None
    return AsyncGenerator(
        roles,
        collect_settings(config, requirements),
        stream,
        steps,
        stopped,
    )


def roles_of(
    config: RLConfig,
    requirements: Requirements,
    tokenizer: Any,
    steps: int,
    processor: Any,
    ranks: ProcessGroup,
) -> Roles:
    """Build the roles of a run, in this process or in workers as ``launch.ray`` says.

    Args:
        config: settings of the run.
        requirements: what the algorithm reads.
        tokenizer: tokenizer of the policy.
        steps: number of steps of the run.
        processor: processor of the policy, or None for a text-only model.
        ranks: all ranks of the run.
    """
    if not any(config.launch.ray.worker_counts.values()):
        return local_roles(config, requirements, tokenizer, steps, processor, ranks)
    allocator = current_allocator()
    return remote_roles(
        config,
        requirements,
        tokenizer,
        steps,
        processor,
        ranks,
        start_workers=allocator.start_workers,
        host=allocator.host,
    )


def advantages_of(result: StepResult) -> list[list[float]]:
    """Return the advantages of the tokens of each rollout, empty for rollouts that were not trained
    on.
    """
    if result.batch is None or result.batch.advantages is None:
        return [[] for _ in result.collected.rollouts]
    rows = iter(result.batch.advantages.split(result.batch.lengths.tolist()))
    # The batch was collated from these groups in this order.
    trained = {id(r): next(rows).tolist() for group in result.collected.groups for r in group}
    return [trained.get(id(r), []) for r in result.collected.rollouts]
