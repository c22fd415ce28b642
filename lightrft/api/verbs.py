"""Settings of the verbs that train: of a named verb, or of the verb that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.config.base import Loaded
from lightrft.config.verbs import (
    DPOConfig,
    JudgeDPOConfig,
    JudgeRLConfig,
    JudgeSFTConfig,
    RLConfig,
    TrainingConfig,
)
from lightrft.utils.errors import ConfigError, did_you_mean
from lightrft.verbs import of_kind, trains


def plain_settings(config: TrainingConfig) -> TrainingConfig:
    """Return the settings of the verb that trains: a judge's are settings of another verb."""
    if isinstance(config, JudgeSFTConfig | JudgeRLConfig | JudgeDPOConfig):
        return config.plain()
    return config


def fitting(
    verb: str, load: Callable[[type[TrainingConfig]], Loaded[TrainingConfig]]
) -> Loaded[TrainingConfig]:
    """Return the settings of a verb that trains.

    Args:
        verb: name of the verb. ``auto`` selects the verb whose settings fit.
        load: returns the given settings as those of a class.

    Raises:
        ConfigError: there is no such verb, or the settings do not fit.
    """
    training = of_kind("training")
    if verb != "auto":
        row = trains(verb)
        if row is None or row.kind == "rounds":
            raise ConfigError(
                f"there is no verb {verb!r} that trains{did_you_mean(verb, training)}"
            )
        loaded = load(row.settings_class())
        return replace(loaded, settings=plain_settings(loaded.settings))
    found: dict[str, Loaded[TrainingConfig]] = {}
    problems: list[ConfigError] = []
    for name, row in training.items():
        try:
            found[name] = load(row.settings_class())
        except ConfigError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    first = found["rl"].settings if "rl" in found else None
    if isinstance(first, RLConfig):
        reward, distill = first.reward, first.algorithm.distill
        if reward.scores or distill.kind != "none":
            return found["rl"]
    # A config without rewards and without a teacher parses as any: then it is one for SFT.
    if "distill" in found and "sft" not in found:
        return found["distill"]
    dpo = found.get("dpo")
    if "sft" not in found and dpo is not None and isinstance(dpo.settings, DPOConfig):
        labelled = preference_requirements(dpo.settings.preference).kind == "labelled"
        return found["kto"] if labelled else dpo
    return found.get("sft", next(iter(found.values())))
