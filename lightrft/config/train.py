"""Settings of the optimizer steps and of the models other than the policy."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lightrft.config.base import Settings
from lightrft.config.data import SFTDataConfig
from lightrft.config.model import DType
from lightrft.config.strategy import OptimizerConfig


class TeacherConfig(Settings):
    """The frozen model of ``algorithm.distill``. It has the tokenizer of the policy; all else is as
    in ``model``."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that are paths."""
    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str = ""
    """Hugging Face folder, or name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: DType = "auto"
    """Type of the weights; ``auto`` takes the type that the model was saved in."""
    load_in_4bit: bool = False
    """Load weights in 4 bits (NF4, by bitsandbytes). Needs the extra ``quant``."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class CriticConfig(Settings):
    """The value model of advantages such as ``gae``."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that are paths."""
    path: str = ""
    """Folder or name of the start model; empty takes ``model.path``."""
    # OpenRLHF's default. A critic starts from a head without training, so it learns faster than the
    # policy.
    optimizer: OptimizerConfig = OptimizerConfig(lr=9e-6)
    """Optimizer of the critic."""
    warmup_steps: int = Field(0, ge=0)
    """Rollout steps at the start that train the critic alone, on responses of the frozen policy."""


class PRMConfig(Settings):
    """The process reward model of ``prime`` (arXiv 2502.01456). It learns whether the reward of a
    response reaches ``threshold``."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that are paths."""
    path: str = ""
    """Folder or name of the start model; empty takes ``model.path``."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    """Optimizer of the process reward model."""
    beta: float = Field(0.05, gt=0)
    """Factor of its log-ratio to the reference, which is the reward of a token."""
    threshold: float = 1.0
    """Reward, before shaping, that a right response reaches."""
    forward: Literal["single", "double"] = "single"
    """Take token rewards from the forward pass that trains the model (``single``), or from another
    one after the update (``double``)."""


class PtxConfig(Settings):
    """Supervised data next to the rollouts (PPO-ptx, arXiv 2203.02155)."""

    coef: float = Field(0.0, ge=0)
    """Factor of the mean of -logp over the trained tokens, added to the loss of each optimizer step
    of the policy; 0 leaves it out."""
    data: SFTDataConfig = SFTDataConfig()
    """Conversations to learn from."""
    batch_size: int = Field(8, ge=1)
    """Number of conversations in an optimizer step."""
    max_tokens: int = Field(2048, ge=2)
    """Longest conversation, in tokens. ``data.overlong_prompts`` says what happens to longer
    ones."""


class TrainConfig(Settings):
    """The optimizer steps of a run."""

    steps: int | None = Field(None, ge=1)
    """Number of steps: of rollout steps for ``rl``, else of optimizer steps. ``null`` leaves it to
    ``epochs``."""
    epochs: float = Field(1.0, gt=0)
    """Passes over the data; read without ``steps``."""
    max_tokens_per_micro_batch: int = Field(16_384, ge=1)
    """Most tokens in one forward pass; a longer row goes alone. Lower it when memory runs out; the
    loss stays the same, up to rounding."""


class RLTrainConfig(TrainConfig):
    """The optimizer steps of reinforcement learning."""

    ppo_epochs: int = Field(1, ge=1)
    """Passes over each rollout batch."""
    num_mini_batches: int = Field(1, ge=1)
    """Optimizer steps in each pass over a rollout batch."""
