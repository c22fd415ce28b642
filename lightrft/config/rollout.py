"""Settings of generation for training and evaluation."""

from __future__ import annotations

from pydantic import Field

from lightrft.config.base import ComponentConfig, NamedFunction, Settings
from lightrft.config.data import DataConfig
from lightrft.config.strategy import SamplingConfig


class CurriculumConfig(NamedFunction):
    """Sampling of prompts by weights that a function makes of their pass rates, instead of each
    once an epoch."""

    name: str
    """Function of pass rates to weights. A registered name, ``package.module:function`` or
    ``file.py:function``."""
    threshold: float = 1.0
    """Reward that a response must reach to pass."""
    momentum: float = Field(0.5, ge=0, lt=1)
    """Weight of the old pass rate of a prompt when a new one comes in, in [0, 1). Its first pass
    rate counts whole."""
    options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class RolloutConfig(Settings):
    """The groups of responses of a step, and how many steps generation may run ahead."""

    prompts_per_step: int = Field(32, ge=1)
    """Number of groups in a step, one prompt each."""
    group_size: int = Field(8, ge=1)
    """Number of responses to each prompt."""
    max_rounds: int = Field(8, ge=1)
    """Most rounds of generation in a step. Each round replaces groups that filters dropped."""
    oversample: float = Field(1.0, ge=1)
    """Generate this many times the missing groups in each round. The round ends as soon as enough
    have passed. Raise it above 1 when filters drop many."""
    carry_over: bool = False
    """Train on surplus groups of ``oversample`` in the next step, instead of dropping them. Not
    with ``staleness``."""
    select: ComponentConfig | None = None
    """Function that keeps some of the responses of each group; ``null`` keeps all."""
    curriculum: CurriculumConfig | None = None
    """Sampling of prompts by pass rate; ``null`` takes each prompt once an epoch."""
    staleness: int = Field(0, ge=0)
    """Generate while the policy trains, by a copy of the weights from exactly so many steps before.
    In the first steps it has the start weights. 0 generates and trains in turn; above 0 the
    algorithm wants a correction."""
    partial: bool = False
    """Continue unfinished responses in the next step, by its weights, instead of dropping them.
    Needs ``max_tokens_per_step``, or ``oversample`` above 1."""
    max_tokens_per_step: int | None = Field(None, ge=1)
    """Most tokens that a response grows by in one step, so that no step waits for the longest. A
    step trains on the groups that it finishes (Kimi k1.5, arXiv 2501.12599, section 2.6.2). Needs
    ``partial``; ``null`` sets no bound."""


class EvalConfig(Settings):
    """Evaluation on the eval set. The accuracy of a prompt is the share of its responses whose
    reward reaches ``threshold``."""

    # In order, so that ``limit`` takes the same prompts in every run.
    data: DataConfig = DataConfig(shuffle=False)
    """Rows of the eval set; without sources nothing is evaluated."""
    every: int = Field(0, ge=0)
    """Evaluate every so many steps; 0 evaluates only after the last step, and before the first one
    if ``at_start``."""
    at_start: bool = True
    """Evaluate before the first step."""
    limit: int | None = Field(None, ge=1)
    """Use only this many prompts, from the first; ``null`` uses all."""
    samples: int = Field(1, ge=1)
    """Number of responses to each prompt."""
    # Greedy, so that the same weights have the same accuracy.
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Generation of the responses."""
    threshold: float = 1.0
    """Reward that a response must reach to count as right."""
    stop_at: float | None = None
    """End training once the accuracy over all prompts reaches this value; needs ``every``. ``null``
    never ends it early."""
