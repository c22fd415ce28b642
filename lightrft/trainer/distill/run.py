"""Run distillation on given and on sampled responses, from the first step or from a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.verbs import DistillVerbConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sampler import PromptSampler, draw, in_order
from lightrft.datasets.sft_dataset import Example, SFTDataset
from lightrft.learner.distillation.step import Lesson, distill_step, evaluate_distillation
from lightrft.learner.reference_update import (
    load_reference_state,
    reference_state,
    update_reference,
)
from lightrft.learner.sft_step import examples_to_batch
from lightrft.models.processors import Processor, load_processor
from lightrft.observability.metrics import Mean, Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.rewards.base import NullScorer
from lightrft.roles import FrozenModel, Reference, Roles, TrainableModel
from lightrft.rollout.collate import collate
from lightrft.rollout.collect import generate_on_ranks
from lightrft.rollout.generation import requests_for
from lightrft.rollout.logprob_check import check_batch
from lightrft.trainer.checks.context_limits import check_examples, check_lengths
from lightrft.trainer.distill.checks import (
    check_distill,
    check_sources,
    check_taught,
    check_weights,
)
from lightrft.trainer.distill.data import (
    NamedTeacher,
    View,
    find_teachers,
    load_rows,
    load_views,
    shown_batch,
)
from lightrft.trainer.policy_run import PolicyRun
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.sft import load_validation
from lightrft.trainer.supervised import loaded_eval_prompts, supervised_policy
from lightrft.trainer.training_loop import TrainingRun, run_training
from lightrft.types import Batch, Prompt, Rollout
from lightrft.utils.errors import before_update, path_of
from lightrft.utils.seeding import derive_seed, torch_generator
from lightrft.utils.state_io import State
from lightrft.workers.local import (
    local_frozen,
    local_tokenizer,
    policy_scorer,
    self_teacher,
)
from lightrft.workers.served_teacher import ServedTeacher

Rows = list[Example] | list[Prompt]
"""Conversations, or prompts whose responses are all sampled."""


@dataclass(slots=True, kw_only=True)
class DistillRun(PolicyRun):
    """A distillation run, whose steps take rows of ``dataset``.

    The rows are conversations, or prompts if every step samples its responses. ``views`` has what
    teachers see, if it differs.
    """

    config: DistillVerbConfig
    dataset: SFTDataset | PromptDataset
    views: dict[str, View] = field(default_factory=dict)
    validation_views: dict[str, View] = field(default_factory=dict)

    def validate(self) -> Metrics:
        """Return the divergence from the teachers on the held-out responses."""
        config = self.config
        budget = config.train.micro_batch_tokens
        lessons = self.held_out(self.validation)
        return evaluate_distillation(self.roles, lessons, config.distill, budget)

    def held_out(self, dataset: SFTDataset) -> Iterator[Lesson]:
        """Yield the held-out responses in parts of ``batch_size``."""
        for examples in in_order(dataset, self.config.batch_size, self.roles.strategy.ranks):
            if not examples:
                continue
            prompts = [as_prompt(example) for example in examples]
            sources = [prompt.data_source for prompt in prompts]
            batch = examples_to_batch(examples)
            batch, shown = self.shown_batch(self.validation_views, prompts, batch)
            yield Lesson(batch, shown, sources)

    def begin(self) -> None:
        """Raise ``ConfigError`` if a row or a sampled response exceeds the context length."""
        check_context(self)

    @property
    def samples(self) -> bool:
        """See ``PolicyRun.samples``."""
        return bool(self.config.distill.on_policy)

    def train_step(self) -> Metrics:
        """Take one step on given responses, or on sampled ones."""
        config, timers = self.config, self.session.timers
        before = self.sampler.state_dict()
        try:
            with before_update():
                lesson, metrics, sampled = self.lesson(self.draw())
        except BaseException:
            self.sampler.load_state_dict(before)
            raise
        # Not before the responses: the state of a step that ends there must not have moved.
        update_reference(self.roles, config.distill, self.step)
        with timers("update"):
            budget = config.train.micro_batch_tokens
            metrics.merge(distill_step(self.roles, lesson, config.distill, budget))
        if sampled:
            self.show(sampled, Counter())
        return metrics

    def draw(self) -> Rows:
        """Return the next ``batch_size`` rows."""
        count = self.config.batch_size
        if isinstance(self.dataset, SFTDataset):
            return draw(self.dataset, self.sampler, count)
        return draw(self.dataset, self.sampler, count)

    def lesson(self, rows: Rows) -> tuple[Lesson, Metrics, list[Rollout]]:
        """Return what to learn on, metrics of sampled responses, and these responses.

        Raises ``GenerationInterrupted`` if the run is asked to stop while responses are sampled.
        """
        prompts = [as_prompt(row) for row in rows]
        examples = [row for row in rows if isinstance(row, Example)]
        # A dataset of prompts has no given responses.
        sampled = not examples or is_sampled(self.config, self.step)
        rollouts: list[Rollout] = []
        metrics = Metrics({"distill/on_policy": Mean(float(sampled))})
        if sampled:
            rollouts = self.sample(prompts)
            metrics.merge(sample_metrics(rollouts))
            batch = self.checked_batch(rollouts)
        else:
            batch = examples_to_batch(examples)
        sources = [prompt.data_source for prompt in prompts]
        batch, shown = self.shown_batch(self.views, prompts, batch)
        return Lesson(batch, shown, sources, not sampled), metrics, rollouts

    def sample(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Generate a response to each prompt by the current weights.

        Raises ``GenerationInterrupted`` if the run is asked to stop meanwhile.
        """
        config, session, roles = self.config, self.session, self.roles
        for prompt in prompts:  # conversations are stored as tokens
            prompt.text = prompt.text or str(roles.tokenizer.decode(prompt.token_ids))
        requests = requests_for(prompts, 1, config.run.seed, "distill", self.step)
        with roles.generation_mode():
            groups = generate_on_ranks(
                session.ranks,
                roles.engine,
                # The scorer of the run has rewards for the eval set alone.
                NullScorer(),
                requests,
                config.sampling,
                session.timers,
                lambda: bool(session.stop),
            )
        return [rollout for group in groups for rollout in group]

    def checked_batch(self, rollouts: Sequence[Rollout]) -> Batch:
        """Return ``rollouts`` as a batch, after a check of the engine's log-probs if it is due."""
        batch = collate([[rollout] for rollout in rollouts])
        config = self.config
        with self.session.timers("layout"):
            check_batch(self.roles, batch, config.sampling, config.engine, self.step)
        return batch

    def shown_batch(
        self, views: Mapping[str, View], prompts: Sequence[Prompt], batch: Batch
    ) -> tuple[Batch, Batch | None]:
        """Return ``batch`` and the same responses as the teachers see them.

        Args:
            views: What teachers see, by their names.
            prompts: The student's prompt of each response.
            batch: The responses after the student's prompts.
        """
        own = self.config.teachers
        names: list[str] = []
        for prompt in prompts:
            names.append(prompt.data_source if prompt.data_source in own else "")
        return shown_batch(views, self.dataset.encoder, prompts, names, batch)

    def state(self) -> State:
        """Return the state of the sampler, and of a teacher that has moved."""
        return {**TrainingRun.state(self), **reference_state(self.roles)}

    def load_state(self, state: State) -> None:
        """Restore the result of ``state``."""
        TrainingRun.load_state(self, state)
        load_reference_state(self.roles, state)


def is_sampled(config: DistillVerbConfig, step: int) -> bool:
    """Return True if the responses of ``step`` are sampled by the student.

    One choice holds for a whole step, as in GKD, arXiv 2306.13649, algorithm 1. It depends on the
    seed and the step alone, so a resumed run makes the same choices.
    """
    generator = torch_generator(derive_seed(config.run.seed, "on_policy", step))
    return float(torch.rand((), generator=generator)) < config.distill.on_policy


def as_prompt(row: Example | Prompt) -> Prompt:
    """Return the prompt of a conversation, which ends where its first trained response begins."""
    if isinstance(row, Prompt):
        return row
    return Prompt(row.id, row.prompt_ids, data_source=row.data_source, media=row.prompt_media)


def sample_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the mean length of sampled responses, and the share that the length limit cut."""
    metrics = Metrics()
    for rollout in rollouts:
        metrics.add("response/length", Mean(len(rollout)))
        metrics.add("response/clip_ratio", Mean(float(rollout.finish_reason == "length")))
    return metrics


def run_distill(config: DistillVerbConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    check_distill(config)
    return run_training(config, observer, partial(prepare, config))


def check_context(run: DistillRun) -> None:
    """Raise ``ConfigError`` if a row or a sampled response exceeds the model's context length."""
    config, dataset, roles = run.config, run.dataset, run.roles
    actor = roles.actor
    if run.validation is not None:
        check_examples(actor, run.validation.longest, config.max_tokens)
    longest = dataset.longest
    if isinstance(dataset, SFTDataset):
        check_examples(actor, dataset.longest, config.max_tokens)
        longest = dataset.longest_prompt
    if config.distill.on_policy:
        check_lengths(
            actor, roles.engine, config.engine, longest, config.sampling, "sampling", "data"
        )


def prepare(config: DistillVerbConfig, session: RunSession) -> DistillRun:
    """Load data and roles of a run, at step 0."""
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data.media)
    dataset = load_rows(config, tokenizer, processor)
    check_sources(config, dataset.data_sources)
    teachers = find_teachers(config, tokenizer, processor)
    views = load_views(config, config.data, dataset, teachers, processor)
    held = load_validation(config, tokenizer, processor, dataset)
    held_views: dict[str, View] = {}
    if held is not None:
        check_taught(config, held.data_sources, "validation")
        held_views = load_views(config, config.validation, held, teachers, processor)
    for key, rows in (("data", dataset), ("validation", held)):
        if isinstance(rows, SFTDataset):
            check_weights(config, rows, key)
    steps = config.train.count_steps(len(dataset), config.batch_size)
    prompts = loaded_eval_prompts(config, tokenizer, processor, session, dataset)
    asked = [prompts, dataset] if config.distill.on_policy else [prompts]
    return DistillRun(
        session=session,
        eval_prompts=prompts,
        roles=local_students_and_teachers(
            config, session, tokenizer, processor, steps, teachers, asked
        ),
        steps=steps,
        config=config,
        dataset=dataset,
        sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
        views=views,
        validation=held,
        validation_views=held_views,
    )


def local_students_and_teachers(
    config: DistillVerbConfig,
    session: RunSession,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    steps: int,
    teachers: Mapping[str, NamedTeacher],
    asked: Sequence[object],
) -> Roles:
    """Load the student and its teachers.

    Args:
        config: settings of the run.
        session: gives the ranks.
        tokenizer: tokenizer of the student.
        processor: prepares media, or None for a text-only model.
        steps: number of steps of the run.
        teachers: the teachers by the data source that they teach, "" for all others.
        asked: rows that the student responds to.
    """
    strategy, actor, engine = supervised_policy(config, session, tokenizer, asked)
    policy = TrainableModel(actor, strategy.prepare(actor, config.optimizer, steps))
    loaded: dict[str, Reference] = {}
    for name, own in teachers.items():
        if own.settings.url is not None:
            loaded[name] = ServedTeacher.of(own.settings, own.key, len(tokenizer))
        else:
            with path_of(f"{own.key}.path"):
                loaded[name] = FrozenModel(local_frozen(own.model, strategy))
    return Roles(
        strategy=strategy,
        policy=policy,
        engine=engine,
        scorer=policy_scorer(config.reward, config.model, tokenizer, strategy.device),
        tokenizer=tokenizer,
        processor=processor,
        reference=None if teachers else self_teacher(config, policy, strategy),
        teacher=loaded.pop("", None),
        teachers=loaded,
    )
