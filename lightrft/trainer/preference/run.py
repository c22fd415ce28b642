"""Run preference learning on given responses, or choose the run on sampled ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightrft.algorithms.preference.reference_source import reference_source
from lightrft.algorithms.preference.requirements import PreferenceRequirements
from lightrft.config.verbs import DPOConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.sampler import PromptSampler, draw
from lightrft.learner.preference_batch import preference_to_batch
from lightrft.learner.preference_step import preference_step
from lightrft.learner.reference_cache import ReferenceLogprobs, cached_logprobs
from lightrft.learner.reference_update import update_reference
from lightrft.learner.sft_step import with_sources
from lightrft.models.loading.adapter_base import adds_adapters
from lightrft.models.processors import load_processor
from lightrft.observability.metrics import Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.roles import AdapterFreeReference, FrozenModel
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.preference.base import (
    PreferenceRun,
    load_preferences,
    load_roles,
    load_validation,
    preference_settings,
)
from lightrft.trainer.preference.checks import check
from lightrft.trainer.preference.online import prepare_online
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.supervised import loaded_eval_prompts
from lightrft.trainer.training_loop import TrainingRun, run_training
from lightrft.utils.state_io import State
from lightrft.workers.local import local_tokenizer


def run_preference(config: DPOConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    requirements = check(config)
    prepare = prepare_online if config.online.group_size else prepare_given
    return run_training(config, observer, partial(prepare, config, requirements))


@dataclass(slots=True, kw_only=True)
class GivenPreferenceRun(PreferenceRun):
    """A run whose steps take examples of ``dataset``.

    Attributes:
        logprobs: The reference's log-probs of ``dataset``, if they are kept.
    """

    dataset: PreferenceDataset
    logprobs: ReferenceLogprobs | None = None

    def begin(self) -> None:
        """See ``TrainingRun.begin``."""
        TrainingRun.begin(self)
        # The weights are the reference's now.
        self.keep_reference()

    def keep_reference(self) -> None:
        """Compute the reference's log-probs once, if they are to be kept, and drop the model."""
        if self.source != "cached":
            return
        if self.validation is not None:
            self.validation_logprobs = kept_logprobs(self, self.validation)
        self.logprobs = kept_logprobs(self, self.dataset)
        self.roles.reference = None

    def train_step(self) -> Metrics:
        """Take one step on the next ``batch_size`` examples."""
        examples = draw(self.dataset, self.sampler, self.config.batch_size)
        sources = self.dataset.data_sources
        batch = with_sources(preference_to_batch(examples), examples, sources)
        if self.logprobs is not None:
            batch = batch.replace(ref_logprobs=self.logprobs.column(examples))
        with self.session.timers("update"):
            update_reference(self.roles, self.config.preference.reference, self.step)
            return preference_step(self.roles, batch, self.settings, self.stats, self.step)

    def state(self) -> State:
        """Return the state of the sampler, of the running numbers and of a moving reference."""
        return {**TrainingRun.state(self), **self.carried()}

    def load_state(self, state: State) -> None:
        """Restore the result of ``state``."""
        TrainingRun.load_state(self, state)
        self.load_carried(state)


def prepare_given(
    config: DPOConfig, requirements: PreferenceRequirements, session: RunSession
) -> GivenPreferenceRun:
    """Load data and roles of a run, at step 0.

    Args:
        config: Settings of the run.
        requirements: What the losses read.
        session: Folder, metrics and timers of the run.
    """
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data.media)
    dataset = load_preferences(config, config.data, "data", requirements, tokenizer, processor)
    validation = load_validation(config, requirements, tokenizer, processor)
    check_enough("batch_size", config.batch_size, len(dataset), "examples")
    steps = config.train.count_steps(len(dataset), config.batch_size)
    source = reference_source(
        config.preference,
        requirements,
        adapters=adds_adapters(config.model),
        path=config.reference,
        sees_all=steps * config.batch_size >= len(dataset),
    )
    prompts = loaded_eval_prompts(config, tokenizer, processor, session, dataset)
    return GivenPreferenceRun(
        session=session,
        eval_prompts=prompts,
        roles=load_roles(config, source, session, tokenizer, processor, steps, [prompts]),
        steps=steps,
        config=config,
        settings=preference_settings(config, requirements, dataset.data_sources),
        dataset=dataset,
        validation=validation,
        sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
        source=source,
    )


def kept_logprobs(run: GivenPreferenceRun, dataset: PreferenceDataset) -> ReferenceLogprobs:
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
