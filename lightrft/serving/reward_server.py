"""Load a reward model and serve it: ``lightrft serve-rm``."""

from __future__ import annotations

from pathlib import Path

from lightrft.config.generation.serving import ServeRMConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.models.processors import load_processor
from lightrft.models.reward.other_layouts import holds_other_head
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import read_form
from lightrft.serving.generation_server import ModelServer, generation_service, listening
from lightrft.serving.http_server import check_address
from lightrft.serving.reward_service import RewardService
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.strategy.single import SingleStrategy
from lightrft.workers.local import local_tokenizer


def open_reward_server(config: ServeRMConfig) -> ModelServer:
    """Load the model, listen, and return the server.

    A folder with heads is scored by them. Any other model is a generative reward model.

    Args:
        config: Settings of the server.

    Raises:
        ConfigError: No model is named, or the address or the token file cannot be used.
        ModelError: The model cannot be loaded.
    """
    check_address(config.http)
    config = with_model_folder(config)
    metrics = ServerMetrics()
    local_tokenizer(config.model)  # names a wrong path before anything else is read
    has_heads = read_form(config.model.path) or holds_other_head(config.model)
    if has_heads:
        return listening(reward_service(config, metrics), config, metrics)
    budget = config.batching.max_tokens
    return listening(generation_service(config, metrics, budget), config, metrics)


def with_model_folder(config: ServeRMConfig) -> ServeRMConfig:
    """Return ``config`` with the folder ``model/`` in place of a run folder."""
    inside = Path(config.model.path).expanduser() / "model"
    if config.model.path and not (inside.parent / "config.json").exists() and inside.is_dir():
        model = config.model.model_copy(update={"path": str(inside), "base": None})
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
