"""Check at the start of a run that its engine can generate for its media."""

from __future__ import annotations

from collections.abc import Collection

from lightrft.config.model import ModelConfig
from lightrft.config.strategy import EngineConfig
from lightrft.engines.base import Engine
from lightrft.engines.served.served_engine import ServedEngine
from lightrft.engines.text_endpoint import TextEndpoint
from lightrft.engines.vllm_parts.media import refuse_media
from lightrft.models.loading.from_pretrained import model_settings
from lightrft.utils.errors import ConfigError
from lightrft.workers.rank_zero_engine import RankZeroEngine


def kinds_to_check(engine: EngineConfig, *rows: object) -> set[str]:
    """Return the kinds of media that the engine must take.

    It is empty for the native engine, which takes every kind, so that no row is read for it.

    Args:
        engine: Settings of the engine.
        rows: What the engine generates for: datasets with ``media_kinds``, and prompts of text.
    """
    if engine.kind == "native":
        return set()
    return {kind for one in rows for kind in getattr(one, "media_kinds", ())}


def check_media(model: ModelConfig, engine: EngineConfig, kinds: Collection[str]) -> None:
    """Raise ``ConfigError`` if the engine cannot generate for prompts with media of ``kinds``.

    Call it before models are loaded. Servers are checked by ``check_server_media``.

    Args:
        model: The model of the run.
        engine: Settings of the engine.
        kinds: Kinds of media of the prompts.
    """
    if engine.kind == "vllm":
        refuse_media(model_settings(model), sorted(kinds))
    if engine.kind == "sglang" and kinds:
        raise ConfigError(
            f"engine.kind = sglang cannot generate for prompts with media of kind "
            f"{', '.join(sorted(kinds))}; set engine.kind=native"
        )


def check_server_media(engine: Engine | None, kinds: Collection[str]) -> None:
    """Raise ``ConfigError`` if the server of ``engine`` takes no media of ``kinds``.

    Args:
        engine: The engine of the run.
        kinds: Kinds of media of the prompts.
    """
    inner = engine.engine if isinstance(engine, RankZeroEngine) else engine
    if kinds and isinstance(inner, ServedEngine | TextEndpoint):
        inner.refuse_media(f"prompts with media of kind {', '.join(sorted(kinds))}", kinds)
