"""Evaluate a generative reward model: the settings of ``lightrft eval`` that do so."""

from __future__ import annotations

from lightrft.config.base import changed_fields
from lightrft.config.data import Columns, DataConfig
from lightrft.config.reward_model.judgement import JudgementConfig
from lightrft.config.rollout import EvalConfig
from lightrft.config.verbs import AGREEMENT, EvalRMConfig, EvaluateConfig, JudgeTrainingConfig
from lightrft.utils.errors import ConfigError

OF_HEADS = ("head", "max_tokens", "batch_size", "max_tokens_per_micro_batch", "best_of", "worst")
"""Settings of ``eval-rm`` that only a model with heads reads."""


def asked(judgement: JudgementConfig) -> JudgementConfig:
    """Return the questions of an evaluation: in both orders, and ratings where none is the best."""
    found = JudgeTrainingConfig(judgement=judgement).held_out
    if found.form not in ("best", "rating"):
        return found
    return found.model_copy(update={"rate_best": True})


def as_evaluation(config: EvalRMConfig) -> EvaluateConfig:
    """Return the settings of ``lightrft eval`` that evaluate a generative reward model.

    Comparisons are asked in both orders.

    Args:
        config: Settings of ``lightrft eval-rm``, with ``judgement``.

    Raises:
        ConfigError: A setting is given that only a model with heads reads.
    """
    assert config.judgement is not None
    columns = config.data.columns
    unread = [name for name in changed_fields(config) if name in OF_HEADS]
    unread += [
        f"data.columns.{n}" for n in changed_fields(columns) if n not in Columns.model_fields
    ]
    if unread:
        raise ConfigError(
            f"{', '.join(sorted(unread))}: read for a model with heads, and judgement is set; "
            "leave them out"
        )
    names = DataConfig.model_fields.keys() - {"columns", "judgement"}
    given = {name: getattr(config.data, name) for name in names}
    given["columns"] = Columns(**{name: getattr(columns, name) for name in Columns.model_fields})
    given["judgement"] = asked(config.judgement)
    evaluation = EvalConfig(data=DataConfig(**given), sampling=config.sampling)
    return EvaluateConfig(
        run=config.run,
        model=config.model,
        eval=evaluation,
        reward=AGREEMENT,
        strategy=config.strategy,
    )
