"""Build the drafter of a call, and check at start that an engine can have one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.decoder_protocol import DecoderProtocol, RollbackSession
from lightrft.engines.speculative.draft_model import ModelDrafter
from lightrft.engines.speculative.drafter import Drafter, Drafts
from lightrft.engines.speculative.ngram import NgramDrafter
from lightrft.utils.errors import ConfigError


def check_speculative(decoder: DecoderProtocol, draft: DecoderProtocol | None) -> None:
    """Raise ``ConfigError`` if a model decodes in a way that cannot remove tokens again.

    Args:
        decoder: The policy.
        draft: The draft model. ``None`` without one.
    """
    named = {"this policy": decoder, "the model engine.speculative.path": draft}
    for name, model in named.items():
        if model is not None and not isinstance(model.session(), RollbackSession):
            raise ConfigError(
                f"engine.speculative: {name} decodes by its own cache, from which rejected tokens "
                "cannot be removed; leave out engine.speculative, or take a model with "
                "attention alone"
            )


def drafts_of(
    config: EngineConfig, draft: DecoderProtocol | None, sampling: SamplingConfig, vocabulary: int
) -> Drafts | None:
    """Return the drafts of a call, without any row. ``None`` without speculative decoding.

    Args:
        config: Settings of the engine.
        draft: The draft model. ``None`` without one.
        sampling: The sampling settings.
        vocabulary: Number of tokens of the tokenizer.

    Raises:
        ConfigError: ``draft`` is missing.
    """
    settings = config.speculative
    if settings is None:
        return None
    drafter: Drafter = NgramDrafter(settings.longest_match)
    if settings.kind == "draft":
        if draft is None:
            raise ConfigError(
                "engine.speculative.kind = draft: this verb loads no draft model; set "
                "engine.speculative.kind=ngram"
            )
        session = draft.session()
        assert isinstance(session, RollbackSession)
        budget = config.max_cache_tokens
        drafter = ModelDrafter(session, sampling, settings.tokens, vocabulary, budget, draft.device)
    return Drafts(drafter, settings.tokens)


def drafting(draft: DecoderProtocol | None) -> AbstractContextManager[None]:
    """Return the context manager inside which the draft model may be called."""
    return nullcontext() if draft is None else draft.running()
