"""Define the parts that preference learning on given and on sampled responses share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.preference.reference_source import Source
from lightrft.algorithms.preference.requirements import PreferenceRequirements
from lightrft.config.data import PreferenceDataConfig
from lightrft.config.verbs import DPOConfig
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import report
from lightrft.learner.preference_batch import PreferenceStats
from lightrft.learner.preference_step import PreferenceSettings, evaluate_preferences
from lightrft.learner.reference_cache import ReferenceLogprobs
from lightrft.learner.reference_update import load_reference_state, reference_state
from lightrft.models.processors import Processor
from lightrft.observability.metrics import Metrics
from lightrft.roles import Roles, TrainableModel
from lightrft.trainer.policy_run import PolicyRun
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.supervised import supervised_policy
from lightrft.utils.errors import ConfigError
from lightrft.utils.state_io import State
from lightrft.workers.local import (
    check_tokenizers,
    policy_scorer,
    preference_reference,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PreferenceRun(PolicyRun):
    """A run of preference learning.

    Attributes:
        settings: Settings of a step.
        source: Where the reference's log-probs come from.
        stats: Numbers that carry over between steps.
        validation_logprobs: The reference's log-probs of ``validation``, if they are kept.
    """

    config: DPOConfig
    settings: PreferenceSettings
    source: Source
    stats: PreferenceStats = field(default_factory=PreferenceStats)
    validation_logprobs: ReferenceLogprobs | None = None

    def validate(self) -> Metrics:
        """Return the loss of the held-out examples and the accuracy of their order."""
        return evaluate_preferences(
            self.roles,
            self.validation,
            self.settings,
            self.stats,
            self.config.batch_size,
            self.validation_logprobs,
        )

    def carried(self) -> State:
        """Return the state of the running numbers and of a moving reference."""
        return {"preference": self.stats.state_dict(), **reference_state(self.roles)}

    def load_carried(self, state: State) -> None:
        """Restore the result of ``carried``."""
        self.stats.load_state_dict(state["preference"])
        load_reference_state(self.roles, state)


def preference_settings(
    config: DPOConfig, requirements: PreferenceRequirements, sources: Sequence[str] = ()
) -> PreferenceSettings:
    """Return the settings of a step.

    Args:
        config: Settings of the run.
        requirements: What the losses read.
        sources: Names of the data sources, for metrics.
    """
    return PreferenceSettings(
        config.preference,
        requirements,
        config.train.micro_batch_tokens,
        config.run.seed,
        sources,
    )


def load_preferences(
    config: DPOConfig,
    data: PreferenceDataConfig,
    key: str,
    requirements: PreferenceRequirements,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
) -> PreferenceDataset:
    """Return the examples of ``data``.

    Args:
        config: Settings of the run.
        data: Settings of the rows.
        key: Key of ``data``, for messages.
        requirements: What the losses read.
        tokenizer: Encodes the rows.
        processor: Prepares media, or None for a text-only model.

    Raises:
        DataError: A row lacks what the losses read.
        ConfigError: The rows do not fit the losses.
    """
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
    check_rows(dataset, f"{key}.sources")
    check_columns(dataset, requirements)
    return dataset


def load_validation(
    config: DPOConfig,
    requirements: PreferenceRequirements,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
) -> PreferenceDataset | None:
    """Return the held-out examples, or None without sources.

    Args:
        config: Settings of the run.
        requirements: What the losses read.
        tokenizer: Encodes the rows.
        processor: Prepares media, or None for a text-only model.
    """
    data = config.validation
    if not data.sources:
        return None
    return load_preferences(config, data, "validation", requirements, tokenizer, processor)


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


def load_roles(
    config: DPOConfig,
    source: Source,
    session: RunSession,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
    steps: int,
    asked: Sequence[object],
) -> Roles:
    """Load the policy and its reference.

    Args:
        config: Settings of the run.
        source: Where the reference's log-probs come from.
        session: Gives the ranks.
        tokenizer: Tokenizer of the policy.
        processor: Prepares media, or None for a text-only model.
        steps: Number of steps of the run.
        asked: Prompts that the policy responds to.
    """
    log.info("preference.reference.source: %s", source)
    check_tokenizers(config, tokenizer)
    strategy, actor, engine = supervised_policy(config, session, tokenizer, asked)
    policy = TrainableModel(actor, strategy.prepare(actor, config.optimizer, steps))
    return Roles(
        strategy=strategy,
        policy=policy,
        reference=preference_reference(config, source, policy, strategy),
        engine=engine,
        scorer=policy_scorer(config.reward, config.model, tokenizer, strategy.device),
        tokenizer=tokenizer,
        processor=processor,
    )
