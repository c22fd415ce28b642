"""A run of reinforcement learning, from the first step or from where it was stopped."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from lightrft.config import RLConfig
from lightrft.models.processing import load_processor
from lightrft.trainer.account import tokens_of
from lightrft.trainer.asynchronous import Ahead, staleness_metrics
from lightrft.trainer.controls import Controls
from lightrft.trainer.health import Health
from lightrft.trainer.launch.local import local_roles, local_tokenizer, rollout_steps
from lightrft.trainer.launch.ray_workers import office_here
from lightrft.trainer.launch.remote_roles import check_workers, remote_roles
from lightrft.trainer.lengths import check_examples, check_lengths
from lightrft.trainer.loop import Training, run_steps, take_up
from lightrft.trainer.parts import check_parts, check_rollout, needs_of, needs_reference, needs_reward, trusts_sampler
from lightrft.trainer.ppo import StepResult, learn, rl_step
from lightrft.trainer.preflight import check_enough, check_learning
from lightrft.trainer.prompts import PromptStream, held_out
from lightrft.trainer.ptx import Ptx
from lightrft.trainer.refresh import load_refreshed, refreshed_state
from lightrft.trainer.replay import with_outcomes
from lightrft.trainer.replay_buffer import save_batch
from lightrft.trainer.reward_check import check_rewards
from lightrft.trainer.roles import Roles
from lightrft.trainer.rollout import attached
from lightrft.trainer.row_check import check_labels
from lightrft.trainer.session import Nobody, Observer, Session, open_session
from lightrft.trainer.update import merged
from lightrft.utils.errors import ConfigError
from lightrft.utils.metrics import Metrics
from lightrft.utils.ranks import Ranks, joined, tell_others, together

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RLRun(Training):
    """A step draws prompts from ``stream``, and ``controls`` go from one to the next."""

    config: RLConfig
    stream: PromptStream
    controls: Controls
    ahead: Ahead | None = None
    _drawn: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        if self.ahead is not None:
            self.ahead.begin(self.step, self._drawn)
            self._drawn = {}

    def rest(self) -> None:
        if self.ahead is not None:
            self.ahead.rest()

    def advance(self) -> Metrics:
        config, session = self.config, self.session
        result = self.learn_next() if self.ahead is None else self.learn_drawn(self.ahead)
        done = self.step + 1
        result.metrics.merge(merged(self.roles.counts(), session.ranks))
        self.health.blame("rollout/frac_reward_failed", result.collected.failures)
        for reason, count in result.collected.failures.most_common(3):
            log.info("step %d: %d answers were not scored: %s", done, count, reason)
        if config.log.rollouts_every and done % config.log.rollouts_every == 0:
            drawn = result.collected.rollouts
            session.folder.write_rollouts(done, drawn, attached=attached(drawn), advantages=advantages_of(result))
        writes = config.log.batches_every and session.ranks.rank == 0
        if writes and done % config.log.batches_every == 0 and result.batch is not None:
            save_batch(session.path / "batches" / f"step_{done:06d}", with_outcomes(result.batch, result.collected))
        return result.metrics

    def learn_next(self) -> StepResult:
        """Draw a batch, and learn from it."""
        stopped = lambda: bool(self.session.stop)  # noqa: E731
        with self.stream.as_before_on_error():
            result = rl_step(self.roles, self.config, self.step, self.controls, self.stream, self.session.timers, stopped)
        if self.config.rollout.partial:
            result.metrics.merge(staleness_metrics(result.batch, self.step))
        return result

    def learn_drawn(self, ahead: Ahead) -> StepResult:
        """Learn from a batch that was drawn beside earlier steps."""
        timers = self.session.timers
        drawn = ahead.take(self.step, timers)
        result = learn(self.roles, self.config, self.step, self.controls, drawn.collected, timers, drawn.probe)
        result.metrics.merge(staleness_metrics(result.batch, self.step))
        result.metrics.merge(drawn.metrics)
        return result

    def state(self) -> dict[str, Any]:
        drawn = {} if self.ahead is None else {"drawn": self.ahead.state_dict(self.step)}  # first: it may move the sampler
        carried = {**self.stream.state_dict(), "controls": self.controls.state_dict()}
        ptx = {} if self.roles.ptx is None else {"ptx": self.roles.ptx.state_dict()}
        return {**carried, **ptx, **refreshed_state(self.roles), **drawn}

    def load_state(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)
        self.controls.load_state_dict(state["controls"])
        if self.roles.ptx is not None:
            self.roles.ptx.load_state_dict(state["ptx"])
        load_refreshed(self.roles, state)
        self._drawn = state.get("drawn", {})

    def about(self) -> dict[str, Any]:
        begun = {"tokens_in_flight": sum(map(tokens_of, self.stream.begun))} if self.config.rollout.partial else {}
        return {"algorithm": self.config.algorithm.preset or "custom", **begun}

    def close(self) -> None:
        """End what draws, then the roles that it uses."""
        if self.ahead is not None:
            self.ahead.close()
        self.stream.close()
        self.roles.close()


def run_rl(config: RLConfig, observer: Observer | None = None) -> dict[str, Any]:
    """Train as ``config`` says, into its run folder; returns what ``summary.json`` holds."""
    check(config)
    with (
        joined(config.strategy.timeout) as ranks,
        open_session(config, config.run, config.checkpoint, config.log, "rl", observer or Nobody(), ranks) as session,
    ):
        run = prepare(config, session)
        try:
            if not config.reward.terms:  # rows of a source without terms could turn up after hours
                run.roles.scorer.check_sources(run.stream.dataset.data_sources)
            check_lengths(run.roles.actor, run.stream.dataset.longest, config.sampling, "sampling", "data")
            if isinstance(run.roles.ptx, Ptx):
                check_examples(run.roles.actor, run.roles.ptx.dataset.longest, config.ptx.max_tokens, "ptx.max_tokens")
            take_up(run)
            return run_steps(run)
        except BaseException as error:
            tell_others(error)
            raise
        finally:
            run.close()


def check(config: RLConfig) -> None:
    """Problems that need no model or data to be seen. Raises ``ConfigError``."""
    check_reward(config)
    if not config.data.sources:
        raise ConfigError("data.sources is empty; name what prompts come from, e.g. data.sources=[{path: train.jsonl}]")
    kl, answers = config.algorithm.kl, config.rollout.prompts * config.rollout.samples
    if kl.used and kl.controller == "adaptive" and answers >= 5 * kl.horizon:
        raise ConfigError(
            f"algorithm.kl.horizon = {kl.horizon}: with {answers} answers a step (rollout.prompts x rollout.samples) the adaptive "
            f"coefficient could turn negative; raise it above {answers // 5}"
        )
    check_parts(config.algorithm)
    check_learning(config)
    check_rollout(config)
    check_roles(config)
    check_workers(config)
    warn_of_staleness(config)
    if "groups" in needs_of(config.algorithm) and config.rollout.samples < 2:
        name = config.algorithm.advantage.name
        raise ConfigError(
            f"rollout.samples = {config.rollout.samples}: advantage {name!r} compares answers of a group; set it to 2 or more"
        )


def check_reward(config: RLConfig) -> None:
    """Raises ``ConfigError`` where something reads a reward and there is none."""
    if config.reward.terms or config.reward.per_source:
        return
    if needs_reward(config.algorithm):
        raise ConfigError(
            "reward.terms is empty; name what scores an answer, e.g. reward.terms=[math] or reward.terms=[file.py:function]"
        )
    if config.eval.data.sources:
        raise ConfigError("eval.data has sources but reward.terms is empty; name what scores an answer, e.g. reward.terms=[math]")


def check_roles(config: RLConfig) -> None:
    """Raises ``ConfigError`` where a setting and the models that the algorithm needs do not go together."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    if algorithm.distill.kind != "none" and not config.teacher.path:
        raise ConfigError(
            f"algorithm.distill.kind = {algorithm.distill.kind} needs a teacher; set teacher.path to its folder or name"
        )
    if algorithm.distill.kind == "none" and config.teacher != type(config.teacher)():
        raise ConfigError(f"teacher.path = {config.teacher.path!r} changes nothing: set algorithm.distill, e.g. to sampled")
    if algorithm.distill.kind == "none" and "teacher" in needs_of(algorithm):
        name = algorithm.advantage.name
        raise ConfigError(f"algorithm.advantage = {name} learns from a teacher alone; set algorithm.distill, e.g. to sampled")
    if "critic" not in needs_of(algorithm) and config.critic != type(config.critic)():
        raise ConfigError(f"critic changes nothing: advantage {algorithm.advantage.name!r} has no critic; take gae or vapo")
    if config.reference is not None and not needs_reference(algorithm):
        raise ConfigError(
            f"reference = {config.reference!r} changes nothing: no part in force reads it; set algorithm.kl, or leave it out"
        )
    if "process" not in needs_of(algorithm) and config.process != type(config.process)():
        raise ConfigError(f"process changes nothing: advantage {algorithm.advantage.name!r} has no process reward; take prime")
    if config.ptx.coef and not config.ptx.data.sources:
        raise ConfigError(
            f"ptx.coef = {config.ptx.coef} needs ptx.data.sources; name what to learn from, e.g. [{{path: sft.jsonl}}]"
        )
    if not config.ptx.coef and config.ptx != type(config.ptx)():
        raise ConfigError("ptx changes nothing: ptx.coef is 0; give it a share in the loss, e.g. ptx.coef=0.1")
    if kl.refresh_every and not needs_reference(algorithm):
        raise ConfigError(
            f"algorithm.kl.refresh_every = {kl.refresh_every} changes nothing: no part in force reads the reference"
        )
    if kl.refresh_every and config.model.lora is not None:
        raise ConfigError(
            f"algorithm.kl.refresh_every = {kl.refresh_every}: with model.lora the reference is the model without its adapters, which "
            "cannot move; set algorithm.kl.refresh_every=0, or train all weights (model.lora=null)"
        )


def warn_of_staleness(config: RLConfig) -> None:
    """Say so when nothing in the algorithm knows that answers come from older weights."""
    rollout, algorithm = config.rollout, config.algorithm
    if (rollout.staleness or rollout.partial) and trusts_sampler(algorithm):
        log.warning(
            "rollout.%s: tokens come from an older policy, and nothing corrects for it; set algorithm.corrections=[tis], or "
            "algorithm.proximal=behavior with a loss that clips the ratio",
            f"staleness = {rollout.staleness}" if rollout.staleness else "partial = True",
        )


def prepare(config: RLConfig, session: Session) -> RLRun:
    """Data and roles, at step 0."""
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer)
    stream = PromptStream.of(config.data, tokenizer, config.run.seed, config.rollout.curriculum, processor)
    check_enough("rollout.prompts", config.rollout.prompts, len(stream.dataset), "prompts")
    steps = rollout_steps(config, len(stream.dataset))
    check_labels(stream.dataset, config.reward, "data.sources")
    prompts = held_out(config.eval.data, tokenizer, config.run.seed, config.eval.limit, processor, reward=config.reward)
    controls = Controls.of(config.algorithm)
    if not config.launch.ray.scorers:  # else reward functions are called elsewhere, and may be found only there
        first = session.ranks.rank == 0
        together(session.ranks, lambda: check_rewards(config.reward, stream.bare, tokenizer) if first else None)
    roles = roles_of(config, tokenizer, steps, processor, session.ranks)  # last: what follows must not leave workers behind
    stopped = lambda: bool(session.stop)  # noqa: E731
    return RLRun(
        session=session,
        eval=config.eval,
        held_out=prompts,
        roles=roles,
        seed=config.run.seed,
        steps=steps,
        config=config,
        stream=stream,
        controls=controls,
        health=Health(needs_of(config.algorithm)),
        ahead=Ahead(roles, config, stream, steps, stopped) if config.rollout.staleness else None,
    )


def roles_of(config: RLConfig, tokenizer: Any, steps: int, processor: Any, ranks: Ranks) -> Roles:
    """Objects of this process, but for those that have workers of their own."""
    if not any(config.launch.ray.staff.values()):
        return local_roles(config, tokenizer, steps, processor, ranks)
    office = office_here()
    return remote_roles(config, tokenizer, steps, processor, ranks, hire=office.hire, host=office.host)


def advantages_of(result: StepResult) -> list[list[float]]:
    """For each rollout of the step, the advantage of each token; empty for those that were not trained on."""
    if result.batch is None or result.batch.advantages is None:
        return [[] for _ in result.collected.rollouts]
    rows = iter(result.batch.advantages.split(result.batch.lengths.tolist()))
    trained = {id(r): next(rows).tolist() for group in result.collected.groups for r in group}
    return [trained.get(id(r), []) for r in result.collected.rollouts]
