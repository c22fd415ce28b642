"""Models that cut pictures into tiles of 12 or 16 pixels."""

from __future__ import annotations

import transformers
from transformers import PreTrainedConfig

from lightrft.models.tiny.spec import Fields, SavedProcessor, Tiny


def _tower(tower: Fields, **fields: object) -> Fields:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "patch_size": 4,
    }
    return {**sizes, **fields, **tower}


def _internvl(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    vision = _tower(tower, image_size=16, initializer_range=0.1)
    text = {"model_type": "qwen2", **sizes}
    settings: Fields = {
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    }
    return transformers.InternVLConfig(text_config=text, vision_config=vision, **settings)


def _internvl_processor(**settings: object) -> SavedProcessor:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    fields: Fields = {"size": {"height": 16, "width": 16}, "max_patches": 4, **settings}
    return GotOcr2ImageProcessorPil(**fields)


_GRIDS = [[12, 12], [12, 24], [24, 12], [24, 24]]


def _onevision(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    vision: Fields = _tower(
        tower, image_size=12, vision_use_head=False, model_type="siglip_vision_model"
    )
    text = {"model_type": "qwen2", **sizes}
    tokens: Fields = {
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
    }
    return transformers.LlavaOnevisionConfig(
        text_config=text, vision_config=vision, image_grid_pinpoints=_GRIDS, **tokens
    )


def _onevision_processor(**settings: object) -> SavedProcessor:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    fields: Fields = {
        "size": {"height": 12, "width": 12},
        "image_grid_pinpoints": _GRIDS,
        **settings,
    }
    return LlavaOnevisionImageProcessorPil(**fields)


FAMILIES = {
    "internvl": Tiny(
        ("<img>", "</img>", "<IMG_CONTEXT>"),
        {"image": "<IMG_CONTEXT>\n"},
        _internvl,
        _internvl_processor,
    ),
    "llava_onevision": Tiny(
        ("<image>", "<video>"),
        {"image": "<image>\n", "video": "<video>\n"},
        _onevision,
        _onevision_processor,
    ),
}
