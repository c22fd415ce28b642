"""Settings of the optimizer steps and of the models beside the policy."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lightrft.config.base import Settings
from lightrft.config.data import DataConfig
from lightrft.config.model import DType
from lightrft.config.strategy import OptimizerConfig


class TeacherConfig(Settings):
    """The frozen model of ``algorithm.distill``, with the tokenizer of the policy; all else is as in ``model``."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    shorthand: ClassVar[str | None] = "path"

    path: str = ""
    revision: str | None = None
    dtype: DType = "auto"
    load_in_4bit: bool = False
    trust_remote_code: bool = False


class CriticConfig(Settings):
    """The value model of ``gae``: starts from ``model`` unless it has a ``path``. The first ``warmup_steps`` steps train it alone, on
    answers of the frozen policy."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    path: str = ""
    optimizer: OptimizerConfig = OptimizerConfig(lr=9e-6)
    warmup_steps: int = Field(0, ge=0)


class ProcessConfig(Settings):
    """The process reward model of ``prime`` (arXiv 2502.01456): starts from ``model`` unless it has a ``path``.

    It learns whether the reward of an answer reaches ``threshold``; its log-ratio to the reference, times ``beta``, is the reward of
    a token. ``forward``: ``single`` takes token rewards from the forward that it is trained by, ``double`` from one after that.
    """

    paths: ClassVar[tuple[str, ...]] = ("path",)
    path: str = ""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    beta: float = Field(0.05, gt=0)
    threshold: float = 1.0
    forward: Literal["single", "double"] = "single"


class PtxConfig(Settings):
    """Supervised data beside the rollouts (PPO-ptx, arXiv 2203.02155): ``coef`` times the mean of -logp over the tokens of
    ``batch_size`` conversations of ``data`` is added to the loss of each optimizer step of the policy. Longer conversations than
    ``max_tokens`` are left out."""

    coef: float = Field(0.0, ge=0)
    data: DataConfig = DataConfig()
    batch_size: int = Field(8, ge=1)
    max_tokens: int = Field(2048, ge=2)


class TrainConfig(Settings):
    """How a batch becomes optimizer steps. ``steps`` counts rollout steps (or, for supervised verbs, optimizer steps); without it
    ``epochs`` passes over the data decide. Each rollout batch is passed over ``updates`` times, in ``mini_batches`` optimizer
    steps a pass. ``micro_batch_tokens`` bounds the tokens that one forward sees."""

    steps: int | None = Field(None, ge=1)
    epochs: float = Field(1.0, gt=0)
    updates: int = Field(1, ge=1)
    mini_batches: int = Field(1, ge=1)
    micro_batch_tokens: int = Field(16_384, ge=1)
