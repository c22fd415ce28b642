"""Explain the objective of any settings that train."""

from __future__ import annotations

from collections.abc import Mapping

from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    IterateConfig,
    PRMVerbConfig,
    RLConfig,
    RMConfig,
    TrainingConfig,
)
from lightrft.trainer.explanation.explain import Explanation


def explained(config: TrainingConfig | IterateConfig, sources: Mapping[str, str]) -> Explanation:
    """Explain the objective of ``config``. ``sources`` gives the file or argument of each key.

    Raises ``ConfigError`` for settings that cannot work.
    """
    # Each kind imports more than the others need.
    if isinstance(config, RLConfig):
        from lightrft.trainer.checks.check_rollout import check_algorithm
        from lightrft.trainer.explanation.explain import explain

        check_algorithm(config)
        return explain(config, sources)
    if isinstance(config, IterateConfig):
        from lightrft.trainer.explanation.explain_iterate import explain_iterate

        return explain_iterate(config, sources)
    if isinstance(config, DistillVerbConfig):
        from lightrft.trainer.explanation.explain_distill import explain_distillation

        return explain_distillation(config, sources)
    if isinstance(config, RMConfig):
        from lightrft.algorithms.reward_model.compatibility import check_reward_model
        from lightrft.trainer.explanation.explain_reward_model import explain_reward_model

        check_reward_model(config.reward_model)
        return explain_reward_model(config, sources)
    if isinstance(config, PRMVerbConfig):
        from lightrft.algorithms.process_reward.objective import check_process_model
        from lightrft.trainer.explanation.explain_reward_model import explain_process_model

        check_process_model(config.process_model)
        return explain_process_model(config, sources)
    from lightrft.trainer.explanation.explain_supervised import explain_supervised

    if isinstance(config, DPOConfig):
        from lightrft.algorithms.preference.compatibility import check_preference

        check_preference(config.preference)
    return explain_supervised(config, sources)
