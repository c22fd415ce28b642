"""Run supervised fine-tuning, from the first step or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from lightrft.config.verbs import DistillVerbConfig, SFTConfig
from lightrft.datasets.encoded_dataset import EncodedDataset
from lightrft.datasets.row_warnings import check_held_out, check_rows
from lightrft.datasets.sampler import PromptSampler, draw, report
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.learner.sft_step import (
    evaluate_supervised,
    examples_to_batch,
    sft_step,
    with_noise,
    with_sources,
)
from lightrft.models.processors import Processor, load_processor
from lightrft.observability.metrics import Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.roles import Roles, TrainableModel
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.policy_run import PolicyRun
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.supervised import (
    check_supervised,
    loaded_eval_prompts,
    supervised_policy,
)
from lightrft.trainer.training_loop import run_training
from lightrft.workers.local import local_tokenizer, policy_scorer


@dataclass(slots=True, kw_only=True)
class SFTRun(PolicyRun):
    """An SFT run, whose steps take conversations of ``dataset``."""

    config: SFTConfig
    dataset: SFTDataset

    def train_step(self) -> Metrics:
        """Take one step on the next ``batch_size`` conversations."""
        config = self.config
        sources = self.dataset.data_sources
        examples = draw(self.dataset, self.sampler, config.batch_size)
        batch = with_sources(examples_to_batch(examples), examples, sources)
        noise = partial(with_noise, alpha=config.neftune_alpha, seed=self.seed, step=self.step)
        with self.session.timers("update"):
            return sft_step(
                self.roles.strategy,
                self.roles.policy,
                batch,
                config.train.micro_batch_tokens,
                noise,
                sources,
            )

    def validate(self) -> Metrics:
        """Return the loss of the held-out conversations."""
        config = self.config
        budget = config.train.micro_batch_tokens
        return evaluate_supervised(self.roles, self.validation, config.batch_size, budget)


def run_sft(config: SFTConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    check_supervised(config)
    return run_training(config, observer, partial(prepare, config))


def prepare(config: SFTConfig, session: RunSession) -> SFTRun:
    """Load data and roles of a run, at step 0."""
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data.media)
    dataset = load_examples(config, tokenizer, processor)
    check_enough("batch_size", config.batch_size, len(dataset), "examples")
    steps = config.train.count_steps(len(dataset), config.batch_size)
    prompts = loaded_eval_prompts(config, tokenizer, processor, session, dataset)
    strategy, actor, engine = supervised_policy(config, session, tokenizer, [prompts])
    return SFTRun(
        session=session,
        eval_prompts=prompts,
        roles=Roles(
            strategy=strategy,
            policy=TrainableModel(actor, strategy.prepare(actor, config.optimizer, steps)),
            engine=engine,
            scorer=policy_scorer(config.reward, config.model, tokenizer, strategy.device),
            tokenizer=tokenizer,
            processor=processor,
        ),
        steps=steps,
        config=config,
        dataset=dataset,
        validation=load_validation(config, tokenizer, processor, dataset),
        sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
    )


def load_examples(
    config: SFTConfig | DistillVerbConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    key: Literal["data", "validation"] = "data",
) -> SFTDataset:
    """Return the conversations of ``data`` or of ``validation``.

    Args:
        config: settings of the run.
        tokenizer: encodes the conversations.
        processor: prepares media, or None for a text-only model.
        key: the setting that names the conversations.
    """
    dataset = SFTDataset(
        config.data if key == "data" else config.validation,
        tokenizer,
        max_tokens=config.max_tokens,
        seed=config.run.seed,
        processor=processor,
    )
    report(key, dataset.counts, dataset.first_problem)
    check_rows(dataset, f"{key}.sources")
    return dataset


def load_validation(
    config: SFTConfig | DistillVerbConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    learned: EncodedDataset[Any],
) -> SFTDataset | None:
    """Return the conversations of ``validation``, or None without sources.

    Args:
        config: settings of the run.
        tokenizer: encodes the conversations.
        processor: prepares media, or None for a text-only model.
        learned: the rows to learn from.
    """
    if not config.validation.sources:
        return None
    held_out = load_examples(config, tokenizer, processor, "validation")
    check_held_out(learned.prompt_keys(), list(held_out.prompt_keys()), "validation.sources")
    return held_out
