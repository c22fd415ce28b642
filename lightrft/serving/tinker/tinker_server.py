"""Load a base model and serve its training: ``lightrft serve-tinker``."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from lightrft.config.generation.serving import ServeTinkerConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.families import context_length
from lightrft.serving.generation_server import ModelServer, check_engine, listening
from lightrft.serving.http_server import check_address
from lightrft.serving.reward_service import ServedModel
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.serving.tinker.adapters import Adapters
from lightrft.serving.tinker.service import TinkerService
from lightrft.trainer.saved_policy import resolved
from lightrft.workers.local import local_policy, local_tokenizer
from lightrft.workers.scoring.reward_wire import (
    vocabulary_digest,
    weights_digest,
    weights_layout,
)


def open_tinker_server(config: ServeTinkerConfig) -> ModelServer:
    """Load the base model, listen, and return the server.

    Args:
        config: Settings of the server.

    Raises:
        ConfigError: No model is named, or the address or the token file cannot be used.
        ModelError: The model cannot be loaded.
    """
    check_address(config.http)
    check_engine(config.engine)
    metrics = ServerMetrics()
    model, saved = resolved(config.model)
    tokenizer = local_tokenizer(model)
    weights = None if saved is None else saved.weights
    # Adapters of the model itself are added to its weights, so that those of clients stand alone.
    placed = StrategyConfig(device=config.device)
    _, actor, built = local_policy(
        model, placed, config.engine, tokenizer, weights=weights, merges=True
    )
    engine = cast("NativeEngine", built)  # by ``check_engine``
    name = config.name or config.model.path
    digest = weights_digest(actor)
    context = context_length(actor.base.config) or config.engine.max_cache_tokens
    served = ServedModel(
        name,
        digest,
        vocabulary_digest(tokenizer),
        max_model_len=min(context, config.engine.max_cache_tokens),
        weights_layout=weights_layout(actor),
    )
    adapters = Adapters(actor, engine, (model.path, digest), config.max_tokens_per_micro_batch)
    # A relative folder would be another one for the client.
    source = model.tokenizer or model.path
    folder = Path(source).expanduser()
    source = str(folder.resolve()) if folder.exists() else source
    service = TinkerService(adapters, config, served, source, metrics)
    return listening(service, config, metrics)
