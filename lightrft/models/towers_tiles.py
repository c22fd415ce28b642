"""Towers that read square tiles of pictures, and frames as such tiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightrft.models.towers import Features, Reader, Tower
from lightrft.utils.errors import ModelError


def _clips(model: Any, inputs: dict[str, Tensor]) -> Features:
    """All frames in one call of the model's own, as if of one clip, with the mark of a clip's end after each."""
    frames, lengths = inputs["pixel_values_videos"], inputs["video_lengths"]
    vision = model.config.vision_config
    each = math.ceil(vision.image_size // vision.patch_size / 2) ** 2
    made = model.get_video_features(frames[None], return_dict=True).pooler_output[0, : len(frames) * each]
    clips = made.split((lengths * each).tolist())
    end = model.model.image_newline[None].to(made)
    return Features(torch.cat([part for clip in clips for part in (clip, end)]))


def _own_clips(model: Any, inputs: dict[str, Tensor]) -> dict[str, Any]:
    lengths = inputs["video_lengths"]
    if (lengths != lengths[0]).any():
        raise ModelError(
            f"a prompt with clips of {', '.join(map(str, lengths.tolist()))} frames: transformers' own forward of this model takes "
            "clips of one length only, so the layout cannot be checked against it; set model.check_layout to false"
        )
    return {"pixel_values_videos": inputs["pixel_values_videos"].unflatten(0, (len(lengths), -1))}


_PARTS = {"tower": ("model.vision_tower.",), "projector": ("model.multi_modal_projector.",)}
INTERNVL = Reader((Tower("image", ("pixel_values",), "image_token_id", "get_image_features"),), parts=_PARTS)
ONEVISION = Reader(
    (
        Tower("image", ("pixel_values", "image_sizes"), "image_token_index", "get_image_features"),
        Tower("video", ("pixel_values_videos", "video_lengths"), "video_token_index", adapt=_own_clips, compute=_clips),
    ),
    parts={**_PARTS, "projector": ("model.multi_modal_projector.", "model.image_newline")},
    alone=True,
)
