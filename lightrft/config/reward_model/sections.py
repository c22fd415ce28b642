"""Settings of reward and process reward models: heads, pooling, losses and judgements of steps."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import NamedFunction, Settings, strings_as

HeadKind = Literal["linear", "mlp", "classes", "ordinal", "gaussian", "ensemble"]
"""Form of a head, from a pooled state to a score."""


class RewardHeadConfig(Settings):
    """One head: a score of its own, with labels of its own."""

    shorthand: ClassVar[str | None] = "name"
    """The setting that a bare string or number stands for."""

    name: str = "preference"
    """Name of the score. Rows label it by this name; rows without names label the first head."""
    kind: HeadKind = "linear"
    """``linear``: one linear layer without bias. ``mlp``: Linear, RMSNorm, SiLU, Linear, Sigmoid,
    as in LightRFT, with scores between 0 and 1. ``classes``: the probability of each rating; the
    score is the expected rating. ``ordinal``: the probability that the rating exceeds each
    threshold. ``gaussian``: a mean and a variance. ``ensemble``: several linear layers; the score
    is their mean."""
    size: int = Field(1, ge=1)
    """Number of ratings of ``classes`` and ``ordinal``, from 0, or of members of an ``ensemble``.
    Other kinds take 1."""
    logit_scale: bool = False
    """Multiply the score in training by a learned scale, which starts at 1/0.07. It sharpens the
    comparison of scores between 0 and 1, and is left out when the model scores."""

    @model_validator(mode="after")
    def _has_size(self) -> RewardHeadConfig:
        sized = self.kind in ("classes", "ordinal", "ensemble")
        if sized and self.size < 2:
            raise ValueError(
                f"head {self.name!r}: kind = {self.kind!r} needs size, 2 or more; set it"
            )
        if not sized and self.size != 1:
            raise ValueError(
                f"head {self.name!r}: size = {self.size} changes nothing for kind = "
                f"{self.kind!r}; leave it out"
            )
        return self


class RewardLossConfig(NamedFunction):
    """One loss of the weighted sum."""

    name: str
    """Reward-model loss. A registered name, ``package.module:function`` or
    ``file.py:function``."""
    weight: float = Field(1.0, gt=0)
    """Factor of the loss in the sum. Positive."""
    head: str | None = None
    """Name of the head whose score it reads, or ``mixture``; ``null`` is every head."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the loss. A loss of pairs also takes ``per``: ``group`` counts
    each group of responses once, as in InstructGPT, and ``pair`` each pair. They are equal for
    groups of two."""


class RewardModelConfig(Settings):
    """The form of a reward model, and what it learns from."""

    heads: Annotated[tuple[RewardHeadConfig, ...], strings_as("name")] = Field(
        (RewardHeadConfig(),), min_length=1
    )
    """Scores that the model gives: names, or tables; see ``RewardHeadConfig``. The first one is the
    reward, unless ``gate`` combines them."""
    gate: bool = False
    """Combine the scores of all heads by weights that a second network reads from the prompt, as in
    ArmoRM (arXiv 2406.12845). The combined score is called ``mixture``. A loss with ``head:
    mixture`` trains it, on the preference of each row."""
    pooling: Literal["last", "mean", "attention", "token"] = "last"
    """Hidden state that heads read: that of the ``last`` token, the ``mean`` of all tokens, a
    learned ``attention`` over all tokens, or that of a learned ``token`` after the last one."""
    layer: int = -1
    """Layer whose hidden states are pooled; -1 is the last. Later layers are not computed."""
    positions: Literal["model", "text"] | None = None
    """Positions of tokens in a prompt with media. ``model`` takes those of the family, such as
    time, height and width of a patch (M-RoPE). ``text`` counts tokens, as LightRFT trains its
    scalar reward models. ``null`` takes those that the folder was trained with, and ``model`` for a
    new reward model."""
    losses: Annotated[tuple[RewardLossConfig, ...], strings_as("name")] = Field(
        (RewardLossConfig(name="bradley_terry"),), min_length=1
    )
    """Losses whose weighted sum is minimised: names, or tables; see ``RewardLossConfig``."""
    normalize: Literal["none", "center", "scale"] = "none"
    """Shift the scores of the saved model to mean 0 over the validation rows (``center``), and
    divide them by their standard deviation (``scale``). Without validation rows it takes the
    training rows."""

    @model_validator(mode="after")
    def _named_once(self) -> RewardModelConfig:
        names = [head.name for head in self.heads]
        if len(set(names)) < len(names):
            raise ValueError(f"heads has a name twice: {', '.join(names)}; give each its own")
        if self.gate and len(names) < 2:
            raise ValueError("gate combines the scores of several heads, and heads has one")
        for loss in self.losses:
            if loss.head is not None and loss.head not in [*names, "mixture"]:
                raise ValueError(
                    f"losses: {loss.name} reads head {loss.head!r}; heads has {', '.join(names)}"
                )
        return self


class ValidationTimesConfig(Settings):
    """The times at which held-out rows are measured."""

    every: int = Field(0, ge=0)
    """Measure held-out rows every so many steps; 0 measures them only after the last step, and
    before the first one if ``at_start``."""
    at_start: bool = True
    """Measure held-out rows before the first step."""


StepHeadKind = Literal["classes", "mlp", "linear", "regression", "tokens"]
"""Form of the head that scores steps."""


class StepLossConfig(NamedFunction):
    """One loss of the weighted sum."""

    shorthand: ClassVar[str | None] = "name"
    """The setting that a bare string or number stands for."""

    name: str
    """Loss of steps. A registered name, ``package.module:function`` or ``file.py:function``."""
    weight: float = Field(1.0, gt=0)
    """Factor of the loss in the sum. Positive."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the loss."""


class ProcessModelConfig(Settings):
    """The form of a process reward model, and what it learns from."""

    head: StepHeadKind = "classes"
    """Head that reads the state at a separator. ``classes``: a linear layer with two classes, as in
    TRL. ``mlp``: Linear, ReLU, Linear with two classes, as in Qwen2.5-Math-PRM. ``linear``: a
    linear layer whose sigmoid is the score. ``regression``: a linear layer whose output is the
    score. ``tokens``: the model's own logits of the tokens ``right`` and ``wrong``, as in
    Math-Shepherd."""
    right: str = Field("+", min_length=1)
    """Token of a right step, for ``head: tokens``."""
    wrong: str = Field("-", min_length=1)
    """Token of a wrong step, for ``head: tokens``."""
    losses: Annotated[tuple[StepLossConfig, ...], strings_as("name")] = Field(
        (StepLossConfig(name="cross_entropy"),), min_length=1
    )
    """Losses whose weighted sum is minimised: names, or tables; see ``StepLossConfig``."""
    last_step_only: bool = False
    """Train only on the last labelled step of each response."""
    threshold: float = Field(0.5, gt=0, lt=1)
    """Smallest score of a right step, in validation."""

    @model_validator(mode="after")
    def _verdict_tokens(self) -> ProcessModelConfig:
        if self.right == self.wrong:
            raise ValueError(f"right and wrong are both {self.right!r}; give two tokens")
        if self.head != "tokens" and (self.right, self.wrong) != ("+", "-"):
            raise ValueError(
                f"right = {self.right!r} and wrong = {self.wrong!r} change nothing for head = "
                f"{self.head!r}; set head=tokens, or leave them out"
            )
        return self
