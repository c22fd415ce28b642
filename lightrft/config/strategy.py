"""Settings that the strategy layer reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lightrft.config.base import Settings

LARGEST_LR = 1.0
"""Learning rate above which one step of AdamW replaces every weight."""


class OptimizerConfig(Settings):
    """AdamW (arXiv 1711.05101) with float32 master weights.

    ``lr_of`` gives parts of the model (``language``, ``tower``, ``projector``) a rate of their own in place of ``lr``; the schedule
    scales all alike.
    ``warmup`` is a share of all steps when below 1, else a number of steps. ``min_lr`` is the floor of the cosine and linear
    schedules, as a share of ``lr``.
    """

    lr: float = Field(1e-6, ge=0)
    lr_of: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = Field(0.0, ge=0)
    min_lr: float = Field(0.1, ge=0, le=1)
    max_grad_norm: float | None = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _destroys_no_model(self) -> OptimizerConfig:
        for name, value in {"lr": self.lr, **{f"lr_of.{part}": rate for part, rate in self.lr_of.items()}}.items():
            if value > LARGEST_LR:
                raise ValueError(
                    f"{name} = {value:g}: AdamW moves each weight by about {name} in a step, and weights are about 0.02, so the "
                    f"model would be lost in the first step; lower it to {LARGEST_LR:g} at most (usual: 1e-6 to 1e-3)"
                )
        return self


SHARDING = ("shard", "reshard", "offload")
"""Settings that act where weights are spread over ranks by FSDP2."""

_OF_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SHARDING, ("auto", "fsdp2")),
    **dict.fromkeys(("offload_activations", "sleep"), ("auto", "fsdp2", "single")),
    **dict.fromkeys(("stage", "deepspeed"), ("deepspeed",)),
}


class StrategyConfig(Settings):
    """Where weights, gradients and optimizer state live.

    ``kind``: ``single`` is one process, ``fsdp2`` and ``deepspeed`` shard them over all; ``auto`` takes ``single`` or ``fsdp2``, as the
    number of processes asks.
    ``stage`` is ZeRO's (arXiv 1910.02054): what is sharded is optimizer state (1), gradients too (2), weights too (3). ``deepspeed`` goes
    into DeepSpeed's own configuration as it is.
    With ``fsdp2``: ``shard`` is the number of neighbouring ranks that hold one copy of the weights between them, where not all together
    hold one (HSDP); ``reshard`` says what is kept of weights from a block's forward pass to its backward pass: its shard (true), all
    (false), or the shard of so many ranks; ``offload`` keeps weights, gradients and optimizer state in the host's memory.
    ``offload_activations`` keeps there what the forward pass leaves for the backward pass, and ``sleep`` optimizer state and models that
    are not trained while answers are drawn.
    ``device``: ``auto`` takes an accelerator where there is one. A rank that others have waited for during ``timeout`` minutes ends
    the run.
    ``tensor`` ranks side by side share out the heads and the inner width of each layer, by the plan that transformers has for the model:
    tensor parallelism. ``sequence`` ranks (of as many times ``tensor``) share out the tokens of each micro-batch, for answers too long
    for one of them: sequence parallelism by exchange of heads (Ulysses, arXiv 2309.14509). Both are for ``fsdp2``.
    """

    kind: Literal["auto", "single", "fsdp2", "deepspeed"] = "auto"
    device: str = "auto"
    timeout: float = Field(10.0, gt=0)
    tensor: int = Field(1, ge=1)
    sequence: int = Field(1, ge=1)
    shard: int | None = Field(None, ge=1)
    reshard: bool | Annotated[int, Field(ge=2)] = True
    offload: bool = False
    offload_activations: bool = False
    sleep: bool = False
    stage: int = Field(2, ge=1, le=3)
    deepspeed: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_kind(self) -> StrategyConfig:
        for name in ("tensor", "sequence"):
            if getattr(self, name) > 1 and self.kind not in ("auto", "fsdp2"):
                raise ValueError(
                    f"strategy.{name} = {getattr(self, name)} needs strategy.kind fsdp2, which is {self.kind}; set strategy.kind=fsdp2, "
                    f"or strategy.{name}=1"
                )
        for name, kinds in _OF_KINDS.items():
            value, default = getattr(self, name), type(self).model_fields[name].get_default(call_default_factory=True)
            if self.kind not in kinds and value != default:
                raise ValueError(
                    f"strategy.{name} = {value} changes nothing with kind {self.kind}; set strategy.kind={kinds[-1]}, or leave it out"
                )
        return self


class SamplingConfig(Settings):
    """How answers are drawn. ``temperature`` 0 is greedy.

    Filters apply in the order repetition penalty, temperature, top-k, top-p, min-p.
    ``stop`` strings stay in the answer's tokens and are cut from its text.
    """

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(256, ge=1)
    min_new_tokens: int = Field(0, ge=0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _bounds(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}; raise the latter"
            )
        return self


class EngineConfig(Settings):
    """What draws answers. ``token_budget`` bounds the tokens (prompts and answers) whose keys and values are held at one time;
    ``max_rows`` the answers that grow at one time."""

    kind: Literal["native"] = "native"
    token_budget: int = Field(262_144, ge=1)
    max_rows: int = Field(256, ge=1)
    check_logprobs: bool = True
    """Compare the log-probs of sampled tokens with the trainer's own, and stop with the cause where they differ.

    On the first batch, and after each weight update of an engine that has its own weights: on the batch that follows, or with
    ``rollout.staleness`` on a few tokens that the engine draws at once. It costs a forward of a few rows. Turn it off for an engine
    that is meant to differ, e.g. one with quantised weights.
    """


def in_worker(strategy: StrategyConfig) -> StrategyConfig:
    """What of ``strategy`` acts in a worker of ``launch.ray``, which is one process and answers when it is asked."""
    return StrategyConfig(device=strategy.device, offload_activations=strategy.offload_activations)
