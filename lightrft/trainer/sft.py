"""A run of supervised fine-tuning: steps, evaluations and checkpoints, from the first or from where it was stopped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrft.config import SFTConfig
from lightrft.datasets.prompts import PromptSampler
from lightrft.datasets.sft import SFTDataset
from lightrft.models.loading import save_model
from lightrft.strategy.base import Strategy
from lightrft.strategy.engine.base import Engine
from lightrft.trainer.evaluate import evaluate, reached
from lightrft.trainer.launch.local import local_policy
from lightrft.trainer.prompts import held_out
from lightrft.trainer.reward import Scorer
from lightrft.trainer.roles import Scoring, Trained
from lightrft.trainer.session import Nobody, Observer, Session, close_session, open_session
from lightrft.trainer.supervised import examples_to_batch, sft_step
from lightrft.types import Prompt
from lightrft.utils.errors import ConfigError
from lightrft.utils.metrics import Metrics


@dataclass(slots=True)
class SFTRun:
    """Everything that a step reads. ``scorer`` is there when there is something held out to score."""

    config: SFTConfig
    session: Session
    strategy: Strategy
    policy: Trained
    engine: Engine
    tokenizer: Any
    dataset: SFTDataset
    sampler: PromptSampler
    held_out: Sequence[Prompt]
    scorer: Scoring | None
    steps: int
    step: int = 0


def run_sft(config: SFTConfig, observer: Observer | None = None) -> dict[str, Any]:
    """Train as ``config`` says, into its run folder; returns what ``summary.json`` holds."""
    if not config.data.sources:
        raise ConfigError("data.sources is empty; name what to train on, e.g. data.sources=[{path: train.jsonl}]")
    if config.eval.data.sources and not config.reward.terms and not config.reward.per_source:
        raise ConfigError("eval.data has sources but reward.terms is empty; name what scores an answer, e.g. reward.terms=[math]")
    with open_session(config, config.run, config.checkpoint, config.log, "sft", observer or Nobody()) as session:
        run = prepare(config, session)
        try:
            return loop(run)
        finally:
            run.engine.close()
            if run.scorer is not None:
                run.scorer.close()


def prepare(config: SFTConfig, session: Session) -> SFTRun:
    """Model, data and, in a folder that holds one, the state of the newest checkpoint."""
    strategy, actor, tokenizer, engine = local_policy(config.model, config.strategy, config.engine)
    dataset = SFTDataset(config.data, tokenizer, max_tokens=config.max_tokens, seed=config.run.seed)
    steps = config.train.steps or max(1, math.ceil(config.train.epochs * len(dataset) / config.batch_size))
    run = SFTRun(
        config=config,
        session=session,
        strategy=strategy,
        policy=Trained(actor, strategy.prepare(actor, config.optimizer, steps)),
        engine=engine,
        tokenizer=tokenizer,
        dataset=dataset,
        sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
        held_out=held_out(config.eval.data, tokenizer, config.run.seed, config.eval.limit),
        scorer=Scorer(config.reward) if config.eval.data.sources else None,
        steps=steps,
    )
    run.step, state = session.resume(strategy, {"policy": run.policy})
    if state:
        run.sampler.load_state_dict(state["sampler"])
    return run


def loop(run: SFTRun) -> dict[str, Any]:
    """Every step that is left, then the summary."""
    run.session.observer.begin("sft", run.steps, run.step)
    config, session, values = run.config, run.session, {}
    if run.step == 0 and config.eval.at_start and run.held_out:
        values = session.record(0, evaluation(run))
    while run.step < run.steps and not session.stop and not reached(config.eval, values):
        batch = examples_to_batch([run.dataset[i] for i in run.sampler.next(config.batch_size)])
        with session.timers("update"):
            metrics = sft_step(run.strategy, run.policy, batch, config.train.micro_batch_tokens)
        run.step += 1
        values = finish_step(run, metrics)
    finished = run.step >= run.steps or reached(config.eval, values)
    if finished:
        save_model(run.policy.model, run.tokenizer, session.path / "model")
    return close_session(session, config.eval.threshold, {"finished": finished}, run.step)


def finish_step(run: SFTRun, metrics: Metrics) -> dict[str, Any]:
    """Evaluate and save if it is time, and record the step's numbers."""
    config, session = run.config, run.session
    last = run.step >= run.steps
    if run.held_out and (last or (config.eval.every and run.step % config.eval.every == 0)):
        with session.timers("eval"):
            metrics.merge(evaluation(run))
    values = metrics.compute()
    state = {"sampler": run.sampler.state_dict()}
    last = last or reached(config.eval, values)
    metrics.merge(session.save_if_due(run.step, last, run.strategy, {"policy": run.policy}, state, values))
    return session.record(run.step, metrics)


def evaluation(run: SFTRun) -> Metrics:
    """Held-out accuracy of the policy as it is now."""
    assert run.scorer is not None
    found = evaluate(run.engine, run.scorer, run.held_out, run.config.eval, run.config.run.seed)
    run.session.folder.write_rollouts(run.step, found.rollouts, name="eval")
    return found.metrics
