"""Towers that read square tiles of pictures, and video frames as such tiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lightrft.models.multimodal.towers import PIXELS, Features, ModalityEncoder, Tower
from lightrft.utils.errors import ModelError


def _clips(model: Any, inputs: dict[str, Tensor]) -> Features:
    """Run all frames as one clip through the model's own method, and append an end mark to each
    clip."""
    frames, lengths = inputs["pixel_values_videos"], inputs["video_lengths"]
    vision = model.config.vision_config
    each = math.ceil(vision.image_size // vision.patch_size / 2) ** 2
    output = model.get_video_features(frames[None], return_dict=True).pooler_output
    # without the mark that the model appends to its one clip
    made = output[0, : len(frames) * each]
    clips = made.split((lengths * each).tolist())
    # the model marks the end of a clip with the token that ends a line of tiles
    end = model.model.image_newline[None].to(made)
    parts = []
    for clip in clips:
        parts += [clip, end]
    return Features(torch.cat(parts))


def _own_clips(config: PreTrainedConfig, inputs: dict[str, Tensor]) -> dict[str, object]:
    lengths = inputs["video_lengths"]
    if (lengths != lengths[0]).any():
        raise ModelError(
            f"a prompt with clips of {', '.join(map(str, lengths.tolist()))} frames: "
            "transformers' own forward of this model takes "
            "clips of one length only, so the layout cannot be checked against it; "
            "set model.check_layout to false"
        )
    return {"pixel_values_videos": inputs["pixel_values_videos"].unflatten(0, (len(lengths), -1))}


def _picture_blank(model: PreTrainedModel, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Build a blank of one picture of the size of a tile: the tile, and the same as an overview."""
    side = model.config.vision_config.image_size
    # Its module takes a sixth of a second to import.
    from transformers.models.llava_onevision.modeling_llava_onevision import (
        image_size_to_num_patches,
    )

    tiles = image_size_to_num_patches([side, side], model.config.image_grid_pinpoints, side)
    return {names[0]: torch.ones(tiles, 3, side, side), names[1]: torch.tensor([[side, side]])}


def _clip_blank(model: PreTrainedModel, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Build a blank of one frame."""
    side = model.config.vision_config.image_size
    return {names[0]: torch.ones(1, 3, side, side), names[1]: torch.tensor([1])}


_PARTS = {"tower": ("model.vision_tower.",), "projector": ("model.multi_modal_projector.",)}
INTERNVL = ModalityEncoder((PIXELS,), parts=_PARTS)
_PICTURES = Tower(
    "image",
    ("pixel_values", "image_sizes"),
    "image_token_index",
    "get_image_features",
    blank=_picture_blank,
)
_CLIPS = Tower(
    "video",
    ("pixel_values_videos", "video_lengths"),
    "video_token_index",
    adapt=_own_clips,
    compute=_clips,
    blank=_clip_blank,
)
ONEVISION = ModalityEncoder(
    (_PICTURES, _CLIPS),
    parts={**_PARTS, "projector": ("model.multi_modal_projector.", "model.image_newline")},
    alone=True,
    # features are the hidden states before this norm
    unread=("model.vision_tower.post_layernorm.",),
)
