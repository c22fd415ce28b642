"""A run whose model learns from labelled rows, and is measured on held-out ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.verbs import PRMVerbConfig, RMConfig
from lightrft.datasets.encoded_dataset import EncodedDataset
from lightrft.datasets.sampler import PromptSampler, draw
from lightrft.distributed.process_group import run_on_all_ranks
from lightrft.models.lora import can_merge
from lightrft.models.processors import Processor, load_processor
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.training_mode import evaluation_mode
from lightrft.observability.metrics import Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.training_loop import (
    TrainingRun,
    run_training,
    with_whole_weights,
)
from lightrft.utils.atomic_files import whole_folder
from lightrft.workers.local import local_tokenizer, strategy_of

log = logging.getLogger(__name__)

WORST = 20
"""Number of held-out pairs or responses in the report that are judged worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredUnit:
    """The unit that a reward model scores, a response or a step, and how it is trained.

    Attributes:
        load_rows: Reads examples, from settings of the run, tokenizer, processor, settings of the
            rows and their key.
        load_model: Loads the model to start from, from settings of the run, tokenizer, examples and
            device.
        settings: Builds the settings of a step, from settings of the run and examples.
        step: Takes a step, from strategy, model, batch and settings.
        evaluate: Returns the metrics and the scores of examples, from strategy, model, examples,
            settings and batch size.
        copy: Loads a copy, on the CPU, of the model that a run started from.
        normalize: Sets the mean and the deviation of the scores of the model of a run.
        write_report: Writes the scores of the held-out examples of a run for the report.
    """

    load_rows: Callable[..., Any]
    load_model: Callable[..., Any]
    settings: Callable[..., Any]
    step: Callable[..., Metrics]
    evaluate: Callable[..., tuple[Metrics, list[Any]]]
    copy: Callable[[ScoringModelRun], Any]
    normalize: Callable[[ScoringModelRun], None] | None = None
    write_report: Callable[[ScoringModelRun], None]


@dataclass(slots=True, kw_only=True)
class ScoringModelRun(TrainingRun):
    """A run whose steps take examples of ``dataset``.

    Attributes:
        unit: What the model scores.
        placed: Places and updates the model.
        model: The model with its optimizer.
        settings: Settings of a step.
        tokenizer: Saved with the model.
        processor: Prepares media and is saved, or None for a text-only model.
        scores: Scores of the held-out examples at the last evaluation.
    """

    unit: ScoredUnit
    placed: Strategy
    model: TrainableModel
    settings: Any
    tokenizer: PreTrainedTokenizerBase
    processor: Processor | None
    scores: list[Any] = field(default_factory=list)

    @property
    def strategy(self) -> Strategy:
        """See ``TrainingRun.strategy``."""
        return self.placed

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """See ``TrainingRun.trained``."""
        return {"reward_model": self.model}

    def train_step(self) -> Metrics:
        """Take one step on the next ``batch_size`` examples."""
        batch = self.settings.batch(draw(self.dataset, self.sampler, self.config.batch_size))
        with self.session.timers("update"):
            return self.unit.step(self.placed, self.model, batch, self.settings)

    def validate(self) -> Metrics:
        """Return the loss of the held-out examples, and how well they are judged."""
        settings = self.settings_for(self.validation)
        metrics, self.scores = self.unit.evaluate(
            self.placed, self.model, self.validation, settings, self.config.batch_size
        )
        return metrics

    def settings_for(self, dataset: EncodedDataset[Any]) -> Any:
        """Return the settings of an evaluation of ``dataset``."""
        return replace(self.settings, sources=dataset.data_sources)

    def export(self) -> int:
        """Write the reward model as a folder ``model/`` and return its step.

        It is the best checkpoint if the run names a metric, else the current model.
        """
        best, step = self.session.best_checkpoint(self.step)
        if best is not None:
            self.model.load(self.placed, best / "reward_model")
        if self.unit.normalize is not None:
            self.unit.normalize(self)
        self.write_model(self.session.path / "model")
        if self.validation is None:
            return step
        if not self.scores:
            # A run that resumes at its end has no evaluation yet.
            with evaluation_mode(self.model.model):
                self.validate()
        ranks = self.session.ranks
        run_on_all_ranks(ranks, lambda: None if ranks.rank else self.unit.write_report(self))
        return step

    def write_model(self, path: Path) -> None:
        """See ``TrainingRun.write_model``. Sharded weights are gathered into a copy on rank 0."""
        with_whole_weights(self, lambda: self.unit.copy(self), partial(self.write, path=path))

    def write(self, model: RewardModel | ProcessRewardModel, path: Path) -> None:
        """Write ``model`` to the folder ``path``, atomically.

        Adapters are added into the weights. On quantised weights, the folder holds the adapters
        alone.
        """
        merge = can_merge(model)
        if not merge:
            log.warning(
                "the weights are quantised, so %s holds the heads and the adapters alone; they are "
                "read together with the model that training started from",
                path,
            )
        with whole_folder(path) as temporary:
            model.save(self.tokenizer, temporary, self.processor, merge=merge)


def run_scoring_model(
    unit: ScoredUnit, config: RMConfig | PRMVerbConfig, observer: Observer | None
) -> Summary:
    """Train as configured and return the content of ``summary.json``.

    Args:
        unit: What the model scores.
        config: Settings of the run.
        observer: Shows the progress. None shows none.
    """

    def prepare(session: RunSession) -> ScoringModelRun:
        """Load data and model of a run, at step 0."""
        tokenizer = local_tokenizer(config.model)
        processor = load_processor(config.model, tokenizer, config.data.media)
        load = partial(unit.load_rows, config, tokenizer, processor)
        dataset = load(config.data, "data")
        validation = load(config.validation, "validation") if config.validation.sources else None
        check_enough("batch_size", config.batch_size, len(dataset), "examples")
        steps = config.train.count_steps(len(dataset), config.batch_size)
        strategy = strategy_of(config.strategy, session.ranks)
        with strategy.loading() as device:
            model = unit.load_model(config, tokenizer, dataset, device)
        return ScoringModelRun(
            session=session,
            steps=steps,
            config=config,
            unit=unit,
            settings=unit.settings(config, dataset),
            placed=strategy,
            model=TrainableModel(model, strategy.prepare(model, config.optimizer, steps)),
            tokenizer=tokenizer,
            processor=processor,
            dataset=dataset,
            validation=validation,
            sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
        )

    return run_training(config, observer, prepare)
