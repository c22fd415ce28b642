"""The trees that a user's YAML fills, one per verb. Settings of lower layers live beside what reads them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from lightrft.datasets.settings import Columns, DataConfig, SourceConfig
from lightrft.models.settings import DType, Layout, LoRAConfig, ModelConfig
from lightrft.strategy.settings import EngineConfig, OptimizerConfig, SamplingConfig, StrategyConfig
from lightrft.utils.settings import Settings

__all__ = [
    "Columns",
    "DType",
    "DataConfig",
    "EngineConfig",
    "Layout",
    "LoRAConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RewardTerm",
    "RunConfig",
    "SamplingConfig",
    "SourceConfig",
    "StrategyConfig",
]


class RewardTerm(Settings):
    """One term of a reward. ``function``: a registered name, ``package.module:function`` or ``file.py:function``;
    ``options`` are passed to it as keywords. The reward of an answer is the weighted sum of its terms."""

    shorthand: ClassVar[str | None] = "function"

    function: str
    weight: float = 1.0
    name: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(Settings):
    """How answers are scored. ``per_source`` gives rows of one data source terms of their own.

    Functions run in ``workers`` processes, each call under ``deadline`` seconds and ``memory_mb`` MiB on top of what a
    worker needs to start. A call that fails in any way fails its samples only: they are counted and never trained on.
    """

    terms: tuple[RewardTerm, ...] = ()
    per_source: dict[str, tuple[RewardTerm, ...]] = Field(default_factory=dict)
    workers: int = Field(1, ge=1)
    deadline: float = Field(10.0, gt=0)
    memory_mb: int = Field(2048, ge=64)

    @model_validator(mode="before")
    @classmethod
    def _bare_names(cls, tree: Any) -> Any:
        """``terms: [math]`` stands for ``terms: [{function: math}]``."""

        def full(terms: Any) -> Any:
            terms = [terms] if isinstance(terms, str | dict) else terms
            return [{"function": t} if isinstance(t, str) else t for t in terms] if isinstance(terms, list | tuple) else terms

        if isinstance(tree, dict):
            tree = dict(tree)
            if "terms" in tree:
                tree["terms"] = full(tree["terms"])
            if isinstance(tree.get("per_source"), dict):
                tree["per_source"] = {k: full(v) for k, v in tree["per_source"].items()}
        return tree


class RunConfig(Settings):
    """The run folder, ``dir``/``name``, and how a run starts.

    ``resume``: ``auto`` goes on from the newest checkpoint of a folder whose config is equal, ``never`` refuses a folder that
    exists, a path goes on from that checkpoint. ``threads`` 0 leaves the choice to the program.
    """

    name: str = "run"
    dir: str = "runs"
    seed: int = 0
    resume: str = "auto"
    overwrite: bool = False
    threads: int = Field(0, ge=0)
    checkpoint_every: int = Field(0, ge=0)
    checkpoint_keep: int = Field(2, ge=1)
    checkpoint_best: str | None = None
    tensorboard: bool = True
    wandb: str | None = None
    rollouts_every: int = Field(1, ge=0)
    progress: bool = True
