"""A tiny Gemma 3 with a tower of two layers.

A picture is 9 tokens, one more than the window of the sliding layers.
"""

from __future__ import annotations

import transformers
from transformers import PreTrainedConfig

from lightrft.models.tiny.spec import Fields, SavedProcessor, Tiny
from lightrft.models.tiny.text import sliding_then_full


def _processor(**settings: object) -> SavedProcessor:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    sizes: Fields = {"size": {"height": 24, "width": 24}, **settings}
    return Gemma3ImageProcessorPil(**sizes)


def _gemma3(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "vision_use_head": False,
        **tower,
    }
    text = {
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "sliding_window": 8,
        "layer_types": sliding_then_full(sizes["num_hidden_layers"]),
        **sizes,
    }
    begin, end, soft = ids.values()
    fields: Fields = {
        "boi_token_index": begin,
        "eoi_token_index": end,
        "image_token_index": soft,
    }
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=9, **fields
    )


FAMILIES = {
    "gemma3": Tiny(
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        {"image": "<start_of_image>"},
        _gemma3,
        _processor,
    ),
}
