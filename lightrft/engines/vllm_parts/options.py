"""Options of vLLM for a policy: its type, memory, adapters and place among the ranks."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.engines.vllm_parts.media import media_options
from lightrft.engines.vllm_parts.row_formats import INT8, ROW_FORMATS, RowFormat
from lightrft.utils.errors import ConfigError

log = logging.getLogger(__name__)

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``max_lora_rank``."""
FREE_SHARE = 0.01
"""Share of the GPU that must be free when vLLM starts. The trainer's model is in memory too."""
CUDA_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's settings to capture steps that decode, without ``torch.compile``."""
CPU_STEP_TOKENS = 4096
"""Tokens of one step on a CPU, and more for a model that reads longer prompts."""
BLOCK_TOKENS = 256
"""Tokens of cache that rounding to blocks may lose."""


def llm_options(
    package: Any,
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    ranks: int,
    *,
    reads_media: bool = False,
) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM``.

    Args:
        package: The package ``vllm``.
        model: The model to load.
        config: Limits of rows and tokens.
        dtype: Type of the weights and of the computation.
        ranks: Number of ranks of the run. Each has a replica.
        reads_media: The model reads media.

    Raises:
        ConfigError: This model cannot be quantized, or vLLM cannot compute it on a CPU.
    """
    form = ROW_FORMATS.get(config.quantization)
    options: dict[str, Any] = {
        "model": model.path,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        # ids go in and come out, so vLLM needs no tokenizer
        "skip_tokenizer_init": True,
        # else the model's own generation_config changes the sampling
        "generation_config": "vllm",
        "dtype": str(dtype).removeprefix("torch."),
    }
    if reads_media:
        options |= media_options()
    if form is not None:
        options |= form.options
    about = package.EngineArgs(**options).create_model_config()
    parallel = package.config.ParallelConfig(tensor_parallel_size=config.tensor_parallel)
    # vLLM itself looks only when it loads the model
    about.verify_with_parallel_config(parallel)
    if form is not None:
        _refuse_unquantizable(form, about, dtype, reads_media=reads_media)
    if not torch.cuda.is_available():
        _refuse_heads(about)
    options |= {
        "max_num_seqs": config.max_num_seqs,
        # longer requests are refused, and the cache could not hold them
        "max_model_len": min(about.max_model_len, config.max_cache_tokens),
        # of the distribution that was sampled from, after temperature and filters
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    options |= graph_options(config)
    if torch.cuda.is_available():
        # its allocator exists on GPUs alone
        options["enable_sleep_mode"] = True
    else:
        # vLLM takes the seeded generator of a prompt that it splits over several steps back, which
        # a generator of a CPU cannot do
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(options["max_model_len"], CPU_STEP_TOKENS)
    share = config.gpu_memory_utilization
    if share is None:
        options["kv_cache_memory_bytes"] = cache_bytes(about, parallel, config.max_cache_tokens)
    if torch.cuda.is_available() or share is not None:
        # vLLM starts only if this share of the GPU is free, though the cache has its own limit
        options["gpu_memory_utilization"] = share or FREE_SHARE
    if ranks > 1:
        # replicas join the process group of the run, and exchange nothing after the start; the
        # processes of one replica schedule alike, and exchange what their shards compute
        options["distributed_executor_backend"] = "external_launcher"
        options["tensor_parallel_size"] = config.tensor_parallel
    return options | _adapter_options(package, about, model.lora, form)


def _refuse_heads(about: Any) -> None:
    """Raise ``ConfigError`` for heads that vLLM's attention for CPUs cannot compute.

    vLLM itself would end with a ``RuntimeError`` at the first token.

    Args:
        about: vLLM's ``ModelConfig``.
    """
    backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    sizes = backend.get_supported_head_sizes()
    if not about.use_mla and about.get_head_size() not in sizes:
        raise ConfigError(
            f"engine.kind = vllm: the heads of model.path = {about.model} have "
            f"{about.get_head_size()} channels, and on a CPU vLLM takes "
            f"{', '.join(map(str, sizes))}; set engine.kind=native"
        )


def _refuse_unquantizable(
    form: RowFormat, about: Any, dtype: torch.dtype, *, reads_media: bool
) -> None:
    """Raise ``ConfigError`` for a model whose weights cannot be held in ``form``.

    Args:
        form: Format of the quantized layers.
        about: vLLM's ``ModelConfig``.
        dtype: Type of the weights.
        reads_media: The model reads media.
    """
    if dtype == torch.float32:
        raise ConfigError(
            f"engine.quantization = {form.name} needs a model in half precision, which "
            "is float32; set model.dtype=bfloat16, or leave out engine.quantization"
        )
    if about.is_moe or reads_media:
        kind = "a mixture of experts" if about.is_moe else "a model that reads media"
        raise ConfigError(
            f"engine.quantization = {form.name} cannot be compared in {kind}, whose tensors vLLM "
            "names in another way; leave out engine.quantization"
        )


def graph_options(config: EngineConfig) -> dict[str, Any]:
    """Return whether vLLM decodes by CUDA graphs, as ``engine.compile`` says.

    Raises:
        ConfigError: ``engine.compile`` is true, and there is no GPU.
    """
    gpu = torch.cuda.is_available()
    if config.compile and not gpu:
        raise ConfigError(
            "engine.compile = true with engine.kind = vllm needs a GPU, and there is none; leave "
            "out engine.compile"
        )
    if not gpu or config.compile is False:
        return {"enforce_eager": True}
    return {"enforce_eager": False, "compilation_config": dict(CUDA_GRAPHS)}


def cache_bytes(about: Any, parallel: Any, tokens: int) -> int:
    """Return the memory of keys and values in one process, in bytes.

    Args:
        about: vLLM's ``ModelConfig``.
        parallel: Its ``ParallelConfig``.
        tokens: Tokens whose keys and values are held.
    """
    # latent attention (MLA) keeps one vector per token in place of keys and values
    vectors = 1 if about.use_mla else 2 * about.get_num_kv_heads(parallel)
    layers = about.get_num_layers_by_block_type(parallel, "attention")
    of_token = layers * vectors * about.get_head_size() * about.dtype.itemsize
    return (tokens + BLOCK_TOKENS) * of_token


def _adapter_options(
    package: Any, about: Any, lora: LoRAConfig | None, form: RowFormat | None
) -> dict[str, Any]:
    """Return the options to serve adapters; none if vLLM cannot serve them."""
    if lora is None:
        return {}
    reason = unserved_reason(lora)
    kind, _ = package.ModelRegistry.resolve_model_cls(about.architectures, about)
    if not reason and not package.model_executor.models.supports_lora(kind):
        reason = f"its class {kind.__name__} supports no adapters"
    if not reason and form is INT8 and not torch.cuda.is_available():
        # its adapters read the device of a tensor that the kernel replaces
        reason = "on CPUs it has none over INT8 weights"
    if reason:
        log.info("vLLM cannot serve this adapter and gets merged weights: %s", reason)
        return {}
    rank = served_rank(lora)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}


def served_rank(lora: LoRAConfig) -> int:
    """Return the ``max_lora_rank`` of vLLM that serves adapters of these settings."""
    return next(rank for rank in LORA_RANKS if rank >= lora.rank)


def unserved_reason(lora: LoRAConfig) -> str:
    """Return why vLLM cannot serve adapters of these settings, or an empty string."""
    if lora.dora:
        return "it has no DoRA"
    if lora.rank > LORA_RANKS[-1]:
        return f"rank {lora.rank} is above its limit of {LORA_RANKS[-1]}"
    if lora.modules_to_save:
        return "it serves no modules that are trained whole"
    if lora.parts != ("language",):
        return f"it adapts the language model alone, and model.lora.parts = {list(lora.parts)}"
    return ""
