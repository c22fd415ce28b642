"""Load models that a run does not train: frozen ones, and the draft model of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.generation.decoding import SpeculativeConfig
from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.strategy.base import Strategy
from lightrft.utils.errors import ConfigError, path_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def local_frozen(model: ModelConfig, strategy: Strategy) -> Actor:
    """Load a model in eval mode, without gradients."""
    with strategy.loading() as device:
        frozen = Actor.load(model, device=device)
    frozen.requires_grad_(False)
    strategy.place(frozen)
    return frozen.eval()


def draft_settings(settings: SpeculativeConfig, policy: ModelConfig) -> ModelConfig:
    """Return how the draft model of ``settings`` is loaded: in the dtype of ``policy``."""
    return ModelConfig(
        path=settings.path, dtype=policy.dtype, trust_remote_code=policy.trust_remote_code
    )


def draft_decoder(
    engine: EngineConfig,
    policy: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> KVDecoder | None:
    """Load the draft model of ``engine.speculative``. Return ``None`` without one.

    Args:
        engine: Settings of the engine.
        policy: Settings of the policy. The draft model is loaded in its dtype.
        tokenizer: Tokenizer of the policy.
        device: Device of the policy.

    Raises:
        ConfigError: The draft model has another vocabulary.
        ModelError: It cannot be loaded.
    """
    settings = engine.speculative
    if settings is None or settings.kind != "draft":
        return None
    model = draft_settings(settings, policy)
    with path_of("engine.speculative.path"):
        vocabulary = load_tokenizer(model).get_vocab()
    if vocabulary != tokenizer.get_vocab():
        raise ConfigError(
            f"engine.speculative.path = {settings.path!r} has another vocabulary than the policy; "
            "take a model of the same family, or set engine.speculative.kind=ngram"
        )
    # loading must not advance the random generator of the run
    with path_of("engine.speculative.path"), torch.random.fork_rng():
        draft = Actor.load(model, device=device).requires_grad_(False).eval()
    return KVDecoder(draft.model)
