"""Train a process reward model on responses whose steps have labels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.process_reward.objective import check_process_model
from lightrft.config.data import ProcessDataConfig
from lightrft.config.verbs import PRMVerbConfig
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.row_warnings import check_rows, check_steps
from lightrft.datasets.sampler import report
from lightrft.learner.reward_model.process import (
    ProcessModelSettings,
    evaluate_process_model,
    process_model_step,
)
from lightrft.models.processors import Processor
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import Separator
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.trainer.checks.preflight import check_trained_weights
from lightrft.trainer.process_model.results import write_step_report
from lightrft.trainer.reward_model.base import (
    WORST,
    ScoredUnit,
    ScoringModelRun,
    run_scoring_model,
)
from lightrft.trainer.reward_model.checks import unmeasured_best, unread_evaluation
from lightrft.trainer.supervised import check_sources, check_unread
from lightrft.utils.errors import ConfigError

METRICS = (
    *("loss", "step_accuracy", "response_accuracy", "step_calibration_error"),
    *("process_bench_f1", "process_bench_wrong", "process_bench_right"),
)
"""Metrics of held-out rows, under ``eval/`` or ``eval/<source>/``."""
LESS_IS_BETTER = ("loss", "step_calibration_error")
"""Metrics that fall while a model learns."""


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
    if data.separator != config.data.separator:
        # The model scores one separator.
        data = data.model_copy(update={"separator": config.data.separator})
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


def load_model(
    config: PRMVerbConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: ProcessDataset,
    device: torch.device,
) -> ProcessRewardModel:
    """Load the model to train.

    Args:
        config: Settings of the run.
        tokenizer: Tokenizer of the model.
        dataset: The responses with labelled steps.
        device: Device of the weights.
    """
    data = config.data
    return ProcessRewardModel.load(
        config.model,
        config.process_model,
        separator=Separator(data.separator, tuple(dataset.separator_ids), data.special_tokens),
        verdicts=verdict_tokens(config, tokenizer),
        device=device,
        seed=config.run.seed,
    )


def step_settings(config: PRMVerbConfig, dataset: ProcessDataset) -> ProcessModelSettings:
    """See ``ScoredUnit.settings``."""
    budget = config.train.micro_batch_tokens
    return ProcessModelSettings(config.process_model, budget, dataset.data_sources)


def copied(run: ScoringModelRun) -> ProcessRewardModel:
    """See ``ScoredUnit.copy``."""
    config, model = run.config, run.model.model
    return ProcessRewardModel.load(
        config.model,
        config.process_model,
        separator=model.separator,
        verdicts=model.verdicts,
        seed=config.run.seed,
    )


def write_report(run: ScoringModelRun) -> None:
    """See ``ScoredUnit.write_report``."""
    assert isinstance(run.validation, ProcessDataset)
    threshold = run.config.process_model.threshold
    write_step_report(run.session.path, run.validation, run.scores, threshold, worst=WORST)


STEPS = ScoredUnit(
    load_rows=load_steps,
    load_model=load_model,
    settings=step_settings,
    step=process_model_step,
    evaluate=evaluate_process_model,
    copy=copied,
    write_report=write_report,
)


def run_process_model(config: PRMVerbConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    check(config)
    return run_scoring_model(STEPS, config, observer)
