"""Settings of servers."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from lightrft.config.base import Settings
from lightrft.config.data import AllowConfig, MediaConfig
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig


class HTTPConfig(Settings):
    """The HTTP side of a server: its address, who may ask, and how much."""

    paths: ClassVar[tuple[str, ...]] = ("token_file",)
    """The settings of this section that are paths."""

    host: str = "127.0.0.1"
    """Address to listen on. ``0.0.0.0`` is every network of the machine; then set ``token_file``
    too."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    token_file: str | None = None
    """File of bearer tokens, one a line, each with an optional time of expiry such as
    ``2027-01-31T12:00:00Z``. It is read again when it changes. ``null`` answers everybody."""
    max_body_mb: float = Field(64.0, gt=0)
    """Largest request body in MiB. A larger one is refused with status 413 before it is read."""
    max_requests: int = Field(2048, ge=1)
    """Most requests that are open at once: read, waiting or computed. More are refused with status
    429 and ``Retry-After``."""
    timeout: float = Field(120.0, gt=0)
    """Limit in seconds of reading a request, and of computing its answer. A slower one gets status
    408 or 504."""
    drain_seconds: float = Field(30.0, ge=0)
    """Time in which accepted requests are finished after SIGTERM, in seconds."""
    remembered: int = Field(4096, ge=0)
    """Number of latest answers that are kept by request id. A repeated request gets the kept
    answer, and is not computed twice."""


class BatchingConfig(Settings):
    """The batches that a server makes of waiting requests."""

    max_tokens: int = Field(16384, ge=1)
    """Largest number of tokens of one forward pass."""
    wait_ms: float = Field(5.0, ge=0)
    """Longest time in milliseconds that a request waits for others to share its batch."""


class ServerConfig(Settings):
    """Settings that all servers have."""

    model: ModelConfig = ModelConfig()
    """Model, run folder or checkpoint."""
    name: str | None = None
    """Name of the model in answers; ``null`` takes ``model.path``."""
    http: HTTPConfig = HTTPConfig()
    """Address, tokens and limits."""
    engine: EngineConfig = EngineConfig()
    """Engine of the server."""
    device: str = "auto"
    """Device of the model, such as ``cpu`` or ``cuda:1``; ``auto`` takes an accelerator where there
    is one."""
    threads: int = Field(0, ge=0)
    """Number of CPU threads; 0 leaves it to torch."""

    @model_validator(mode="after")
    def _compares_no_logprobs(self) -> Self:
        if not self.engine.check_logprobs:
            raise ValueError(
                "engine.check_logprobs = false changes nothing for a server, which compares no "
                "log-probs; leave it out"
            )
        return self


class ServeConfig(ServerConfig):
    """The settings of ``lightrft serve``: a generative model behind HTTP."""

    paths: ClassVar[tuple[str, ...]] = ("weights_token_file",)
    """The settings of this section that are paths."""

    media: MediaConfig = MediaConfig(allow=AllowConfig(roots=()))
    """Images, video and audio of requests. Without ``allow.roots``, no request can name a file of
    the server."""
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=512)
    """Generation, where a request sets nothing else."""
    weights_token_file: str | None = None
    """File of bearer tokens, as ``http.token_file``, of those who may replace the weights, such as
    a run with ``engine.kind: http``. ``null`` lets nobody replace them."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Largest number of tokens of a forward pass that computes ``logprobs`` of a request."""


class ServeRMConfig(ServerConfig):
    """The settings of ``lightrft serve-rm``: a reward model behind HTTP."""

    model: ModelConfig = ModelConfig()
    """Reward model with heads, or generative reward model."""
    batching: BatchingConfig = BatchingConfig()
    """Batches of requests that wait for scores. A generative model generates for all requests at
    once, and takes only ``max_tokens``, for log-probs."""
    media: MediaConfig = MediaConfig(allow=AllowConfig(roots=()))
    """Images, video and audio of requests. Without ``allow.roots``, no request can name a file of
    the server."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0, max_new_tokens=512)
    """Generation by a generative reward model, where a request sets nothing else."""
    engine: EngineConfig = EngineConfig()
    """Engine of a generative reward model."""


class ServeTinkerConfig(ServerConfig):
    """The settings of ``lightrft serve-tinker``: training and sampling by tinker's client."""

    paths: ClassVar[tuple[str, ...]] = ("dir",)
    """The settings of this section that are paths."""

    model: ModelConfig = ModelConfig()
    """Base model, run folder or checkpoint. It stays as it is, and each training client has an
    adapter."""
    name: str | None = None
    """Name of the base model that clients give; ``null`` takes ``model.path``."""
    dir: str = "runs/tinker"
    """Folder of the checkpoints of all clients."""
    lora_alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: their product counts ``lora_alpha / rank`` times. The client gives the
    rank. Adapters of a checkpoint keep their scale."""
    engine: EngineConfig = EngineConfig()
    """Engine that samples."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Largest number of tokens of a forward pass."""

    @model_validator(mode="after")
    def _is_base(self) -> ServeTinkerConfig:
        if self.model.lora is not None:
            raise ValueError(
                "model.lora: each client gives the rank of its adapter; leave it out, and set "
                "lora_alpha for its scale"
            )
        return self
