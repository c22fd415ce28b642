"""A tiny SmolVLM and a tiny Idefics 3, with a tower of two layers.

Crops of 16 pixels become 4 tokens, and a picture has at most 2 x 2 crops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import transformers
from transformers import PreTrainedConfig

from lightrft.models.tiny.spec import Fields, SavedProcessor, Tiny


def _processor(**settings: object) -> SavedProcessor:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    sizes: Fields = {
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
        **settings,
    }
    return SmolVLMImageProcessorPil(**sizes)


def _config(
    kind: Callable[..., PreTrainedConfig],
    sizes: Fields,
    ids: dict[str, int],
    tower: Fields,
) -> PreTrainedConfig:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "initializer_range": 0.1,
        **tower,
    }
    text = {"model_type": "llama", **sizes}
    return kind(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=ids["<image>"]
    )


_CROPS = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))

_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", *_CROPS)

FAMILIES = {
    name: Tiny(_SPECIAL, {"image": "<image>"}, partial(_config, kind), _processor)
    for name, kind in (
        ("smolvlm", transformers.SmolVLMConfig),
        ("idefics3", transformers.Idefics3Config),
    )
}
