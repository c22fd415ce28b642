"""List the kinds of engines: how each is built, and what the rest of the package asks of it.

A new kind is a row of ``KINDS`` and a value of the setting ``engine.kind``. A user's kind is an
``EngineKind`` that the setting names. Nothing else outside ``lightrft.engines`` asks for a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig, PolicyModelConfig
from lightrft.config.strategy import SamplingConfig, StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import ProcessGroup
from lightrft.engines.base import Engine
from lightrft.engines.http import HTTPEngine
from lightrft.engines.native import NativeEngine
from lightrft.engines.requests import refuse_filters
from lightrft.engines.vllm import check_sampling
from lightrft.engines.vllm_parts.media import refuse_media
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.expert_replay import ExpertReplay
from lightrft.models.loading.from_pretrained import load_tokenizer, model_settings
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.strategy.single import SingleStrategy
from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import resolve
from lightrft.workers.engine_workers import EngineWorker, NativeEngineWorker, vllm_worker
from lightrft.workers.frozen_models import draft_decoder, local_frozen
from lightrft.workers.local_served import (
    Connect,
    async_served,
    check_served_weights,
    closed_on_error,
    connect_http,
    connect_sglang,
    examine_sglang,
    local_served,
)
from lightrft.workers.local_vllm import Said, SampledConfig, async_vllm, examine_vllm, local_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The settings and the policy from which an engine of a run is built.

    Attributes:
        model: Settings of the model.
        config: Settings of the engine.
        tokenizer: Tokenizer of the model.
        actor: The policy, on its device. Hollow if nothing is compared with a server.
        decoder: Samples from the policy.
        strategy: Strategy of the policy.
        tensor_parallel_size: The setting ``strategy.tensor_parallel``.
        trains: The weights will change, and the engine must follow them.
        media: Kinds of media of the prompts.
        compares: The weights of ``actor`` are loaded, and can be compared with a server's.
    """

    model: ModelConfig
    config: EngineConfig
    tokenizer: PreTrainedTokenizerBase
    actor: Actor
    decoder: KVDecoder
    strategy: Strategy
    tensor_parallel_size: int = 1
    trains: bool = True
    media: Collection[str] = ()
    compares: bool = True

    @property
    def ranks(self) -> ProcessGroup:
        """Return all ranks of the run."""
        return self.strategy.ranks


AsyncBuilder = Callable[
    [RLConfig, TrainableModel[Actor], "PreTrainedTokenizerBase", Strategy], Engine
]
"""Builds an engine with weights of its own on each rank, which generates during training."""
WorkerBuilder = Callable[[PolicyModelConfig, EngineConfig, StrategyConfig], EngineWorker]
"""Makes the object of an engine worker of ``launch.ray.engines``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """A kind of engine.

    Attributes:
        title: Its name in messages.
        build: Builds the engine of a run. Every rank calls it.
        build_async: See ``AsyncBuilder``. ``None``: the engine generates between steps alone.
        build_worker: See ``WorkerBuilder``. ``None``: the engine runs in no worker.
        shares_weights: It samples from the policy itself, reads all media and applies all settings
            of ``sampling``.
        copies_weights: Each process of the run has a copy of the whole model in an engine.
        asks_server: It asks a server that the user has started, which is checked once it answers.
        serves: ``lightrft serve`` can generate with it: it is a ``NativeEngine``.
        connect: Connects to its server. ``None`` without one.
        examine: Says what ``lightrft doctor`` can tell of it before it starts, for a device.
        check_sampling: Raises ``ConfigError`` for settings of ``sampling`` that it cannot apply,
            and takes their section for the message.
        check_media: Raises ``ConfigError`` unless it reads media of the kinds, for a model.
    """

    title: str
    build: Callable[[EngineParts], Engine]
    build_async: AsyncBuilder | None = None
    build_worker: WorkerBuilder | None = None
    shares_weights: bool = False
    copies_weights: bool = False
    asks_server: bool = False
    serves: bool = False
    connect: Connect | None = None
    examine: Callable[[SampledConfig, torch.device], Iterator[Said]] | None = None
    check_sampling: Callable[[SamplingConfig, str], None] | None = None
    check_media: Callable[[ModelConfig, Collection[str]], None] | None = None


def kind_of(engine: EngineConfig) -> EngineKind:
    """Return the kind of ``engine``, which may come from a user's code.

    Raises ``ConfigError`` if ``engine.kind`` names no kind.
    """
    if engine.starts_server:
        return OWN_SGLANG
    found = KINDS.get(engine.kind) or resolve(engine.kind, "engine.kind")
    if not isinstance(found, EngineKind):
        raise ConfigError(
            f"engine.kind = {engine.kind} names a {type(found).__name__}, and not an EngineKind "
            "of lightrft.workers.engine_kinds"
        )
    return found


def engine_worker(
    model: PolicyModelConfig, config: EngineConfig, strategy: StrategyConfig, threads: int
) -> EngineWorker:
    """Make the object of an engine worker.

    Args:
        model: The model to load.
        config: Settings of the engine.
        strategy: Settings that give the device.
        threads: Number of CPU threads.
    """
    torch.set_num_threads(threads)
    build = kind_of(config).build_worker
    assert build is not None  # checked at start
    return build(model, config, strategy)


def check_native(engine: EngineConfig, setting: str, value: object) -> None:
    """Raise ``ConfigError`` if ``setting`` needs the native engine and another one is set.

    Args:
        engine: Settings of the engine.
        setting: Name of the setting.
        value: Its value.
    """
    if not kind_of(engine).shares_weights:
        raise ConfigError(
            f"{setting} = {value} needs the native engine, and engine.kind is "
            f"{engine.kind}; leave out {setting}, or set engine.kind=native"
        )


def kinds_to_check(engine: EngineConfig, *rows: object) -> set[str]:
    """Return the kinds of media that the engine must take.

    It is empty for the native engine, which takes every kind, so that no row is read for it.

    Args:
        engine: Settings of the engine.
        rows: What the engine generates for: datasets with ``media_kinds``, and prompts of text.
    """
    if kind_of(engine).shares_weights:
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
    if check := kind_of(engine).check_media:
        check(model, kinds)


def _native(parts: EngineParts) -> Engine:
    config, actor, strategy = parts.config, parts.actor, parts.strategy
    # The engine generates from the shards of the policy, which must be gathered for it.
    whole = None if parts.ranks.size == 1 else lambda: strategy.gathered(actor)
    draft = draft_decoder(config, parts.model, parts.tokenizer, actor.device)
    return NativeEngine(
        parts.decoder,
        parts.tokenizer,
        config,
        draft=draft,
        whole=whole,
        tensor_parallel_size=parts.tensor_parallel_size,
    )


def _async_native(
    config: RLConfig,
    policy: TrainableModel[Actor],
    tokenizer: PreTrainedTokenizerBase,
    strategy: Strategy,
) -> Engine:
    actor = policy.model
    if strategy.ranks.size == 1:
        decoder = KVDecoder(actor.model, actor.experts).with_own_weights()
    else:
        # Loading initializes adapters at random. That must not advance the generator of the run.
        with torch.random.fork_rng():
            copy = Actor.load(config.model, device=strategy.device).requires_grad_(False).eval()
            decoder = KVDecoder(copy.model, ExpertReplay(copy.model) if actor.experts else None)
    draft = draft_decoder(config.engine, config.model, tokenizer, actor.device)
    return NativeEngine(decoder, tokenizer, config.engine, shared=False, draft=draft)


def _native_worker(
    model: PolicyModelConfig, config: EngineConfig, strategy: StrategyConfig
) -> EngineWorker:
    actor = local_frozen(model, SingleStrategy(strategy))
    experts = ExpertReplay(actor.model) if model.replay_routes else None
    tokenizer = load_tokenizer(model)
    draft = draft_decoder(config, model, tokenizer, actor.device)
    decoder = KVDecoder(actor.model, experts)
    return NativeEngineWorker(NativeEngine(decoder, tokenizer, config, shared=False, draft=draft))


def _vllm(parts: EngineParts) -> Engine:
    # A run that trains sends its weights once its checkpoint is loaded.
    return local_vllm(
        parts.model,
        parts.config,
        parts.tokenizer,
        parts.decoder,
        parts.ranks,
        parts.tensor_parallel_size,
        loads=not parts.trains,
    )


def _async_vllm(
    config: RLConfig,
    policy: TrainableModel[Actor],
    tokenizer: PreTrainedTokenizerBase,
    strategy: Strategy,
) -> Engine:
    return async_vllm(config, policy.model.model, tokenizer, strategy.ranks)


def _connect(engine: EngineConfig) -> Connect:
    connect = kind_of(engine).connect
    assert connect is not None  # of kinds with a server alone
    return connect


def _async_served(
    config: RLConfig,
    policy: TrainableModel[Actor],
    tokenizer: PreTrainedTokenizerBase,
    strategy: Strategy,
) -> Engine:
    return async_served(_connect(config.engine), config, policy, tokenizer, strategy)


def _served(parts: EngineParts) -> Engine:
    return local_served(
        _connect(parts.config),
        parts.model,
        parts.config,
        parts.tokenizer,
        parts.decoder,
        parts.ranks,
        parts.strategy.device,
        parts.tensor_parallel_size,
        trains=parts.trains,
        media=parts.media,
    )


def _http(parts: EngineParts) -> Engine:
    served = _served(parts)
    if isinstance(served, HTTPEngine) and not parts.trains:
        with closed_on_error(served):
            check_served_weights(served, parts.actor, compares=parts.compares)
    return served


def _no_media(_: ModelConfig, kinds: Collection[str]) -> None:
    if kinds:
        raise ConfigError(
            f"engine.kind = sglang cannot generate for prompts with media of kind "
            f"{', '.join(sorted(kinds))}; set engine.kind=native"
        )


def _vllm_media(model: ModelConfig, kinds: Collection[str]) -> None:
    refuse_media(model_settings(model), sorted(kinds))


OWN_SGLANG = EngineKind(
    title="SGLang",
    build=_served,
    build_async=_async_served,
    connect=connect_sglang,
    copies_weights=True,
    examine=examine_sglang,
    check_sampling=refuse_filters,
    check_media=_no_media,
)
"""``sglang`` without ``engine.url``: each process of the run starts a server."""

KINDS: dict[str, EngineKind] = {
    "native": EngineKind(
        title="native",
        build=_native,
        build_async=_async_native,
        build_worker=_native_worker,
        shares_weights=True,
        serves=True,
    ),
    "vllm": EngineKind(
        title="vLLM",
        build=_vllm,
        build_async=_async_vllm,
        build_worker=vllm_worker,
        copies_weights=True,
        examine=examine_vllm,
        check_sampling=check_sampling,
        check_media=_vllm_media,
    ),
    "http": EngineKind(
        title="http",
        build=_http,
        build_async=_async_served,
        connect=connect_http,
        asks_server=True,
    ),
    "sglang": EngineKind(
        title="SGLang",
        build=_served,
        build_async=_async_served,
        connect=connect_sglang,
        asks_server=True,
        check_sampling=refuse_filters,
        check_media=_no_media,
    ),
}
"""The kinds by the setting ``engine.kind``. ``kind_of`` chooses among them."""
