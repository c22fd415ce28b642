"""Load a reward model and serve it: ``lightrft serve-rm``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from lightrft.config.serving import ServeRMConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.models.families import context_length
from lightrft.models.processors import load_processor
from lightrft.models.reward.other_layouts import find_other_head
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import read_form
from lightrft.serving.batcher import Batcher
from lightrft.serving.chat_logprobs import likely_tokens
from lightrft.serving.chat_service import ChatService
from lightrft.serving.http_server import Endpoint, HTTPServer
from lightrft.serving.problems import HTTPCall
from lightrft.serving.reward_service import RewardService, ServedModel
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.strategy.single import SingleStrategy
from lightrft.workers.local import local_policy, local_tokenizer
from lightrft.workers.scoring.reward_wire import vocabulary_digest, weights_digest


@dataclass(slots=True)
class RewardServer:
    """A reward model behind HTTP that listens, and answers once ``run`` is called.

    Attributes:
        http: The HTTP side.
        service: Computes the answers.
        served: Name and digest of the model.
        url: The address.
    """

    http: HTTPServer
    service: RewardService | ChatService
    served: ServedModel
    url: str

    def ready_line(self) -> str:
        """Return a line about the model and its address."""
        kind = ", ".join(self.served.heads) or "generative"
        return f"{self.served.name} ({kind}; {self.served.digest}) at {self.url}"

    def run(self) -> None:
        """Answer until SIGTERM or Ctrl-C, then finish the accepted requests."""
        try:
            self.http.run()
        finally:
            self.service.close()


def open_reward_server(config: ServeRMConfig) -> RewardServer:
    """Load the model, listen, and return the server.

    A folder with heads is scored by them. Any other model is a generative reward model.

    Args:
        config: Settings of the server.

    Raises:
        ConfigError: No model is named, or the address or the token file cannot be used.
        ModelError: The model cannot be loaded.
    """
    config = with_model_folder(config)
    metrics = ServerMetrics()
    local_tokenizer(config.model)  # names a wrong path before anything else is read
    has_heads = read_form(config.model.path) or find_other_head(config.model)
    service = reward_service(config, metrics) if has_heads else chat_service(config, metrics)
    served = service.served

    async def health(call: HTTPCall) -> dict[str, str]:
        return {"status": "ok", "model": served.name, "digest": served.digest}

    async def shown(call: HTTPCall) -> str:
        return metrics.text()

    endpoints = [
        *service.endpoints(),
        Endpoint(("/health",), health, "GET", is_open=True),
        Endpoint(("/metrics",), shown, "GET"),
        Endpoint(("/v1/models",), served.listed, "GET"),
    ]
    try:
        http = HTTPServer(endpoints, config.http, metrics)
        return RewardServer(http, service, served, http.bind())
    except BaseException:
        service.close()
        raise


def with_model_folder(config: ServeRMConfig) -> ServeRMConfig:
    """Return ``config`` with the folder ``model/`` in place of a run folder."""
    inside = Path(config.model.path).expanduser() / "model"
    if config.model.path and not (inside.parent / "config.json").exists() and inside.is_dir():
        model = config.model.model_copy(update={"path": str(inside)})
        return config.model_copy(update={"model": model})
    return config


def reward_service(config: ServeRMConfig, metrics: ServerMetrics) -> RewardService:
    """Load a reward model with heads.

    Args:
        config: Settings of the server.
        metrics: Counters of the server.
    """
    tokenizer = local_tokenizer(config.model)
    device = SingleStrategy(StrategyConfig(device=config.device)).device
    model = RewardModel.load(config.model, device=device).requires_grad_(False).eval()
    processor = load_processor(config.model, tokenizer)
    return RewardService(model, tokenizer, processor, config, metrics)


def chat_service(config: ServeRMConfig, metrics: ServerMetrics) -> ChatService:
    """Load a generative reward model and an engine over it.

    Args:
        config: Settings of the server.
        metrics: Counters of the server.
    """
    tokenizer = local_tokenizer(config.model)
    placed = StrategyConfig(device=config.device)
    _, actor, engine = local_policy(config.model, placed, config.engine, tokenizer)
    name = config.name or config.model.path
    served = ServedModel(name, weights_digest(actor), vocabulary_digest(tokenizer))
    service = ChatService(
        engine,
        functools.partial(likely_tokens, actor, config.batching.max_tokens),
        tokenizer,
        load_processor(config.model, tokenizer),
        config.media,
        config.sampling,
        served,
        context_length(actor.base.config),
    )
    service.batcher = Batcher(service.compute, config.batching, metrics)
    return service
