"""Run preference learning, from the first step or from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.algorithms.preference.compatibility import check_preference
from lightrft.algorithms.preference.reference_source import Source, reference_source
from lightrft.algorithms.preference.requirements import (
    PreferenceRequirements,
    preference_requirements,
)
from lightrft.config.data import PreferenceDataConfig
from lightrft.config.verbs import DPOConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.row_warnings import check_text
from lightrft.datasets.sampler import PromptSampler, draw, report
from lightrft.learner.preference_batch import PreferenceStats
from lightrft.learner.preference_evaluation import evaluate_preferences
from lightrft.learner.preference_examples import preference_to_batch
from lightrft.learner.preference_step import PreferenceSettings, preference_step
from lightrft.learner.reference_cache import ReferenceLogprobs, cached_logprobs
from lightrft.learner.reference_update import (
    load_reference_state,
    reference_state,
    update_reference,
)
from lightrft.models.processors import load_processor
from lightrft.observability.metrics import Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.roles import AdapterFreeReference, FrozenModel, Roles, TrainableModel
from lightrft.trainer.checks.context_limits import check_examples
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.supervised import (
    check_supervised,
    loaded_eval_prompts,
    opened_session,
)
from lightrft.trainer.training_loop import TrainingRun, resume_from_checkpoint, run_steps
from lightrft.utils.errors import ConfigError
from lightrft.utils.state_io import State
from lightrft.workers.local import (
    local_policy,
    local_scorer,
    local_tokenizer,
    preference_reference,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PreferenceRun(TrainingRun):
    """A run of preference learning, whose steps take examples of ``dataset``.

    Attributes:
        config: Settings of the run.
        settings: Settings of a step.
        dataset: The examples.
        validation: The held-out examples, if there are any.
        sampler: Gives the order of the examples.
        source: Where the reference's log-probs come from.
        stats: Numbers that carry over between steps.
        cached: The reference's log-probs of ``dataset`` and ``validation``, if they are kept.
    """

    config: DPOConfig
    settings: PreferenceSettings
    dataset: PreferenceDataset
    validation: PreferenceDataset | None
    sampler: PromptSampler
    source: Source
    stats: PreferenceStats = field(default_factory=PreferenceStats)
    cached: tuple[ReferenceLogprobs | None, ReferenceLogprobs | None] = (None, None)

    @property
    def validates(self) -> bool:
        """There are held-out examples."""
        return self.validation is not None

    def train_step(self) -> Metrics:
        """Take one step on the next ``batch_size`` examples."""
        examples = draw(self.dataset, self.sampler, self.config.batch_size)
        batch = preference_to_batch(examples)
        logprobs, _ = self.cached
        if logprobs is not None:
            batch = batch.replace(ref_logprobs=logprobs.column(examples))
        with self.session.timers("update"):
            update_reference(self.roles, self.config.preference.reference, self.step)
            return preference_step(self.roles, batch, self.settings, self.stats, self.step)

    def validate(self) -> Metrics:
        """Return the loss of the held-out examples and the accuracy of their order."""
        if self.validation is None:
            return Metrics()
        return evaluate_preferences(
            self.roles,
            self.validation,
            self.settings,
            self.stats,
            self.config.batch_size,
            self.cached[1],
        )

    def state(self) -> State:
        """Return the state of the sampler, of the running numbers and of a moving reference."""
        return {
            "sampler": self.sampler.state_dict(),
            "preference": self.stats.state_dict(),
            **reference_state(self.roles),
        }

    def load_state(self, state: State) -> None:
        """Restore the result of ``state``."""
        self.sampler.load_state_dict(state["sampler"])
        self.stats.load_state_dict(state["preference"])
        load_reference_state(self.roles, state)


def run_preference(config: DPOConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    requirements = check(config)
    with opened_session(config, observer) as session:
        run = prepare(config, requirements, session)
        try:
            for dataset in (run.dataset, run.validation):
                if dataset is not None:
                    check_examples(run.roles.actor, dataset.longest, config.max_tokens)
            # Before a checkpoint replaces the weights, which are the reference's now.
            keep_reference(run)
            resume_from_checkpoint(run)
            return run_steps(run)
        finally:
            # Cancels reads of media that have not started.
            for dataset in (run.dataset, run.validation):
                if dataset is not None:
                    dataset.prefetch(())
            run.roles.close()


def check(config: DPOConfig) -> PreferenceRequirements:
    """Return what the losses read.

    Raises ``ConfigError`` for problems that can be found without a model or data.
    """
    check_supervised(config)
    check_preference(config.preference)
    requirements = preference_requirements(config.preference)
    wanted = ("labelled",) if config.verb == "kto" else ("pair", "ranked")
    if requirements.kind not in wanted:
        other = "dpo" if config.verb == "kto" else "kto"
        raise ConfigError(
            f"preference.losses = {config.preference.losses[0].name}: its data are of kind "
            f"{requirements.kind}, which lightrft {other} reads; run lightrft {other}, or take "
            f"another loss"
        )
    if requirements.kl and config.batch_size < 2:
        raise ConfigError(
            f"batch_size = {config.batch_size}: the loss pairs each prompt with the response to "
            "another one; set it to 2 or more"
        )
    return requirements


def prepare(
    config: DPOConfig, requirements: PreferenceRequirements, session: RunSession
) -> PreferenceRun:
    """Load data and roles of a run, at step 0.

    Args:
        config: Settings of the run.
        requirements: What the losses read.
        session: Folder, metrics and timers of the run.
    """
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer)

    def load(data: PreferenceDataConfig, key: str) -> PreferenceDataset:
        dataset = PreferenceDataset(
            data,
            tokenizer,
            kind=requirements.kind,
            max_tokens=config.max_tokens,
            seed=config.run.seed,
            processor=processor,
            gold=requirements.gold,
            corrupted=requirements.corrupted,
        )
        report(key, dataset.counts, dataset.first_problem)
        check_text(dataset, f"{key}.sources")
        check_columns(dataset, requirements)
        return dataset

    dataset = load(config.data, "data")
    validation = load(config.validation, "validation") if config.validation.sources else None
    check_enough("batch_size", config.batch_size, len(dataset), "examples")
    steps = config.train.count_steps(len(dataset), config.batch_size)
    source = reference_source(
        config.preference,
        requirements,
        adapters=config.model.lora is not None,
        path=config.reference,
        sees_all=steps * config.batch_size >= len(dataset),
    )
    log.info("preference.reference.source: %s", source)
    prompts = loaded_eval_prompts(config, tokenizer, processor, session)
    strategy, actor, engine = local_policy(
        config.model, config.strategy, config.engine, tokenizer, session.ranks
    )
    policy = TrainableModel(actor, strategy.prepare(actor, config.optimizer, steps))
    return PreferenceRun(
        session=session,
        eval=config.eval,
        eval_prompts=prompts,
        roles=Roles(
            strategy=strategy,
            policy=policy,
            reference=preference_reference(config, source, policy, strategy),
            engine=engine,
            scorer=local_scorer(config.reward),
            tokenizer=tokenizer,
            processor=processor,
        ),
        seed=config.run.seed,
        steps=steps,
        config=config,
        settings=PreferenceSettings(
            config.preference,
            requirements,
            config.train.max_tokens_per_micro_batch,
            config.run.seed,
        ),
        dataset=dataset,
        validation=validation,
        sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
        source=source,
    )


def check_columns(dataset: PreferenceDataset, requirements: PreferenceRequirements) -> None:
    """Raise an error if the rows lack what the losses read.

    Raises:
        DataError: A row has no rating or margin.
        ConfigError: Rows have weights, and a loss compares the batch as a whole.
    """
    if requirements.margin:
        dataset.require("margin")
    if requirements.rating:
        dataset.require("rating")
    if requirements.whole_batch and dataset.is_weighted:
        raise ConfigError(
            "data.columns.weight: rows have weights, and preference.losses has a loss that "
            "compares the batch as a whole, which cannot weigh single rows; leave one of them out"
        )


def keep_reference(run: PreferenceRun) -> None:
    """Compute the reference's log-probs once, if they are to be kept, and drop the model."""
    if run.source != "cached":
        return
    validation = None if run.validation is None else kept_logprobs(run, run.validation)
    run.cached = (kept_logprobs(run, run.dataset), validation)
    run.roles.reference = None


def kept_logprobs(run: PreferenceRun, dataset: PreferenceDataset) -> ReferenceLogprobs:
    """Return the reference's log-probs of ``dataset``, and show the progress."""
    reference, observer = run.roles.reference, run.session.observer
    assert isinstance(reference, FrozenModel | AdapterFreeReference)

    def show(done: int) -> None:
        if done:
            observer.update({"step": done})
        else:
            observer.begin("reference log-probs", len(dataset), 0)

    return cached_logprobs(
        run.roles,
        reference,
        dataset,
        run.settings.max_tokens,
        Path(run.config.preference.reference.cache_dir).expanduser(),
        show,
    )
