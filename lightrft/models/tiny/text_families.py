"""Tiny real models of every text family of transformers.

They serve to prove a family or to compare two implementations. One table: each row holds the config
fields that a family needs besides ``_SIZES``. A row also sets fields whose default would hide an
error. Examples are a window shorter than the rows of a test, a logit scale other than 1, and layers
of every kind.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightrft.models.tiny.spec import Fields
from lightrft.models.tiny.text import PRINTABLE, drawn_model
from lightrft.utils.errors import ModelError

WINDOW = 8
"""Keys that a query of a sliding layer attends to in the models of this file."""

_SIZES: Fields = {
    "vocab_size": len(PRINTABLE) + 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 3,
    "initializer_range": 0.1,
    "init_std": 0.1,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    # latent and indexed attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 32,
    # recurrent layers
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "state_size": 8,
    "time_step_rank": 4,
}
"""Fields that are set if a family's config has them."""

_GRANITE = {
    "logits_scaling": 3.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_SLIDING = ["sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention"]
_INDEXED = {"mlp_layer_types": ["dense", "sparse"]}
_DEEPSEEK = {"first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 2}
_WINDOWED = {"sliding_window": WINDOW, "layer_types": _SLIDING}
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
_LLAMA3 = {"rope_parameters": {**_SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}

_ROWS: dict[str, Fields] = {
    "afmoe": {**_WINDOWED, "num_dense_layers": 1},
    "apertus": _LLAMA3,
    "arcee": {},
    "aria_text": {"moe_num_experts": 4},
    "axk1": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4, "n_group": 2},
    "axk2": {**_INDEXED, "num_key_value_heads": 4},
    "bailing_hybrid": {
        "layer_types": _LINEAR,
        "mlp_layer_types": ["dense", "sparse"],
        "num_key_value_heads": 4,
        "num_experts_per_token": 2,
    },
    "bamba": {"attn_layer_indices": [1]},
    "beam": {**_WINDOWED, "mlp_layer_types": ["dense", "sparse"], "final_logit_softcapping": 3.0},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **_WINDOWED},
    "cohere2_moe": {
        "logit_scale": 0.25,
        **_WINDOWED,
        "mlp_layer_types": ["dense", "sparse"],
        "num_shared_experts": 1,
    },
    "ctrl": {"n_embd": 32, "dff": 64},
    "cwm": {**_WINDOWED, **_LLAMA3, "bos_token_id": 1},
    "dbrx": {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {
        **_DEEPSEEK,
        "topk_method": "group_limited_greedy",
        "moe_intermediate_size": 32,
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_INDEXED, "num_key_value_heads": 4},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "sliding_window": WINDOW,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
        "partial_rotary_factor": 0.5,
    },
    "diffllama": {},
    "doge": {"keep_window_size": 64},
    "dots1": {**_WINDOWED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "num_key_value_heads": 4,
        "sliding_window": WINDOW,
        "head_dim": 16,
        "shared_experts_intermediate_size": 32,
        "per_layer_config": {
            1: {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "head_dim": 16,
            }
        },
    },
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_end_index": 1},
    "exaone4": {**_WINDOWED, "sliding_window_pattern": 2},
    "exaone_moe": {
        **_WINDOWED,
        "sliding_window_pattern": 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "falcon": {},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.7,
        "attention_out_multiplier": 0.8,
        "ssm_out_multiplier": 0.6,
    },
    "falcon_mamba": {},
    "flex_olmo": {},
    "flint": {},
    "gemma": {},
    "gemma2": {
        "query_pre_attn_scalar": 8,
        **_WINDOWED,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"query_pre_attn_scalar": 8, **_WINDOWED},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _SLIDING * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": WINDOW,
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "final_logit_softcapping": 3.0,
        "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": _SLIDING * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": WINDOW,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_unified_text": {**_WINDOWED, "global_head_dim": 16, "final_logit_softcapping": 3.0},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"first_k_dense_replace": 1},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
    "glm_moe_dsa": {**_INDEXED, "num_key_value_heads": 4},
    "gpt-sw3": _GPT2,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {**_WINDOWED},
    "gptj": {"rotary_dim": 4},
    "granite": _GRANITE,
    "granite_swa": {**_GRANITE, **_WINDOWED},
    "granitemoe": _GRANITE,
    "granitemoe_swa": {**_GRANITE, **_WINDOWED},
    "granitemoehybrid": {**_GRANITE, "layer_types": _LINEAR, "shared_intermediate_size": 32},
    "granitemoeshared": {**_GRANITE, "shared_intermediate_size": 32},
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {"mlp_layer_types": ["dense", "sparse"]},
    "hy_v4": {**_INDEXED},
    "hyperclovax": _GRANITE,
    "inkling2_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": WINDOW,
        "d_rel": 4,
        "rel_extent": 16,
        "unpadded_vocab_size": _SIZES["vocab_size"],
        "final_logit_softcapping": 3.0,
        "log_scaling_n_floor": 8,
    },
    "inkling_text": {
        "logits_mup_width_multiplier": 2.0,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": WINDOW,
        "d_rel": 4,
        "rel_extent": 16,
        "log_scaling_n_floor": 8,
    },
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {},
    "kimi_linear": {
        "layer_types": _LINEAR,
        "mlp_layer_types": ["dense", "sparse"],
        "num_key_value_heads": 4,
        "num_experts_per_token": 2,
    },
    "kolibri1": _WINDOWED,
    "laguna": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
    },
    "llama": {},
    "llama4_text": {
        "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
        "floor_scale": 8,
    },
    "longcat_flash": {
        "num_layers": 1,
        "zero_expert_num": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "num_key_value_heads": 4,
    },
    "mamba": {},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "mellum": {**_WINDOWED, "mlp_layer_types": ["sparse", "sparse"]},
    "mimo_v2_flash": {**_WINDOWED, "mlp_layer_types": ["dense", "sparse"]},
    "minicpm3": {"dim_model_base": 16, "num_key_value_heads": 4},
    "minimax": {"layer_types": _LINEAR, "block_size": 8},
    "minimax_m2": {},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "rotary_dim": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": _WINDOWED,
    "ministral3": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "modernbert-decoder": {
        "bos_token_id": 1,
        "layer_types": _SLIDING,
        "local_attention": 2 * WINDOW,
    },
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "nanochat": {"final_logit_softcapping": 3.0},
    "nemotron": {},
    "nemotron_h": {
        "n_groups": 1,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": _WINDOWED,
    "olmo_hybrid": {"layer_types": _LINEAR, "linear_num_key_heads": 4},
    "olmoe": {},
    "openai-gpt": _GPT2,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 24},
    "persimmon": {},
    "phi": {},
    "phi3": {"original_max_position_embeddings": 256, "sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW, "lm_head_bias": True},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {"use_sliding_window": True, **_WINDOWED},
    "qwen3_5_moe_text": {"layer_types": _LINEAR},
    "qwen3_5_text": {"layer_types": _LINEAR},
    "qwen3_moe": {},
    "qwen3_next": {"layer_types": _LINEAR},
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": WINDOW,
        "logits_soft_cap": 3.0,
    },
    "rwkv": {"attention_hidden_size": 32},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {
        "query_pre_attn_scalar": 8,
        **_WINDOWED,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "xglm": {"ffn_dim": 64},
    "xlstm": {
        "hidden_size": 128,
        "num_heads": 2,
        "ffn_proj_factor": 0.5,
        "output_logit_soft_cap": 3.0,
    },
    "youtu": {"num_key_value_heads": 4},
    "zamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "num_key_value_heads": 4,
        "chunk_size": 8,
        "adapter_rank": 8,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": WINDOW,
    },
}

OTHERS: dict[str, tuple[str, ...]] = {
    "an encoder, or an encoder with a decoder": (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot"),
        *("blenderbot-small", "camembert"),
        *("data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp"),
        *("pegasus", "plbart", "prophetnet"),
        *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr"),
        *("whisper", "xlm", "xlm-roberta"),
        *("xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "a model of several modalities": (
        *("dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git"),
        *("got_ocr2", "llama4", "mllama"),
        *("moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal"),
        *("qwen3_5", "qwen3_5_moe"),
        "qwen4_exp",
    ),
    "a draft model that reads the states of another": (
        "gemma4_assistant",
        "gemma4_unified_assistant",
    ),
    "not a language model over one row of tokens": (
        "blt",
        "cohere_compass_text",
        "cpmant",
        "reformer",
    ),
}
"""Other model types that transformers registers as causal language models, by the reason why they
are not in the table."""

TEXT_FAMILIES: tuple[str, ...] = tuple(name for name in _ROWS if name in CONFIG_MAPPING)
"""Model types of the table that the installed transformers knows."""


def text_sizes(model_type: str) -> Fields:
    """Return the fields that a tiny language model of ``model_type`` needs; none if it is unknown.

    They may include fields that its config does not have.
    """
    return {**_SIZES, **_ROWS.get(model_type, {})}


def family_config(model_type: str, **overrides: object) -> PreTrainedConfig:
    """Build a tiny config of ``model_type``. ``overrides`` are fields of its config class.

    Raises ``ModelError`` for a type that is not in ``TEXT_FAMILIES``.
    """
    if model_type not in TEXT_FAMILIES:
        raise ModelError(f"unknown family {model_type!r}; known: {', '.join(TEXT_FAMILIES)}")
    kind: Any = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(kind)}
    sizes = {}
    for name, size in _SIZES.items():
        # a config may know a field by another name, too
        if name in fields or kind.attribute_map.get(name) in fields:
            sizes[name] = size
    return kind(**sizes | _ROWS[model_type] | overrides)


def family_model(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: object
) -> PreTrainedModel:
    """Build a tiny model of ``model_type`` with random weights, in evaluation mode.

    Every floating-point parameter gets noise: an initial 0 or 1 would hide a bias or a scale that
    an implementation omits.

    Args:
        model_type: One of ``TEXT_FAMILIES``.
        seed: Seed of the weights.
        dtype: Dtype of the weights.
        **overrides: Fields of the config.
    """
    model = drawn_model(family_config(model_type, **overrides), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).eval()
