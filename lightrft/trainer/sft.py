"""Run supervised fine-tuning, from the first step or from a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightrft.config.verbs import SFTConfig
from lightrft.datasets.row_warnings import check_text
from lightrft.datasets.sampler import PromptSampler, draw, report
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.distributed.process_group import init_process_group, run_on_all_ranks
from lightrft.learner.sft_step import examples_to_batch, sft_step
from lightrft.models.processors import load_processor
from lightrft.observability.metrics import Metrics
from lightrft.observability.observer import NullObserver, Observer
from lightrft.observability.trackers import Summary
from lightrft.rewards.startup_check import check_rewards
from lightrft.roles import Roles, TrainableModel
from lightrft.rollout.eval_prompts import load_eval_prompts
from lightrft.trainer.context_limits import check_examples
from lightrft.trainer.preflight import check_enough, check_evaluation
from lightrft.trainer.run_session import RunSession, open_session
from lightrft.trainer.training_loop import TrainingRun, resume_from_checkpoint, run_steps
from lightrft.utils.errors import ConfigError
from lightrft.utils.state_io import State
from lightrft.workers.local import local_policy, local_scorer, local_tokenizer


@dataclass(slots=True, kw_only=True)
class SFTRun(TrainingRun):
    """An SFT run, whose steps take conversations of ``dataset`` in the order of ``sampler``."""

    config: SFTConfig
    dataset: SFTDataset
    sampler: PromptSampler

    def train_step(self) -> Metrics:
        """Take one step on the next ``batch_size`` conversations."""
        batch = examples_to_batch(draw(self.dataset, self.sampler, self.config.batch_size))
        with self.session.timers("update"):
            return sft_step(
                self.roles.strategy,
                self.roles.policy,
                batch,
                self.config.train.max_tokens_per_micro_batch,
            )

    def state(self) -> State:
        """Return the state of the sampler."""
        return {"sampler": self.sampler.state_dict()}

    def load_state(self, state: State) -> None:
        """Restore the result of ``state``."""
        self.sampler.load_state_dict(state["sampler"])


def run_sft(config: SFTConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty; name what to train on, e.g. data.sources=[{path: train.jsonl}]"
        )
    check_evaluation(config)
    if config.eval.data.sources and not config.reward.terms and not config.reward.per_source:
        raise ConfigError(
            "eval.data has sources but reward.terms is empty; name what scores a response, e.g. "
            "reward.terms=[math]"
        )
    with (
        init_process_group(config.strategy.timeout_minutes) as ranks,
        open_session(
            config,
            config.run,
            config.checkpoint,
            config.log,
            "sft",
            observer or NullObserver(),
            ranks,
        ) as session,
    ):
        run = prepare(config, session)
        try:
            check_examples(run.roles.actor, run.dataset.longest, config.max_tokens)
            resume_from_checkpoint(run)
            return run_steps(run)
        finally:
            # Cancels reads of media that have not started.
            run.dataset.prefetch(())
            run.roles.close()


def prepare(config: SFTConfig, session: RunSession) -> SFTRun:
    """Load data and roles of a run, at step 0."""
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer)
    dataset = SFTDataset(
        config.data,
        tokenizer,
        max_tokens=config.max_tokens,
        seed=config.run.seed,
        processor=processor,
    )
    report("data", dataset.counts, dataset.first_problem)
    check_text(dataset, "data.sources")
    check_enough("batch_size", config.batch_size, len(dataset), "examples")
    steps = config.train.steps or max(
        1, math.ceil(config.train.epochs * len(dataset) / config.batch_size)
    )
    prompts = load_eval_prompts(
        config.eval.data,
        tokenizer,
        config.run.seed,
        config.eval.limit,
        processor,
        reward=config.reward,
    )

    # Reward functions may be slow or call a service, so one rank tries them for all.
    def try_rewards() -> None:
        if prompts and session.ranks.rank == 0:
            check_rewards(config.reward, prompts, tokenizer)

    run_on_all_ranks(session.ranks, try_rewards)
    strategy, actor, engine = local_policy(
        config.model, config.strategy, config.engine, tokenizer, session.ranks
    )
    return SFTRun(
        session=session,
        eval=config.eval,
        eval_prompts=prompts,
        roles=Roles(
            strategy=strategy,
            policy=TrainableModel(actor, strategy.prepare(actor, config.optimizer, steps)),
            engine=engine,
            scorer=local_scorer(config.reward),
            tokenizer=tokenizer,
            processor=processor,
        ),
        seed=config.run.seed,
        steps=steps,
        config=config,
        dataset=dataset,
        sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
    )
