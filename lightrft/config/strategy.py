"""Settings that the strategy layer reads."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lightrft.config.base import Settings
from lightrft.config.generation.decoding import ConstraintConfig
from lightrft.config.read_by import ReadBy
from lightrft.utils.errors import is_unicode

SMALLEST_DIVISOR = 1e-6
"""Least number that logits are divided by. Below it they may overflow."""
LARGEST_LR = 1.0
"""Learning rate above which one step of AdamW replaces every weight."""


Beta = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a moment."""


class OptimizerConfig(Settings):
    """AdamW (arXiv 1711.05101) with float32 master weights."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate, at most 1. Usual values are 1e-6 to 1e-3."""
    lr_of: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Learning rates of parts of the model (``language``, ``tower``, ``projector``), in place of
    ``lr``. The schedule scales all alike."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of an update."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; it is multiplied by the learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of all optimizer steps that is linear warm-up, rounded up to whole steps. Set it in
    place of ``warmup_steps``."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Floor of the ``cosine`` and ``linear`` schedules, as a share of ``lr``, in [0, 1]."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Clip the gradient to this global norm; ``null`` does not clip."""

    @model_validator(mode="after")
    def _has_one_warmup(self) -> OptimizerConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio:g} set "
                "the same thing; set one of them to 0"
            )
        return self

    @model_validator(mode="after")
    def _destroys_no_model(self) -> OptimizerConfig:
        rates = {"lr": self.lr}
        for part, rate in self.lr_of.items():
            rates[f"lr_of.{part}"] = rate
        for name, value in rates.items():
            if value > LARGEST_LR:
                raise ValueError(
                    f"{name} = {value:g}: AdamW moves each weight by about {name} in a step, and "
                    "weights are about 0.02, so the model would be lost in the first step; "
                    f"lower it to {LARGEST_LR:g} at most (usual: 1e-6 to 1e-3)"
                )
        return self


SHARDING = ("hsdp_shard_size", "reshard_after_forward")
"""Settings that act only if FSDP2 shards the weights."""
SHARDS = ReadBy("auto", "fsdp2")
"""Mark of a setting of FSDP2."""
OFFLOADS = ReadBy("auto", "single", "fsdp2")
"""Mark of a setting of each strategy but DeepSpeed."""


class StrategyConfig(Settings):
    """The devices and the placement of weights, gradients and optimizer state."""

    section: ClassVar[str] = "strategy"
    """Key of the section, for messages."""
    shorthand: ClassVar[str | None] = "kind"
    """The setting that a bare string or number stands for."""

    kind: Literal["auto", "single", "fsdp2", "deepspeed"] = "auto"
    """``single`` is one process. ``fsdp2`` and ``deepspeed`` shard the model over all processes.
    ``auto`` takes ``single`` or ``fsdp2``, by the number of processes."""
    device: str = "auto"
    """Device of each process, such as ``cpu`` or ``cuda:1``; ``auto`` takes an accelerator where
    there is one."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Minutes after which a rank that others wait for ends the run. Raise it where one step of a
    rank may take longer."""
    tensor_parallel: Annotated[int, SHARDS] = Field(1, ge=1)
    """Number of neighbouring ranks that split the heads and the inner width of each layer (tensor
    parallelism, by the plan of transformers)."""
    sequence_parallel: Annotated[int, SHARDS] = Field(1, ge=1)
    """Number of ranks that split the tokens of each micro-batch (sequence parallelism by exchange
    of heads: Ulysses, arXiv 2309.14509). A group has ``sequence_parallel`` times
    ``tensor_parallel`` ranks. Raise it for responses too long for one device."""
    hsdp_shard_size: Annotated[int | None, SHARDS] = Field(None, ge=1)
    """Number of neighbouring ranks that hold one copy of the weights between them (HSDP). ``null``
    spreads one copy over all ranks."""
    reshard_after_forward: Annotated[bool | Annotated[int, Field(ge=2)], SHARDS] = True
    """Weights kept from a block's forward pass to its backward pass: its shard (true), all (false),
    or the shard of so many ranks. Keep more to gather less."""
    cpu_offload: Annotated[bool, OFFLOADS] = False
    """Keep gradients and optimizer state in the host's memory, and update the weights there. With
    ``fsdp2``, the weights are there too, and each block is fetched for its calls. In one process,
    the weights stay on the device."""
    offload_activations: Annotated[bool, OFFLOADS] = False
    """Keep in the host's memory what the forward pass saves for the backward pass."""
    offload_during_generation: Annotated[bool, OFFLOADS] = False
    """Keep optimizer state and frozen models in the host's memory during generation."""
    zero_stage: Annotated[int, ReadBy("deepspeed")] = Field(2, ge=1, le=3)
    """ZeRO stage (arXiv 1910.02054): shard optimizer state (1), gradients too (2), weights too
    (3)."""
    deepspeed: Annotated[dict[str, Any], ReadBy("deepspeed")] = Field(default_factory=dict)
    """Entries of DeepSpeed's own configuration, passed as they are."""


class SamplingConfig(Settings):
    """The generation of responses. Filters apply in this order: repetition penalty, temperature,
    top-k, top-p, min-p."""

    temperature: float = Field(1.0, ge=0)
    """Divisor of the logits; 0 is greedy. Others are at least 1e-6."""
    first_token_temperature: float | None = Field(None, ge=SMALLEST_DIVISOR)
    """Temperature of the first token of a response (FIRE, arXiv 2410.21236), e.g. 10; ``null``
    takes ``temperature``. A high value makes responses to one prompt more diverse, and filters
    apply as to other tokens. For the native engine."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities sum to this share; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Sample from this many likeliest tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens less likely than this multiple of the likeliest token's probability; 0 keeps
    all."""
    repetition_penalty: float = Field(1.0, ge=SMALLEST_DIVISOR)
    """Penalty of tokens that occurred before; 1 is none, and a larger value makes repeats less
    likely."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest response, in tokens."""
    min_new_tokens: int = Field(0, ge=0)
    """Shortest response, in tokens: no end token is sampled before."""
    stop: tuple[str, ...] = ()
    """Strings that end a response. They stay in its tokens and are cut from its text."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = ()
    """Further token ids that end a response."""
    constraint: ConstraintConfig | None = None
    """Form that every response must have. Log-probs are of the constrained distribution. It needs
    the extra ``constrained`` and the native engine; training by its responses is refused."""

    @field_validator("stop")
    @classmethod
    def _are_found_in_text(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        for k, one in enumerate(stop):
            if not one:
                raise ValueError(
                    f"stop.{k} is an empty text, which can end no response; leave it out"
                )
            if not is_unicode(one):
                raise ValueError(f"stop.{k} = {one!a} is not valid Unicode; leave it out")
        return stop

    @model_validator(mode="after")
    def _bounds(self) -> SamplingConfig:
        if 0 < self.temperature < SMALLEST_DIVISOR:
            raise ValueError(
                f"temperature {self.temperature:g} is below {SMALLEST_DIVISOR:g}, and logits "
                "divided by it are no numbers; set 0, which is greedy"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens "
                f"{self.max_new_tokens}; raise the latter"
            )
        return self


def in_worker(strategy: StrategyConfig) -> StrategyConfig:
    """Return the part of ``strategy`` that acts in a worker of ``launch.ray``.

    A worker is one process that trains nothing, so only the device applies.
    """
    # A new instance: a copy would keep sizes of parallel groups, which one process cannot form.
    return StrategyConfig(device=strategy.device)
