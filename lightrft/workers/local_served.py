"""Build the engine of a run that asks a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.strategy import EngineConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import ProcessGroup, run_on_all_ranks
from lightrft.engines.base import Engine
from lightrft.engines.decoder_protocol import DecoderProtocol
from lightrft.engines.http import HTTPEngine, TextAlone
from lightrft.engines.served.served_engine import ServedEngine
from lightrft.engines.served.start_checks import PausedServer, open_client
from lightrft.engines.served.vllm_server import VLLMServerEngine, resume_paused
from lightrft.engines.sglang import SGLangEngine
from lightrft.engines.text_endpoint import TextEndpoint
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.rollout.logprob_check import refuse_weights
from lightrft.utils.errors import ConfigError
from lightrft.workers.rank_zero_engine import RankZeroEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def local_served(
    model: ModelConfig,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    decoder: DecoderProtocol,
    ranks: ProcessGroup,
    *,
    trains: bool,
) -> Engine:
    """Connect to the server of ``engine``. Send it the policy's weights if they will change.

    With several ranks, rank 0 asks for all of them. Every rank must call it.

    Args:
        model: The model.
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        decoder: Holds the weights of the policy.
        ranks: All ranks of the run.
        trains: The weights will change.

    Raises:
        ConfigError: The server has another model or tokenizer, or cannot follow this policy.
        ModelError: The server has other weights than the policy after they were sent.
        ResourceError: The server does not answer.
    """
    if trains and model.load_in_4bit:
        raise ConfigError(
            f"engine.kind = {engine.kind} sends whole weights, and model.load_in_4bit = true has "
            "others; leave out model.load_in_4bit, or set engine.kind=native"
        )

    def make() -> Engine | None:
        if ranks.rank:
            return None
        lora = model.lora if trains else None
        return _opened(engine, tokenizer, decoder, lora, trains=trains, sends=ranks.size == 1)

    if ranks.size == 1:
        built = make()
        assert built is not None
        return built
    made: list[Engine | None] = []
    # every rank raises what rank 0 finds
    run_on_all_ranks(ranks, lambda: made.append(make()))
    return RankZeroEngine(made[0], ranks)


def async_served(
    config: RLConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    ranks: ProcessGroup,
) -> Engine:
    """Build an engine that generates during training, and gets the trained weights alone.

    Args:
        config: Settings of the run.
        model: The policy.
        tokenizer: Tokenizer of the model.
        ranks: All ranks of the run.

    Raises:
        ConfigError: The run has several processes, or ``local_served`` raises it.
    """
    if ranks.size > 1:
        raise ConfigError(
            f"rollout.staleness = {config.rollout.staleness} with engine.kind = "
            f"{config.engine.kind} needs one process, and launch.processes = {ranks.size}: rank 0 "
            "asks for all ranks, which train meanwhile; set launch.processes=1, "
            "rollout.staleness=0 or engine.kind=native"
        )
    decoder = KVDecoder(model)
    built = local_served(config.model, config.engine, tokenizer, decoder, ranks, trains=True)
    assert isinstance(built, ServedEngine)
    if config.model.lora is not None:
        # adapters are merged into weights that training does not change, and does not send
        built.frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    return built


def _opened(
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    decoder: DecoderProtocol,
    lora: LoRAConfig | None,
    *,
    trains: bool,
    sends: bool,
) -> Engine:
    """Connect to the server.

    Args:
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        decoder: Holds the weights of the policy.
        lora: Settings of the policy's adapters.
        trains: The weights will change.
        sends: Send the weights of a policy that will change now. Shards are sent later.
    """
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    ends = [*decoder.eos_token_ids, *eos]
    kind = SGLangEngine if engine.kind == "sglang" else HTTPEngine
    try:
        try:
            built: ServedEngine = kind.connect(engine, tokenizer, ends)
        except PausedServer:
            if not trains:
                raise
            resume_paused(engine)
            built = kind.connect(engine, tokenizer, ends)
    except TextAlone as error:
        if trains or engine.check_logprobs:
            raise
        return TextEndpoint(open_client(engine), tokenizer, engine, error.model)
    if isinstance(built, HTTPEngine):
        built = _trainable(built, ends, trains=trains)
    if not trains:
        return built
    built.lora = lora
    try:
        built.require_updates()
        if not sends:
            return built
        weights = dict(decoder.parameters())
        refuse_weights(built.load_weights(weights.items(), 0), weights, 0)
    except BaseException:
        built.close()
        raise
    return built


def _trainable(built: HTTPEngine, ends: Sequence[int], *, trains: bool) -> ServedEngine:
    """Return the engine over the same server that can get new weights, if ``trains`` is set."""
    folder = built.config.weights_dir
    if folder is not None and (built.is_own or not trains):
        built.close()
        raise ConfigError(
            f"engine.weights_dir = {folder} changes nothing here: it is for the adapters of a run "
            "that trains on a vLLM server; leave it out"
        )
    return VLLMServerEngine.over(built, ends) if trains and not built.is_own else built
