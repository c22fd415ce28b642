"""Tiny Qwen-VL models, with towers of two layers and patches of 4 pixels."""

from __future__ import annotations

import transformers
from transformers import PreTrainedConfig

from lightrft.models.tiny.spec import Fields, SavedProcessor, Tiny

_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_WRITTEN = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


def _ids(ids: dict[str, int]) -> Fields:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, ids.values()))


def processor(**settings: object) -> SavedProcessor:
    """Build a processor with patches of 4 pixels, 2 x 2 of which make a feature."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes: Fields = {
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        **settings,
    }
    return Qwen2VLImageProcessorPil(**sizes)


def text(sizes: Fields, **rope: object) -> Fields:
    """Return the fields of a text config whose positions have three axes."""
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    # the sections share the pairs of a head: time gets what height and width leave
    sections = [head // 2 - 2 * (head // 6), head // 6, head // 6]
    axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **rope}
    return {**sizes, "rope_parameters": axes}


def _qwen2_vl(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 4,
        "hidden_size": sizes["hidden_size"],
        "initializer_range": 0.1,
        **tower,
    }
    return transformers.Qwen2VLConfig(text_config=text(sizes), vision_config=vision, **_ids(ids))


def vision_2_5(sizes: Fields, tower: Fields) -> Fields:
    """Return the fields of Qwen2.5's tower config.

    It has windows of 2 x 2 features, and one layer with full attention.
    """
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": sizes["hidden_size"],
        "initializer_range": 0.1,
        **tower,
    }


def _qwen2_5_vl(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    return transformers.Qwen2_5_VLConfig(
        text_config=text(sizes), vision_config=vision_2_5(sizes, tower), **_ids(ids)
    )


def vision_3(sizes: Fields, tower: Fields) -> Fields:
    """Return the fields of Qwen3's tower config."""
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": sizes["hidden_size"],
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.1,
        **tower,
    }


def _qwen3_text(sizes: Fields) -> Fields:
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return {**text(sizes, mrope_interleaved=True), "head_dim": head}


def _qwen3_vl(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    vision = vision_3(sizes, tower)
    return transformers.Qwen3VLConfig(
        text_config=_qwen3_text(sizes), vision_config=vision, **_ids(ids)
    )


def text_3_moe(sizes: Fields) -> Fields:
    """Return the fields of the config of Qwen3's text model with experts."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        # Square weights would hide a transposition.
        "moe_intermediate_size": sizes["hidden_size"] // 4,
    }
    return {**experts, **_qwen3_text(sizes)}


def _qwen3_vl_moe(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    vision = vision_3(sizes, tower)
    return transformers.Qwen3VLMoeConfig(
        text_config=text_3_moe(sizes),
        vision_config=vision,
        **_ids(ids),
    )


def _qwen3_5_vision(sizes: Fields, tower: Fields) -> Fields:
    """Return the fields of Qwen3-VL's tower config, without features for deeper layers."""
    fields = vision_3(sizes, tower)
    fields.pop("deepstack_visual_indexes", None)
    return fields


def _qwen3_5_text(sizes: Fields) -> Fields:
    """Return the fields of a text config whose layers are recurrent, except for the last, which
    attends."""
    states = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    layers = ["linear_attention"] * (sizes["num_hidden_layers"] - 1) + ["full_attention"]
    return {**states, **_qwen3_text(sizes), "layer_types": layers}


def _qwen3_5(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    vision = _qwen3_5_vision(sizes, tower)
    return transformers.Qwen3_5Config(
        text_config=_qwen3_5_text(sizes), vision_config=vision, **_ids(ids)
    )


def _qwen3_5_moe(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    width = sizes["hidden_size"] // 2
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }
    vision = _qwen3_5_vision(sizes, tower)
    return transformers.Qwen3_5MoeConfig(
        text_config={**experts, **_qwen3_5_text(sizes)},
        vision_config=vision,
        **_ids(ids),
    )


FAMILIES = {
    "qwen2_vl": Tiny(_SPECIAL, _WRITTEN, _qwen2_vl, processor),
    "qwen2_5_vl": Tiny(_SPECIAL, _WRITTEN, _qwen2_5_vl, processor),
    "qwen3_vl": Tiny(_SPECIAL, _WRITTEN, _qwen3_vl, processor),
    "qwen3_vl_moe": Tiny(_SPECIAL, _WRITTEN, _qwen3_vl_moe, processor),
    "qwen3_5": Tiny(_SPECIAL, _WRITTEN, _qwen3_5, processor),
    "qwen3_5_moe": Tiny(_SPECIAL, _WRITTEN, _qwen3_5_moe, processor),
}
