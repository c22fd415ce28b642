"""Settings of generation for training and evaluation."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lightrft.config.base import NamedFunction, Part, Settings
from lightrft.config.data import DataConfig
from lightrft.config.strategy import SamplingConfig


class CurriculumConfig(NamedFunction):
    """Prompts are drawn by weights that the function ``name`` makes of their pass rates, instead of each once an epoch.

    An answer passes when its reward reaches ``threshold``. The running pass rate of a prompt is its first one, then ``momentum``
    times itself plus the rest of the newest.
    """

    name: str
    threshold: float = 1.0
    momentum: float = Field(0.5, ge=0, lt=1)
    options: dict[str, Any] = Field(default_factory=dict)


class RolloutConfig(Settings):
    """``prompts`` groups of ``samples`` answers a step.

    Groups that filters drop are replaced, in at most ``max_rounds`` rounds of generation a step. Each round draws ``oversample``
    times as many groups as are missing and ends as soon as enough have passed; groups that are then too many are dropped or, with
    ``carry_over``, trained on in the next step. ``select`` keeps some of the answers of each group.
    With ``staleness`` above 0, answers are drawn while the policy is trained, by a copy of the weights that it had exactly that
    many steps before (in the first steps: at the start). The algorithm then wants a correction for it.
    With ``partial``, answers that are not finished when a step has enough are not dropped: they go on in the next step, by its
    weights. ``step_tokens`` bounds what an answer grows by in one step, so that no step waits for the longest; a step then trains on
    the groups that it finishes (Kimi k1.5, arXiv 2501.12599, section 2.6.2).
    """

    prompts: int = Field(32, ge=1)
    samples: int = Field(8, ge=1)
    max_rounds: int = Field(8, ge=1)
    oversample: float = Field(1.0, ge=1)
    carry_over: bool = False
    select: Part | None = None
    curriculum: CurriculumConfig | None = None
    staleness: int = Field(0, ge=0)
    partial: bool = False
    step_tokens: int | None = Field(None, ge=1)


class EvalConfig(Settings):
    """Held-out evaluation: every ``every`` steps (0: never), and before the first one if ``at_start``.

    The accuracy of a prompt is the share of its ``samples`` answers whose reward reaches ``threshold``. Training ends once the
    accuracy over all prompts reaches ``stop_at``.
    """

    data: DataConfig = DataConfig(shuffle=False)
    every: int = Field(0, ge=0)
    at_start: bool = True
    limit: int | None = Field(None, ge=1)
    samples: int = Field(1, ge=1)
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    threshold: float = 1.0
    stop_at: float | None = None
