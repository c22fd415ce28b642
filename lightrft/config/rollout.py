"""Settings of generation for training and evaluation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from lightrft.config.base import ComponentConfig, NamedFunction, Settings
from lightrft.config.data import DataConfig
from lightrft.config.read_by import ReadBy
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
    """Evaluation on the eval set. The accuracy of a prompt is the share of its right responses. A
    response is right if the term of ``reward.success`` reaches ``threshold``."""

    # In order, so that ``limit`` takes the same prompts in every run.
    data: DataConfig = DataConfig(shuffle=False)
    """Rows of the eval set; without sources nothing is evaluated. In a run that trains, what is not
    set here follows ``data``, except for sources, columns, judgement and order."""
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
    """Value that the term of ``reward.success`` must reach in a right response. The weight of the
    term does not count."""
    stop_at: float | None = None
    """End training once the accuracy over all prompts reaches this value; needs ``every``. ``null``
    never ends it early."""


Keep = Literal["all", "best", "correct", "pairs", "labelled", "ranked", "conditioned", "self_play"]
"""Values of ``select.keep``."""


class ConditionConfig(Settings):
    """The text that states the reward of a response in its prompt, for conditional SFT."""

    shorthand: ClassVar[str | None] = "template"
    """The setting that a bare string or number stands for."""
    template: str = "Reward: {reward}"
    """Text with ``{reward}``. The same text with a high reward asks the trained model for a good
    response."""
    where: Literal["prompt", "system"] = "prompt"
    """Place of the text: on a line before the last message of the prompt, or at the end of the
    system message. ``system`` needs a chat template."""
    labels: tuple[str, ...] = ()
    """Names of equal parts of all rewards, from the lowest, to write in place of the number, e.g.
    ``[bad, good]``. Equal rewards have one name."""
    digits: int = Field(2, ge=0)
    """Digits of the number after the decimal point."""

    @model_validator(mode="after")
    def _has_reward(self) -> ConditionConfig:
        if "{reward}" not in self.template:
            raise ValueError(
                f"template = {self.template!r} has no {{reward}}; write {{reward}} where the "
                "reward goes"
            )
        if len(self.labels) == 1:
            raise ValueError("labels has one name, which tells nothing; give two or more, or none")
        return self


class SelectConfig(Settings):
    """The generated responses that become rows, and the layout of these rows."""

    section: ClassVar[str] = "select"
    """Key of the section, for messages."""
    selector: ClassVar[str] = "keep"
    """Field that chooses which others are read."""
    shorthand: ClassVar[str | None] = "keep"
    """The setting that a bare string or number stands for."""
    keep: Keep = "all"
    """Rows to write. ``all``: every response as it is. For ``sft``: the ``best`` response, the
    ``correct`` ones, or all ``conditioned`` on their reward. For ``dpo``: ``pairs`` of a better and
    a worse response, all responses ``ranked`` by reward, or ``self_play``, the response of the data
    before the model's. For ``kto``: all responses ``labelled`` as good or bad."""
    threshold: Annotated[float, ReadBy("correct", "labelled")] = 1.0
    """Reward that a response must reach to be correct, or good."""
    margin: Annotated[float, ReadBy("pairs")] = Field(0.0, ge=0)
    """The rewards of a pair differ by more than this."""
    per_prompt: Annotated[
        int | None, ReadBy("best", "correct", "pairs", "labelled", "conditioned", "self_play")
    ] = Field(None, ge=1)
    """Most rows of one prompt. They have the highest rewards, or the largest differences of
    rewards, where ``keep`` goes by these, and are the first ones otherwise. ``null``: one row of
    ``best`` and ``pairs``, and all rows of the others."""
    distinct: Annotated[bool, ReadBy("correct", "labelled", "conditioned")] = True
    """Leave out a response that is equal to an earlier one to the same prompt. ``best``, ``pairs``,
    ``ranked`` and ``self_play`` always do."""
    keep_truncated: Annotated[bool, ReadBy(*get_args(Keep)[1:])] = False
    """Keep responses that were cut off at ``sampling.max_new_tokens``."""
    condition: Annotated[ConditionConfig, ReadBy("conditioned")] = ConditionConfig()
    """Statement of the reward in the prompt."""


class StepLabelsConfig(Settings):
    """The labels of the steps of a solution, by responses that continue its first steps."""

    separator: str = Field("\n", min_length=1)
    """Text between two steps of a solution."""
    column: str = ""
    """Column of the solution: a text, or a list of steps. Empty: ``completions``, ``steps``, or the
    response of the row."""
    continuations: int = Field(8, ge=1)
    """Number of responses that continue the first steps of a solution."""
    threshold: float = 1.0
    """Reward that a response must reach to be right."""
    search: Literal["every", "first_wrong"] = "every"
    """``every`` continues the solution after each step. ``first_wrong`` finds the first wrong step
    by bisection, as in OmegaPRM, and leaves the steps after it without a label. It needs ``labels:
    hard``, since the steps that it skips have no soft label."""
    labels: Literal["soft", "hard"] = "soft"
    """Column that is repeated as ``labels``, which training reads: ``soft_labels``, the share of
    right continuations, or ``hard_labels``, 1 where some continuation is right."""
