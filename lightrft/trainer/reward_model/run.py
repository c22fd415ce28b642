"""Train a reward model on compared, ranked or rated responses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.reward_model.quality import ScoredPrompt
from lightrft.algorithms.reward_model.requirements import RewardRequirements
from lightrft.config.data import RewardDataConfig
from lightrft.config.verbs import RMConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import PromptSampler, draw, report
from lightrft.learner.preference_examples import preference_to_batch
from lightrft.learner.reward_model.evaluation import evaluate_reward_model, normalize_scores
from lightrft.learner.reward_model.step import RewardModelSettings, reward_model_step
from lightrft.learner.sft_step import with_sources
from lightrft.models.processors import Processor, load_processor
from lightrft.models.reward.reward_model import RewardModel
from lightrft.observability.metrics import Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.roles import TrainableModel
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.reward_model.base import WORST, ScoringModelRun
from lightrft.trainer.reward_model.checks import (
    check,
    check_signs,
    check_start,
    labelled_heads,
    rating_ranges,
    reads_ties,
)
from lightrft.trainer.reward_model.export import SavedParts, export
from lightrft.trainer.reward_model.results import write_report_data
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.training_loop import run_training
from lightrft.workers.local import local_tokenizer, strategy_of


@dataclass(slots=True, kw_only=True)
class RewardModelRun(ScoringModelRun[RMConfig, PreferenceDataset, RewardModel]):
    """A run of ``lightrft rm``.

    Attributes:
        settings: Settings of a step.
        scores: Scores of the held-out examples at the last evaluation.
    """

    settings: RewardModelSettings
    scores: list[ScoredPrompt] = field(default_factory=list)

    def train_step(self) -> Metrics:
        """Take one step on the next ``batch_size`` examples."""
        examples = draw(self.dataset, self.sampler, self.config.batch_size)
        batch = with_sources(
            preference_to_batch(examples, self.settings.heads), examples, self.settings.sources
        )
        with self.session.timers("update"):
            return reward_model_step(self.placed, self.model, batch, self.settings)

    def validate(self) -> Metrics:
        """Return the loss of the held-out examples and the accuracy of their order."""
        if self.validation is None:
            return Metrics()
        settings = replace(self.settings, sources=self.validation.data_sources)
        found = evaluate_reward_model(
            self.placed, self.model, self.validation, settings, self.config.batch_size
        )
        self.scores = found.prompts
        return found.metrics

    def copied(self) -> RewardModel:
        """See ``ScoringModelRun.copied``."""
        config, model = self.config, self.model.model
        copy = RewardModel.load(config.model, config.reward_model, seed=config.run.seed)
        names = copy.score_names
        copy.set_normalization(
            dict(zip(names, model.score_mean.tolist(), strict=True)),
            dict(zip(names, model.score_std.tolist(), strict=True)),
        )
        return copy

    def export(self) -> int:
        """Write the reward model as a folder ``model/`` and return its step."""

        def normalize(model: TrainableModel[RewardModel]) -> None:
            rows = self.validation or self.dataset
            settings = replace(self.settings, sources=rows.data_sources)
            normalize_scores(self.placed, model, rows, settings, self.config.batch_size)

        step = export(self, self.model, self.parts, self.copied, normalize)
        dataset, head = self.validation, self.settings.heads[0]
        if dataset is not None:

            def write() -> None:
                write_report_data(self.session.path, dataset, self.scores, head, worst=WORST)

            self.write_scores(bool(self.scores), write)
        return step


def run_reward_model(config: RMConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    requirements = check(config)
    return run_training(config, observer, partial(prepare, config, requirements))


def prepare(
    config: RMConfig, requirements: RewardRequirements, session: RunSession
) -> RewardModelRun:
    """Load data and model of a run, at step 0.

    Args:
        config: Settings of the run.
        requirements: What the losses read.
        session: Folder, metrics and timers of the run.
    """
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data.media)
    load = partial(load_examples, config, requirements, tokenizer, processor)
    dataset = load(config.data, "data")
    validation = load(config.validation, "validation") if config.validation.sources else None
    check_enough("batch_size", config.batch_size, len(dataset), "examples")
    steps = config.train.count_steps(len(dataset), config.batch_size)
    strategy = strategy_of(config.strategy, session.ranks)
    with strategy.loading() as device:
        model = RewardModel.load(
            config.model, config.reward_model, device=device, seed=config.run.seed
        )
    check_start(model, config)
    return RewardModelRun(
        session=session,
        seed=config.run.seed,
        steps=steps,
        config=config,
        settings=RewardModelSettings(
            config.reward_model,
            config.train.micro_batch_tokens,
            dataset.heads,
            dataset.data_sources,
        ),
        placed=strategy,
        model=TrainableModel(model, strategy.prepare(model, config.optimizer, steps)),
        parts=SavedParts(tokenizer, processor),
        dataset=dataset,
        validation=validation,
        sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
    )


def load_examples(
    config: RMConfig,
    requirements: RewardRequirements,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    data: RewardDataConfig,
    key: str,
) -> PreferenceDataset:
    """Return the examples of ``data``.

    Args:
        config: Settings of the run.
        requirements: What the losses read.
        tokenizer: Encodes the rows.
        processor: Prepares media, or None for a text-only model.
        data: Settings of the rows.
        key: Key of ``data``, for messages.

    Raises:
        DataError: A row lacks what the losses read, or ``check_signs`` finds a problem.
    """
    # in the order of the settings, since rows without names label the first one
    heads = labelled_heads(config.reward_model, requirements)
    dataset = PreferenceDataset(
        data,
        tokenizer,
        kind="ranked" if heads[0] in requirements.ranks else "rated",
        max_tokens=config.max_tokens,
        seed=config.run.seed,
        processor=processor,
        heads=heads,
        keep_ties=reads_ties(config.reward_model),
        rating_range=rating_ranges(config.reward_model),
    )
    report(key, dataset.counts, dataset.first_problem)
    if requirements.margins:
        dataset.require("margin")
    check_signs(dataset, config.reward_model, key)
    check_rows(dataset, f"{key}.sources")
    return dataset
