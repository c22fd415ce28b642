"""Load a model and serve it: ``lightrft serve``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, Self, cast

from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.generation.serving import ServeConfig, ServeRMConfig, ServeTinkerConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.engines.constrained.grammars import refuse_column
from lightrft.engines.native import NativeEngine
from lightrft.models.families import context_length
from lightrft.models.processors import load_processor
from lightrft.serving.bearer_tokens import BearerTokens
from lightrft.serving.chat.chat_completions import ChatCompletions
from lightrft.serving.chat.completions import Completions
from lightrft.serving.chat.messages import Messages
from lightrft.serving.chat.text_generator import TextGenerator
from lightrft.serving.chat.token_logprobs import likely_tokens
from lightrft.serving.http_server import Endpoint, HTTPServer, check_address
from lightrft.serving.problems import HTTPCall, HTTPProblem
from lightrft.serving.reward_service import ServedModel
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.serving.weight_updates import WeightUpdates
from lightrft.trainer.saved_policy import media_of, resolved
from lightrft.utils.errors import ConfigError
from lightrft.workers.engine_kinds import kind_of
from lightrft.workers.local import local_policy, local_tokenizer
from lightrft.workers.scoring.reward_wire import vocabulary_digest, weights_digest, weights_layout


class Service(Protocol):
    """A model that answers requests, and the addresses that it answers."""

    @property
    def served(self) -> ServedModel: ...

    @property
    def problem(self) -> str: ...

    def endpoints(self) -> list[Endpoint]: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class ModelServer:
    """A model behind HTTP that listens, and answers once ``run`` is called.

    As a context, it answers in a thread, while the program does other things.

    Attributes:
        http: The HTTP side.
        service: Computes the answers.
        url: The address.
    """

    http: HTTPServer
    service: Service
    url: str
    _thread: Thread | None = None

    def __enter__(self) -> Self:
        """Answer in a thread until the context ends."""
        self._thread = Thread(target=self.run, name="lightrft-server", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Finish the accepted requests, and stop."""
        while self._thread is not None and self._thread.is_alive():
            self.http.stop()  # again, since the thread may not have begun to answer
            self._thread.join(0.1)

    @property
    def served(self) -> ServedModel:
        """The name and the digest of the model."""
        return self.service.served

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


class GenerationService:
    """All addresses of a generative model.

    Args:
        generator: Generates the answers.
        chat: Answers chat completions.
        updates: Replaces the weights. ``None`` if nobody may.
    """

    def __init__(
        self,
        generator: TextGenerator,
        chat: ChatCompletions,
        updates: WeightUpdates | None = None,
    ) -> None:
        self.generator = generator
        self.chat = chat
        self.updates = updates

    @property
    def served(self) -> ServedModel:
        """The name and the digest of the model."""
        return self.generator.served

    @property
    def problem(self) -> str:
        """The reason why nothing is generated; empty while requests are answered."""
        return self.generator.loop.problem

    def endpoints(self) -> list[Endpoint]:
        """Return the addresses."""
        return [
            *self.chat.endpoints(),
            *Completions(self.generator, self.chat).endpoints(),
            *Messages(self.generator, self.chat).endpoints(),
            *([] if self.updates is None else self.updates.endpoints()),
        ]

    def stop(self) -> None:
        """No request waits for others here."""

    def close(self) -> None:
        """Finish the requests that wait, and stop."""
        if self.updates is not None:
            self.updates.close()
        self.generator.close()


def open_server(config: ServeConfig) -> ModelServer:
    """Load the model, listen, and return the server.

    Args:
        config: Settings of the server.

    Raises:
        ConfigError: No model is named, or the address or the token file cannot be used.
        ModelError: The model cannot be loaded.
    """
    check_address(config.http)
    metrics = ServerMetrics()
    service = generation_service(config, metrics, config.max_tokens_per_micro_batch)
    return listening(service, config, metrics)


def listening(
    service: Service,
    config: ServeConfig | ServeRMConfig | ServeTinkerConfig,
    metrics: ServerMetrics,
) -> ModelServer:
    """Return a server of ``service`` that listens.

    Args:
        service: Computes the answers. It is closed if the address cannot be used.
        config: Settings of the server.
        metrics: Counters of the server.
    """

    async def health(call: HTTPCall) -> dict[str, str]:
        if service.problem:
            raise HTTPProblem(503, service.problem)
        served = service.served
        return {"status": "ok", "model": served.name, "digest": served.digest}

    async def listed(call: HTTPCall) -> dict[str, object]:
        return {"object": "list", "data": [service.served.entry()]}

    async def retrieved(call: HTTPCall) -> dict[str, object]:
        return service.served.retrieved(call)

    async def shown(call: HTTPCall) -> str:
        return metrics.text()

    endpoints: Sequence[Endpoint] = [
        *service.endpoints(),
        Endpoint(("/health",), health, "GET", is_open=True),
        Endpoint(("/metrics",), shown, "GET"),
        Endpoint(("/v1/models",), listed, "GET"),
        # the name of a model may be a path
        Endpoint(("/v1/models/{name:path}",), retrieved, "GET"),
    ]
    try:
        http = HTTPServer(endpoints, config.http, metrics, service.stop)
        return ModelServer(http, service, http.bind())
    except BaseException:
        service.close()
        raise


def check_engine(engine: EngineConfig) -> None:
    """Raise ``ConfigError`` for an engine that a server cannot generate with."""
    if not kind_of(engine).serves:
        raise ConfigError(
            f"engine.kind = {engine.kind}: this server generates with the native engine; "
            "set engine.kind=native, or start that engine's own server"
        )


def generation_service(
    config: ServeConfig | ServeRMConfig, metrics: ServerMetrics, budget: int
) -> GenerationService:
    """Load a generative model and an engine over it.

    Args:
        config: Settings of the server.
        metrics: Counters of the server.
        budget: Largest number of tokens of a forward pass that computes log-probs.
    """
    check_engine(config.engine)
    refuse_column(config.sampling, "no request has")
    model, saved = resolved(config.model)
    tokenizer = local_tokenizer(model)
    placed = StrategyConfig(device=config.device)
    weights = None if saved is None else saved.weights
    # A run sends whole weights, by the names of a model without adapters.
    merges = isinstance(config, ServeConfig) and config.weights_token_file is not None
    _, actor, built = local_policy(
        model, placed, config.engine, tokenizer, weights=weights, merges=merges
    )
    engine = cast("NativeEngine", built)  # by ``serves``
    if config.sampling.constraint is not None:
        # compiled at once: a constraint that cannot be followed must not fail each request
        engine.grammars().matcher(config.sampling.constraint)
    # the next turn of a conversation begins with the tokens of the last
    engine.keep_prefixes()
    name, context = config.name or config.model.path, context_length(actor.base.config)
    most = min(context or config.engine.max_cache_tokens, config.engine.max_cache_tokens)
    embeddings: Any = actor.base.get_input_embeddings()
    generator = TextGenerator(
        engine,
        functools.partial(likely_tokens, actor, budget),
        tokenizer,
        embeddings.num_embeddings,
        config.sampling,
        ServedModel(
            name,
            weights_digest(actor),
            vocabulary_digest(tokenizer),
            max_model_len=most,
            weights_layout=weights_layout(actor),
        ),
        context,
        metrics,
    )

    def start_weights() -> Iterable[tuple[str, Tensor]]:
        # on the CPU: the device has room for the served weights alone
        on_cpu = StrategyConfig(device="cpu")
        _, _, again = local_policy(
            model, on_cpu, config.engine, tokenizer, weights=weights, merges=merges
        )
        return cast("NativeEngine", again).decoder.parameters()

    processor = load_processor(model, tokenizer, media_of(saved))
    chat = ChatCompletions(generator, processor, config.media)
    try:
        return GenerationService(generator, chat, _updates(config, generator, start_weights))
    except BaseException:
        generator.close()
        raise


def _updates(
    config: ServeConfig | ServeRMConfig,
    generator: TextGenerator,
    start_weights: Callable[[], Iterable[tuple[str, Tensor]]],
) -> WeightUpdates | None:
    """Return the addresses that replace the weights, or None if nobody may."""
    if isinstance(config, ServeRMConfig) or config.weights_token_file is None:
        return None
    tokens = BearerTokens(Path(config.weights_token_file).expanduser(), "weights_token_file")
    return WeightUpdates(
        generator.engine,
        generator.loop,
        generator.served.digest,
        generator.replaced,
        tokens,
        int(config.http.max_body_mb * 2**20),
        config.http.timeout,
        start_weights,
    )
