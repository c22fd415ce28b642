"""Build the vLLM engine of a run in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrft.config.model import ModelConfig
from lightrft.config.strategy import EngineConfig
from lightrft.distributed.process_group import ProcessGroup
from lightrft.engines.decoder_protocol import DecoderProtocol
from lightrft.engines.vllm import VLLMEngine
from lightrft.rollout.logprob_check import refuse_weights
from lightrft.utils.errors import ConfigError
from lightrft.utils.module_tensors import plain_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def local_vllm(
    model: ModelConfig,
    engine: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    decoder: DecoderProtocol,
    ranks: ProcessGroup,
) -> VLLMEngine:
    """Build an engine over a copy of the policy, and load the policy's weights into it.

    Args:
        model: The model that both load.
        engine: Settings of the engine.
        tokenizer: Tokenizer of the model.
        decoder: Holds the weights of the policy.
        ranks: All ranks of the run.

    Raises:
        ConfigError: vLLM is not installed, or cannot hold this policy.
        ModelError: vLLM read other weights than the policy has.
    """
    check_vllm(model, ranks)
    weights = dict(decoder.parameters())
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    ends = [*decoder.eos_token_ids, *eos]
    dtype = next(iter(weights.values())).dtype
    shapes = {name: tuple(w.shape) for name, w in weights.items() if plain_name(name) is None}
    built = VLLMEngine(model, tokenizer, engine, ends, dtype, adapter_shapes=shapes)
    # a checkpoint's weights are in the policy, and not in the folder that vLLM loaded
    refuse_weights(built.load_weights(weights.items(), 0), weights, 0)
    return built


def check_vllm(model: ModelConfig, ranks: ProcessGroup) -> None:
    """Raise ``ConfigError`` for a run whose policy ``engine.kind = vllm`` cannot hold."""
    if ranks.size > 1:
        raise ConfigError(
            f"engine.kind = vllm generates in one process, and this run has {ranks.size}; set "
            "launch.processes=1, or engine.kind=native"
        )
    if model.load_in_4bit:
        raise ConfigError(
            "engine.kind = vllm loads whole weights, and model.load_in_4bit = true has others; "
            "leave out model.load_in_4bit, or set engine.kind=native"
        )
