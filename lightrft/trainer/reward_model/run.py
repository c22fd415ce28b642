"""Train a reward model on compared, ranked or rated responses."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.reward_model.requirements import reward_requirements
from lightrft.config.data import RewardDataConfig
from lightrft.config.verbs import RMConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import report
from lightrft.learner.reward_model.evaluation import evaluate_reward_model, normalize_scores
from lightrft.learner.reward_model.step import RewardModelSettings, reward_model_step
from lightrft.models.processors import Processor
from lightrft.models.reward.reward_model import RewardModel
from lightrft.observability.observer import Observer
from lightrft.observability.trackers import Summary
from lightrft.trainer.reward_model.base import (
    WORST,
    ScoredUnit,
    ScoringModelRun,
    run_scoring_model,
)
from lightrft.trainer.reward_model.checks import (
    check,
    check_signs,
    check_start,
    labelled_heads,
    rating_ranges,
    reads_ties,
)
from lightrft.trainer.reward_model.results import write_report_data


def load_examples(
    config: RMConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    data: RewardDataConfig,
    key: str,
) -> PreferenceDataset:
    """Return the examples of ``data``.

    Args:
        config: Settings of the run.
        tokenizer: Encodes the rows.
        processor: Prepares media, or None for a text-only model.
        data: Settings of the rows.
        key: Key of ``data``, for messages.

    Raises:
        DataError: A row lacks what the losses read, or ``check_signs`` finds a problem.
    """
    requirements = reward_requirements(config.reward_model)
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


def load_model(
    config: RMConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: PreferenceDataset,
    device: torch.device,
) -> RewardModel:
    """Load the model to train.

    Args:
        config: Settings of the run.
        tokenizer: Tokenizer of the model.
        dataset: The compared or labelled responses.
        device: Device of the weights.
    """
    seed = config.run.seed
    model = RewardModel.load(config.model, config.reward_model, device=device, seed=seed)
    check_start(model, config)
    return model


def step_settings(config: RMConfig, dataset: PreferenceDataset) -> RewardModelSettings:
    """See ``ScoredUnit.settings``."""
    budget = config.train.micro_batch_tokens
    return RewardModelSettings(config.reward_model, budget, dataset.heads, dataset.data_sources)


def copied(run: ScoringModelRun) -> RewardModel:
    """See ``ScoredUnit.copy``."""
    config, model = run.config, run.model.model
    copy = RewardModel.load(config.model, config.reward_model, seed=config.run.seed)
    names = copy.score_names
    copy.set_normalization(
        dict(zip(names, model.score_mean.tolist(), strict=True)),
        dict(zip(names, model.score_std.tolist(), strict=True)),
    )
    return copy


def normalize(run: ScoringModelRun) -> None:
    """See ``ScoredUnit.normalize``. Scores of held-out examples count, if there are any."""
    rows = run.validation or run.dataset
    assert isinstance(rows, PreferenceDataset)
    normalize_scores(run.placed, run.model, rows, run.settings_for(rows), run.config.batch_size)


def write_report(run: ScoringModelRun) -> None:
    """See ``ScoredUnit.write_report``."""
    assert isinstance(run.validation, PreferenceDataset)
    head = run.settings.heads[0]
    write_report_data(run.session.path, run.validation, run.scores, head, worst=WORST)


RESPONSES = ScoredUnit(
    load_rows=load_examples,
    load_model=load_model,
    settings=step_settings,
    step=reward_model_step,
    evaluate=evaluate_reward_model,
    copy=copied,
    normalize=normalize,
    write_report=write_report,
)


def run_reward_model(config: RMConfig, observer: Observer | None = None) -> Summary:
    """Train as configured and return the content of ``summary.json``."""
    check(config)
    return run_scoring_model(RESPONSES, config, observer)
