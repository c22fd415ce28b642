"""The settings of ``lightrft demo``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from lightrft.config.base import Settings, changed_fields
from lightrft.config.run import RunConfig
from lightrft.config.verbs import DPOConfig, IterateConfig, RLConfig, RMConfig, SFTConfig


class StartModelConfig(Settings):
    """A tiny model with random weights."""

    family: str = "qwen2"
    """Family of the start model."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Sizes of the start model, as in its ``config.json``."""
    tower: dict[str, object] = Field(default_factory=dict)
    """Sizes of the tower of a family that reads more than text."""
    processor: dict[str, object] = Field(default_factory=dict)
    """Settings of the processor that fit ``tower``."""


class LearnedRewardConfig(StartModelConfig):
    """A tiny start model, from which a reward model and a policy are trained. The policy learns
    from the scores of the reward model. ``rl.reward.terms`` measure it, with weight 0."""

    rm: RMConfig = RMConfig()
    """Training of the reward model."""
    sft: SFTConfig = SFTConfig()
    """Warm-up of the policy by supervised training."""
    rl: RLConfig = RLConfig()
    """Reinforcement learning of the policy. Its ``reward.models`` are set to the reward model."""


class DemoConfig(StartModelConfig):
    """The settings of ``lightrft demo``: a start model, then ``sft`` or ``iterate``, then ``rl`` or
    ``dpo``. Both phases run in folders below ``run.dir``/``run.name`` and take their seed from
    ``run``."""

    run: RunConfig = RunConfig(name="demo")
    """Run folder and start of the demo."""
    start: str | None = None
    """Start model: what ``model.path`` may be. ``null`` makes a tiny one with random weights, of
    the settings ``family``, ``model``, ``tower`` and ``processor``."""
    sft: SFTConfig = SFTConfig()
    """Warm-up by supervised training."""
    iterate: IterateConfig | None = None
    """Warm-up by rounds of generation and training, instead of ``sft``; ``null`` runs ``sft``."""
    rl: RLConfig = RLConfig()
    """Reinforcement learning after it."""
    dpo: DPOConfig | None = None
    """Preference learning after the warm-up, instead of ``rl``; ``null`` runs ``rl``."""
    learned_rewards: dict[str, LearnedRewardConfig] = Field(default_factory=dict)
    """Start models with their reward models and policies, by name. They replace all settings above
    but ``run``."""

    @model_validator(mode="after")
    def _reads_all(self) -> DemoConfig:
        changed = changed_fields(self)
        others = [name for name in changed if name not in ("run", "learned_rewards")]
        if self.learned_rewards and others:
            raise ValueError(
                f"{', '.join(others)} changes nothing with learned_rewards; set it below "
                f"learned_rewards.{next(iter(self.learned_rewards))}"
            )
        sizes = [name for name in changed if name in StartModelConfig.model_fields]
        if self.start and sizes:
            raise ValueError(
                f"{', '.join(sizes)} changes nothing with start; leave one of them out"
            )
        return self
