"""Settings of process reward models: the head, the losses and the judgement of steps."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lightrft.config.base import NamedFunction, Settings, strings_as

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
