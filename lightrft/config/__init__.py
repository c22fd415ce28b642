"""The settings of a run, one file per section.

Classes of sections are imported on first use: ``from lightrft.config import OptimizerConfig``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "algorithm": ("AlgorithmConfig",),
    "config_tools": ("ShowConfig",),
    "data": (
        *("DataConfig", "MediaConfig", "PreferenceDataConfig", "ProcessDataConfig"),
        *("RewardDataConfig", "SFTDataConfig"),
    ),
    "engine": ("EngineConfig",),
    "generation.serving": ("BatchingConfig", "HTTPConfig"),
    "launch": ("LaunchConfig",),
    "model": (
        *("MergeInput", "ModelConfig", "PolicyModelConfig", "SupervisedModelConfig"),
        "TrainedModelConfig",
    ),
    "preference.sections": ("KTOPreferenceConfig", "OnlineConfig", "PreferenceConfig"),
    "reward": ("RewardConfig",),
    "reward_model.judgement": ("JudgementConfig",),
    "reward_model.sections": ("ProcessModelConfig", "RewardModelConfig", "ValidationTimesConfig"),
    "rollout": ("EvalConfig", "RolloutConfig", "SelectConfig", "StepLabelsConfig"),
    "run": ("CheckpointConfig", "HubConfig", "LogConfig", "RunConfig"),
    "strategy": ("OptimizerConfig", "SamplingConfig", "StrategyConfig"),
    "train": (
        *("CriticConfig", "DistillTeacherConfig", "DistillationConfig", "PRMConfig", "PtxConfig"),
        *("RLTrainConfig", "TeacherConfig", "TrainConfig", "ValueModelConfig"),
    ),
    "verbs": ("DPOConfig", "KTOConfig", "SFTConfig"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
