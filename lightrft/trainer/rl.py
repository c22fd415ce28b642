"""A run of reinforcement learning: steps, evaluations and checkpoints, from the first or from where it was stopped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrft.config import RLConfig
from lightrft.models.loading import save_model
from lightrft.trainer.advantages import NEEDS_GROUPS
from lightrft.trainer.evaluate import Evaluation, evaluate, reached
from lightrft.trainer.kl import KLController
from lightrft.trainer.launch.local import local_roles, rollout_steps
from lightrft.trainer.parts import check_parts
from lightrft.trainer.ppo import StepResult, rl_step
from lightrft.trainer.prompts import PromptStream, held_out
from lightrft.trainer.roles import Roles, Trained
from lightrft.trainer.rollout import Interrupted
from lightrft.trainer.session import Nobody, Observer, Session, close_session, open_session
from lightrft.types import Prompt
from lightrft.utils.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Run:
    """Everything that a step of a run reads."""

    config: RLConfig
    session: Session
    roles: Roles
    stream: PromptStream
    held_out: Sequence[Prompt]
    kl: KLController
    steps: int
    step: int = 0

    @property
    def trained(self) -> dict[str, Trained]:
        critic = {"critic": self.roles.critic} if self.roles.critic is not None else {}
        return {"policy": self.roles.policy, **critic}

    def state(self) -> dict[str, Any]:
        return {"sampler": self.stream.sampler.state_dict(), "kl_coef": self.kl.coef}

    def load_state(self, state: dict[str, Any]) -> None:
        self.stream.sampler.load_state_dict(state["sampler"])
        self.kl.coef = state["kl_coef"]


def run_rl(config: RLConfig, observer: Observer | None = None) -> dict[str, Any]:
    """Train as ``config`` says, into its run folder; returns what ``summary.json`` holds."""
    check(config)
    with open_session(config, config.run, config.checkpoint, config.log, "rl", observer or Nobody()) as session:
        run = prepare(config, session)
        try:
            return loop(run)
        finally:
            run.roles.close()


def check(config: RLConfig) -> None:
    """Problems that need no model or data to be seen. Raises ``ConfigError``."""
    if not config.reward.terms and not config.reward.per_source:
        raise ConfigError(
            "reward.terms is empty; name what scores an answer, e.g. reward.terms=[math] or reward.terms=[file.py:function]"
        )
    if not config.data.sources:
        raise ConfigError("data.sources is empty; name what prompts come from, e.g. data.sources=[{path: train.jsonl}]")
    name = config.algorithm.advantage.name
    if name in NEEDS_GROUPS and config.rollout.samples < 2:
        raise ConfigError(
            f"rollout.samples = {config.rollout.samples}: advantage {name!r} compares answers of a group; set it to 2 or more"
        )
    check_parts(config.algorithm)


def prepare(config: RLConfig, session: Session) -> Run:
    """Roles, data and, in a folder that holds one, the state of the newest checkpoint."""
    roles = local_roles(config, config.train.steps or 1)
    stream = PromptStream.of(config.data, roles.tokenizer, config.run.seed)
    steps = rollout_steps(config, len(stream.dataset))
    held = held_out(config.eval.data, roles.tokenizer, config.run.seed, config.eval.limit)
    run = Run(config, session, roles, stream, held, KLController.of(config.algorithm.kl), steps)
    run.step, state = session.resume(roles.strategy, run.trained)
    if state:
        run.load_state(state)
    roles.engine.load_weights(roles.strategy.full_parameters(roles.policy.state), run.step)
    return run


def loop(run: Run) -> dict[str, Any]:
    """Every step that is left, then the summary."""
    run.session.observer.begin("rl", run.steps, run.step)
    config, session = run.config, run.session
    values: dict[str, Any] = {}
    if run.step == 0 and config.eval.at_start and run.held_out:
        values = session.record(0, run_evaluation(run).metrics)
    while run.step < run.steps and not session.stop and not reached(config.eval, values):
        snapshot = run.stream.sampler.state_dict()
        try:
            result = rl_step(run.roles, config, run.step, run.kl, run.stream.draw, session.timers, lambda: bool(session.stop))
        except Interrupted:
            run.stream.sampler.load_state_dict(snapshot)
            session.save_if_due(run.step, False, run.roles.strategy, run.trained, run.state(), values)
            break
        run.step += 1
        values = finish_step(run, result)
    return summarise(run, values)


def finish_step(run: Run, result: StepResult) -> dict[str, Any]:
    """Write the step's rollouts, evaluate and save if it is time, and record its numbers."""
    config, session, metrics = run.config, run.session, result.metrics
    if config.log.rollouts_every and run.step % config.log.rollouts_every == 0:
        session.folder.write_rollouts(run.step, result.collected.rollouts, advantages=advantages_of(result))
    last = run.step >= run.steps
    if run.held_out and (last or (config.eval.every and run.step % config.eval.every == 0)):
        with session.timers("eval"):
            metrics.merge(run_evaluation(run).metrics)
    values = metrics.compute()
    last = last or reached(config.eval, values)
    metrics.merge(session.save_if_due(run.step, last, run.roles.strategy, run.trained, run.state(), values))
    return session.record(run.step, metrics)


def run_evaluation(run: Run) -> Evaluation:
    """Answer the held-out prompts as the policy is now, and write the answers down."""
    evaluation = evaluate(run.roles.engine, run.roles.scorer, run.held_out, run.config.eval, run.config.run.seed)
    run.session.folder.write_rollouts(run.step, evaluation.rollouts, name="eval")
    return evaluation


def summarise(run: Run, values: dict[str, Any]) -> dict[str, Any]:
    """Write ``samples.json`` and ``summary.json``, and export the policy once the run is over."""
    session, config = run.session, run.config
    finished = run.step >= run.steps or reached(config.eval, values)
    if finished:
        save_model(run.roles.actor, run.roles.tokenizer, session.path / "model")
    return close_session(
        session, config.eval.threshold, {"algorithm": config.algorithm.preset or "custom", "finished": finished}, run.step
    )


def advantages_of(result: StepResult) -> list[list[float]]:
    """For each rollout of the step, the advantage of each token; empty for those that were not trained on."""
    if result.batch is None or result.batch.advantages is None:
        return [[] for _ in result.collected.rollouts]
    rows = iter(result.batch.advantages.split(result.batch.lengths.tolist()))
    trained = {id(r): next(rows).tolist() for group in result.collected.groups for r in group}
    return [trained.get(id(r), []) for r in result.collected.rollouts]
