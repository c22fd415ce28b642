"""Settings of the optimizer steps and of the models other than the policy."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from lightrft.config.base import Settings, changed_fields
from lightrft.config.data import SFTDataConfig
from lightrft.config.model import DType
from lightrft.config.strategy import OptimizerConfig
from lightrft.utils.lazy_imports import torch


class TeacherConfig(Settings):
    """The frozen model that the policy learns from. It has the tokenizer of the policy; all else is
    as in ``model``."""

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


class DistillTeacherConfig(TeacherConfig):
    """A frozen model to learn from, which the run loads or a server has. It has the tokenizer of
    the student, unless ``distill.kind`` is ``uld``."""

    url: str | None = None
    """Address of a server that has the model, such as ``http://host:8000/v1`` of vLLM. It must
    return ``prompt_logprobs``. ``path`` then names the tokenizer alone. ``null`` loads the
    model."""
    served_name: str | None = None
    """Name of the model at the server; ``null`` takes ``path``."""
    timeout: float = Field(120.0, gt=0)
    """Seconds that the server has for an answer."""
    max_in_flight: int = Field(16, ge=1)
    """Most requests that wait for the server at a time, from each rank."""


class DistillationConfig(Settings):
    """The loss of ``lightrft distill``: a divergence of the student's next-token distribution from
    the teacher's, at the tokens of given or of sampled responses (GKD, arXiv 2306.13649)."""

    section: ClassVar[str] = "distill"
    """Key of the section, for messages."""
    shorthand: ClassVar[str | None] = "kind"
    """The setting that a bare string or number stands for."""
    texts: ClassVar[tuple[str, ...]] = ("teacher_system",)
    """The settings of this section that may be empty."""

    kind: Literal["forward_kl", "reverse_kl", "jsd", "uld"] = "forward_kl"
    """Divergence. ``forward_kl`` covers all modes of the teacher, ``reverse_kl`` seeks one, ``jsd``
    is between them. ``uld`` is the distance of sorted probabilities, for a teacher with another
    tokenizer (arXiv 2402.12030)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """The teacher's share in the mixture of ``jsd``, between 0 and 1. No other kind reads it."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits of both models."""
    top_k: int | None = Field(None, ge=1)
    """Compare only so many of the teacher's most probable tokens; ``null`` compares the whole
    vocabulary."""
    tail: Literal["bucket", "renormalised"] = "bucket"
    """What becomes of the tokens outside ``top_k``. ``bucket`` makes them one outcome.
    ``renormalised`` compares the distributions given that the token is among the top k."""
    on_policy: float = Field(0.0, ge=0, le=1)
    """Share of the steps that learn from responses that the student samples, instead of given ones:
    GKD's lambda. At 1 the data needs no responses."""
    nll_coef: float = Field(0.0, ge=0)
    """Factor of the mean of -logp over the tokens of given responses, added to the divergence."""
    aggregation: Literal["token", "sequence"] = "token"
    """Mean over all tokens of a step, or over responses of the mean over their tokens."""
    teacher_template: str | None = None
    """Text of the prompt that the teacher sees instead of the student's, as in ``data.template``:
    with ``{prompt}`` and ``{any_column}``, such as a worked solution. ``null`` gives both the same
    prompt."""
    teacher_system: str | None = None
    """System message that the teacher sees instead of ``data.system``; ``null`` gives both the
    same."""
    refresh_every: int = Field(0, ge=0)
    """Update the teacher from the student after every so many optimizer steps; 0 never does. It
    needs a teacher that starts as the student, so an empty ``teacher.path``."""
    refresh_decay: float = Field(0.0, ge=0, lt=1)
    """Weight of the old teacher in an update, in [0, 1). The student has the rest; 0 copies it."""

    @property
    def teacher_sees_more(self) -> bool:
        """True if the teacher's prompts differ from the student's."""
        return self.teacher_template is not None or self.teacher_system is not None

    @model_validator(mode="after")
    def _means_something(self) -> DistillationConfig:
        # A setting that nothing reads is a user's mistake.
        idle = {
            "beta": self.kind != "jsd" and "only kind jsd reads it",
            "tail": self.top_k is None and "set distill.top_k",
            "refresh_decay": not self.refresh_every and "set distill.refresh_every, e.g. to 1",
            "nll_coef": self.on_policy == 1 and "distill.on_policy = 1 reads no given response",
        }
        for name in changed_fields(self):
            if why := idle.get(name):
                raise ValueError(f"distill.{name} = {getattr(self, name)} changes nothing; {why}")
        if self.top_k is not None and self.kind == "uld":
            raise ValueError(
                f"distill.top_k = {self.top_k} with distill.kind = uld: sorted distributions are "
                "compared as a whole; leave distill.top_k out, or take another distill.kind"
            )
        if self.top_k == 1 and self.tail == "renormalised":
            raise ValueError(
                "distill.top_k = 1 with distill.tail = renormalised: one token has probability 1 "
                "in both models, so the loss is always 0; raise distill.top_k, or set "
                "distill.tail=bucket"
            )
        return self


class ValueModelConfig(Settings):
    """A model that estimates values, and its optimizer."""

    paths: ClassVar[tuple[str, ...]] = ("path",)
    """The settings of this section that are paths."""
    path: str = ""
    """Folder or name of the start model; empty takes ``model.path``."""
    # OpenRLHF's default. A critic starts from a head without training, so it learns faster than the
    # policy.
    optimizer: OptimizerConfig = OptimizerConfig(lr=9e-6)
    """Optimizer of the critic."""


class CriticConfig(ValueModelConfig):
    """The value model of advantages such as ``gae``."""

    warmup_steps: int = Field(0, ge=0)
    """Rollout steps at the start that train the critics alone, on responses of the frozen
    policy."""


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


MicroBatchTokens: TypeAlias = Annotated[int, Field(ge=1)] | Literal["auto"]
"""Type of a setting that bounds the tokens of one forward pass."""


def micro_batch_tokens(given: int | Literal["auto"]) -> int:
    """Return ``given``, with ``auto`` replaced by the number for the device of this machine.

    On a CPU, more tokens at once are not faster, and activations of 16,384 tokens fill the memory
    of a laptop: 5.9 GiB for a model of 135 M parameters.
    """
    if given != "auto":
        return given
    return 16_384 if torch.accelerator.is_available() else 2048


class TrainConfig(Settings):
    """The optimizer steps of a run."""

    steps: int | None = Field(None, ge=1)
    """Number of steps: of rollout steps for ``rl``, else of optimizer steps. ``null`` leaves it to
    ``epochs``."""
    epochs: float = Field(1.0, gt=0)
    """Passes over the data; read without ``steps``."""
    max_tokens_per_micro_batch: MicroBatchTokens = "auto"
    """Most tokens in one forward pass; a longer row goes alone. ``auto`` is 16384 where there is a
    GPU, and 2048 on a CPU. Lower it when memory runs out; the loss stays the same, up to
    rounding."""

    @property
    def micro_batch_tokens(self) -> int:
        """``max_tokens_per_micro_batch`` as a number."""
        return micro_batch_tokens(self.max_tokens_per_micro_batch)

    def count_steps(self, rows: int, per_step: int) -> int:
        """Return ``steps``, or the steps that ``epochs`` passes over the data take.

        Args:
            rows: Number of rows of the data.
            per_step: Number of rows of a step.
        """
        return self.steps or max(1, math.ceil(self.epochs * rows / per_step))


class RLTrainConfig(TrainConfig):
    """The optimizer steps of reinforcement learning."""

    ppo_epochs: int = Field(1, ge=1)
    """Passes over each rollout batch."""
    num_mini_batches: int = Field(1, ge=1)
    """Optimizer steps in each pass over a rollout batch."""
