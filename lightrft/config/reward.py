"""Settings of the reward."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lightrft.config.base import Settings, bare_names


class RewardTerm(Settings):
    """One term of a reward. The reward of a response is the weighted sum of its terms."""

    functions: ClassVar[tuple[str, ...]] = ("function",)
    """The settings of this section that name functions."""
    shorthand: ClassVar[str | None] = "function"
    """The setting that a bare string or number stands for."""

    function: str
    """Reward function: a registered name, ``package.module:function`` or ``file.py:function``."""
    weight: float = 1.0
    """Factor of this term in the sum."""
    name: str | None = None
    """Name of this term in metrics; ``null`` takes the name of the function."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class ScoringModelConfig(Settings):
    """A reward model whose score is a term of the reward."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that are paths."""
    shorthand: ClassVar[str | None] = "path"
    """The setting that a bare string or number stands for."""

    path: str
    """Folder that ``lightrft rm`` has written, or a reward model of another framework."""
    weight: float = 1.0
    """Factor of the score in the reward."""
    name: str | None = None
    """Name of this term in metrics; ``null`` takes the name of the head."""
    head: str | None = None
    """Head whose score it is; ``null`` takes the first one, or the mixture of all if the model has
    one."""
    aggregate: Literal["min", "product", "mean", "last", "tokens"] | None = None
    """Score of a response from the scores of its steps, for a process reward model: the lowest, the
    product, the mean or the last one. ``tokens`` gives each step its own reward in ``rl``, at the
    last token of the step. ``null`` is for models that score whole responses."""
    separator: str = Field("\n", min_length=1)
    """Text between the steps of a response, for a process reward model."""
    sources: tuple[str, ...] = ()
    """Data sources whose rows it scores; empty: all."""
    offload: bool = False
    """Keep the model in host memory except while it scores."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Largest number of tokens that it scores at once."""


Terms = Annotated[tuple[RewardTerm, ...], bare_names("function")]
"""Terms of one reward."""


class RewardConfig(Settings):
    """The scoring of responses. A call that fails in any way fails its samples only. Failed samples
    are counted and never trained on."""

    terms: Terms = ()
    """Terms of the reward: one name, or a list of names and tables; see ``RewardTerm``."""
    per_source: dict[str, Terms] = Field(default_factory=dict)
    """Data source to the terms of its rows, in place of ``terms``."""
    models: Annotated[tuple[ScoringModelConfig, ...], bare_names("path")] = ()
    """Reward models whose scores are added to the reward: a folder, or a list of folders and
    tables; see ``ScoringModelConfig``. Each rank holds a copy."""
    gates: dict[str, str] = Field(default_factory=dict)
    """Name of a term to the name of another one. The first counts only where the second reaches
    ``gate_threshold``, such as the length only of right responses."""
    gate_threshold: float = 1.0
    """Value that a term of ``gates`` must reach."""
    combine: Literal["sum", "worst"] = "sum"
    """Reward from the weighted terms: their ``sum``, or the ``worst`` of them, so that no term
    makes up for another."""
    workers: int = Field(1, ge=1)
    """Number of processes that call the functions."""
    timeout: float = Field(10.0, gt=0)
    """Limit of each call in seconds."""
    memory_mb: int = Field(2048, ge=64)
    """Memory limit of a worker in MiB, on top of what it needs to start."""

    @property
    def calls_functions(self) -> bool:
        """A reward function scores some responses."""
        return bool(self.terms or self.per_source)

    @property
    def combines(self) -> bool:
        """The reward is not the plain weighted sum."""
        return bool(self.gates) or self.combine != "sum"

    @property
    def scores(self) -> bool:
        """Something scores responses."""
        return self.calls_functions or bool(self.models)
