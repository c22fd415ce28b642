"""Train a process reward model on responses whose steps have labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.process_reward.objective import check_process_model
from lightrft.algorithms.process_reward.quality import ScoredSteps
from lightrft.config.data import ProcessDataConfig
from lightrft.config.verbs import PRMVerbConfig
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.row_warnings import check_rows, check_steps
from lightrft.datasets.sampler import PromptSampler, draw, report
from lightrft.learner.process_model.evaluation import evaluate_process_model
from lightrft.learner.process_model.step import (
    ProcessModelSettings,
    process_model_step,
    process_to_batch,
)
from lightrft.learner.sft_step import with_sources
from lightrft.models.processors import Processor, load_processor
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import Separator
from lightrft.observability.metrics import Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.roles import TrainableModel
from lightrft.trainer.checks.preflight import check_enough, check_trained_weights
from lightrft.trainer.process_model.results import write_step_report
from lightrft.trainer.reward_model.base import WORST, ScoringModelRun
from lightrft.trainer.reward_model.checks import unmeasured_best, unread_evaluation
from lightrft.trainer.reward_model.export import SavedParts, export
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.supervised import check_sources, check_unread
from lightrft.trainer.training_loop import run_training
from lightrft.utils.errors import ConfigError
from lightrft.workers.local import local_tokenizer, strategy_of

METRICS = (
    *("loss", "step_accuracy", "response_accuracy", "step_calibration_error"),
    *("process_bench_f1", "process_bench_wrong", "process_bench_right"),
)
"""Metrics of held-out rows, under ``eval/`` or ``eval/<source>/``."""
LESS_IS_BETTER = ("loss", "step_calibration_error")
"""Metrics that fall while a model learns."""


@dataclass(slots=True, kw_only=True)
class ProcessModelRun(ScoringModelRun[PRMVerbConfig, ProcessDataset, ProcessRewardModel]):
    """A run of ``lightrft prm``.

    Attributes:
        settings: Settings of a step.
        scores: Scores of the held-out responses at the last evaluation.
    """

    settings: ProcessModelSettings
    scores: list[ScoredSteps] = field(default_factory=list)

    def train_step(self) -> Metrics:
        """Take one step on the next ``batch_size`` examples."""
        examples = draw(self.dataset, self.sampler, self.config.batch_size)
        batch = process_to_batch(examples, self.config.process_model.last_step_only)
        batch = with_sources(batch, examples, self.settings.sources)
        with self.session.timers("update"):
            return process_model_step(self.placed, self.model, batch, self.settings)

    def validate(self) -> Metrics:
        """Return the loss of the held-out examples and the accuracy of their steps."""
        if self.validation is None:
            return Metrics()
        settings = replace(self.settings, sources=self.validation.data_sources)
        found = evaluate_process_model(
            self.placed, self.model, self.validation, settings, self.config.batch_size
        )
        self.scores = found.responses
        return found.metrics

    def copied(self) -> ProcessRewardModel:
        """See ``ScoringModelRun.copied``."""
        config, model = self.config, self.model.model
        return ProcessRewardModel.load(
            config.model,
            config.process_model,
            separator=model.separator,
            verdicts=model.verdicts,
            seed=config.run.seed,
        )

    def export(self) -> int:
        """Write the process reward model as a folder ``model/`` and return its step."""
        config = self.config
        step = export(self, self.model, self.parts, self.copied)
        dataset = self.validation
        if dataset is not None:
            threshold = config.process_model.threshold

            def write() -> None:
                folder = self.session.path
                write_step_report(folder, dataset, self.scores, threshold, worst=WORST)

            self.write_scores(bool(self.scores), write)
        return step


def run_process_model(config: PRMVerbConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    check(config)
    return run_training(config, observer, partial(prepare, config))


def check(config: PRMVerbConfig) -> None:
    """Raise ``ConfigError`` for problems that can be found without a model or data."""
    check_sources(config)
    check_trained_weights(config.model)
    check_unread(config)
    check_process_model(config.process_model)
    problems = [*unread_evaluation(config), *unmeasured_best(config, METRICS, LESS_IS_BETTER)]
    problems += _separator(config)
    if problems:
        raise ConfigError("\n".join(problems))


def _separator(config: PRMVerbConfig) -> Iterator[str]:
    own, held = config.data.separator, config.validation.separator
    if held not in (own, type(config.validation)().separator):
        yield (
            f"validation.separator = {held!r} and data.separator = {own!r}: the model scores one "
            "separator; leave validation.separator out"
        )


def prepare(config: PRMVerbConfig, session: RunSession) -> ProcessModelRun:
    """Load data and model of a run, at step 0.

    Args:
        config: Settings of the run.
        session: Folder, metrics and timers of the run.
    """
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data.media)
    load = partial(load_steps, config, tokenizer, processor)
    dataset = load(config.data, "data")
    validation = None
    if config.validation.sources:
        separator = {"separator": config.data.separator}
        validation = load(config.validation.model_copy(update=separator), "validation")
    check_enough("batch_size", config.batch_size, len(dataset), "examples")
    steps = config.train.count_steps(len(dataset), config.batch_size)
    verdicts = verdict_tokens(config, tokenizer)
    strategy = strategy_of(config.strategy, session.ranks)
    with strategy.loading() as device:
        model = ProcessRewardModel.load(
            config.model,
            config.process_model,
            separator=Separator(
                config.data.separator, tuple(dataset.separator_ids), config.data.special_tokens
            ),
            verdicts=verdicts,
            device=device,
            seed=config.run.seed,
        )
    return ProcessModelRun(
        session=session,
        seed=config.run.seed,
        steps=steps,
        config=config,
        settings=ProcessModelSettings(
            config.process_model, config.train.micro_batch_tokens, dataset.data_sources
        ),
        placed=strategy,
        model=TrainableModel(model, strategy.prepare(model, config.optimizer, steps)),
        parts=SavedParts(tokenizer, processor),
        dataset=dataset,
        validation=validation,
        sampler=PromptSampler(len(dataset), config.run.seed, config.data.shuffle),
    )


def load_steps(
    config: PRMVerbConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    data: ProcessDataConfig,
    key: str,
) -> ProcessDataset:
    """Return the examples of ``data``.

    Args:
        config: Settings of the run.
        tokenizer: Encodes the rows.
        processor: Prepares media, or None for a text-only model.
        data: Settings of the rows.
        key: Key of ``data``, for messages.

    Raises:
        DataError: A row cannot be used, or no example is left.
    """
    dataset = ProcessDataset(
        data,
        tokenizer,
        max_tokens=config.max_tokens,
        seed=config.run.seed,
        processor=processor,
    )
    report(key, dataset.counts, dataset.first_problem)
    check_rows(dataset, f"{key}.sources")
    check_steps(dataset, key)
    return dataset


def verdict_tokens(
    config: PRMVerbConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int] | None:
    """Return the ids of the tokens of a right and of a wrong step; ``None`` for other heads.

    Raises ``ConfigError`` if one is not a single token.
    """
    settings = config.process_model
    if settings.head != "tokens":
        return None
    found = []
    for name in ("right", "wrong"):
        text = getattr(settings, name)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            raise ConfigError(
                f"process_model.{name} = {text!r} is {len(ids)} tokens {ids} of the tokenizer, "
                "not one; give one of its tokens"
            )
        found.append(ids[0])
    return found[0], found[1]
