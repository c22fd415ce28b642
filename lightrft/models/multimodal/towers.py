"""How a model reads what is not text: a tower turns one kind of input into features, each of which takes a placeholder token's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """``values [K, H]`` replace the embeddings of K placeholders, in order; ``deep`` are ``[K, H]`` each, added to the hidden states
    of those places after the first layers (DeepStack, arXiv 2406.04334)."""

    values: Tensor
    deep: tuple[Tensor, ...] = ()


Adapt = Callable[[Any, dict[str, Tensor]], dict[str, Any]]
"""``(model, media by name)`` to keywords of the model's own forward, for media whose shape is not the one it takes."""


def as_they_are(model: Any, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """For media that have the names and shapes of the model's forward."""
    return dict(inputs)


Arrange = Callable[[Any, Sequence[Tensor], Sequence[int] | None, Sequence[int] | None], dict[str, Tensor]]
"""``(model, an array per clip, lengths of the clips, placeholders of each)`` to media by name; lengths or placeholders may be unknown."""

Blank = Callable[[Any, tuple[str, ...]], dict[str, Tensor]]
"""``(model, names of a tower's inputs)`` to the smallest media that the tower takes."""


@dataclass(frozen=True, slots=True)
class Tower:
    """One kind of input.

    ``inputs`` name the media that it takes, the one with content first; ``token`` is the config field of the placeholder's id.
    ``hints`` name media that positions alone are made from.
    ``getter`` is the model's method that computes features from what ``adapt`` makes of the media; ``compute`` stands in for both
    where a family has none, or where the model's own wants more than the media hold. ``type_id`` is this kind's entry in
    ``mm_token_type_ids``. ``arrange`` makes media of arrays as transformers' processors give them, where the two differ. ``blank`` is
    what it reads in one process of several that has no media while others have.
    """

    kind: str
    inputs: tuple[str, ...]
    token: str
    getter: str = ""
    adapt: Adapt = as_they_are
    compute: Callable[[Any, dict[str, Any]], Features] | None = None
    type_id: int = 1
    hints: tuple[str, ...] = ()
    arrange: Arrange | None = None
    blank: Blank | None = None

    def token_id(self, config: Any) -> int:
        return getattr(config, self.token)

    def features(self, model: Any, inputs: dict[str, Tensor]) -> Features:
        """Features of ``inputs``, the values of this tower's media."""
        if self.compute is not None:
            return self.compute(model, inputs)
        return pooled(getattr(model, self.getter)(**self.adapt(model, inputs), return_dict=True))


def patch_blank(model: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The patches of one feature, and their grid."""
    vision = model.config.vision_config
    side, width = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {names[0]: torch.ones(side**2, width), names[1]: torch.tensor([[1, side, side]])}


def picture_blank(model: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """One picture of the only size that the tower takes."""
    size = model.config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {names[0]: torch.ones(1, 3, height, width)}


Positions = Callable[[Any, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]
"""``(model, ids [P, L], type ids [P, L], mask [P, L], media by name)`` to positions ``[axes, P, L]``."""


@dataclass(frozen=True, slots=True)
class Reader:
    """What a family reads besides text. ``positions`` is there for rotary embeddings of several axes.

    ``parts`` name prefixes of parameters: ``tower`` and ``projector`` (which may lie inside the tower's). ``both_ways`` says that
    tokens of one picture see one another both ways, ``alone`` that the model's own forward takes media of unequal sizes only in rows
    of their own. ``unread`` are prefixes of parameters that no feature depends on.
    """

    towers: tuple[Tower, ...]
    positions: Positions | None = None
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    both_ways: bool = False
    alone: bool = False
    unread: tuple[str, ...] = ()


def pooled(output: Any) -> Features:
    """Features from what a ``get_..._features`` method gives."""
    values = getattr(output, "pooler_output", output)
    deep = getattr(output, "deepstack_features", None) or ()
    return Features(_joined(values), tuple(_joined(d) for d in deep))


def _joined(values: Any) -> Tensor:
    return values.flatten(0, -2) if isinstance(values, Tensor) else torch.cat([v.flatten(0, -2) for v in values])


def rope_index(model: Any, ids: Tensor, types: Tensor, mask: Tensor, media: dict[str, Tensor]) -> Tensor:
    """Positions ``[3, P, L]`` by the model's own ``get_rope_index``, from the grids in ``media``."""
    known = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {name: media[name] for name in known if name in media}
    return model.model.get_rope_index(ids, mm_token_type_ids=types, attention_mask=mask, **grids)[0]


# Tables of ``families.py`` are made from these.

IMAGE = Tower("image", ("pixel_values", "image_grid_thw"), "image_token_id", "get_image_features", blank=patch_blank)
VIDEO = replace(
    IMAGE,
    kind="video",
    inputs=("pixel_values_videos", "video_grid_thw"),
    token="video_token_id",
    getter="get_video_features",
    type_id=2,
)
TIMED_VIDEO = replace(VIDEO, hints=("second_per_grid_ts",))

_QWEN_PARTS = {"tower": ("model.visual.",), "projector": ("model.visual.merger.",)}
_QWEN3_PARTS = {**_QWEN_PARTS, "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list.")}
QWEN2_VL = Reader((IMAGE, VIDEO), rope_index, _QWEN_PARTS)
QWEN2_5_VL = Reader((IMAGE, TIMED_VIDEO), rope_index, _QWEN_PARTS)
QWEN3_VL = Reader((IMAGE, VIDEO), rope_index, _QWEN3_PARTS)
QWEN3_5 = Reader((IMAGE, VIDEO), rope_index, _QWEN_PARTS)


PIXELS = Tower("image", ("pixel_values",), "image_token_id", "get_image_features", blank=picture_blank)
GEMMA_3 = Reader(
    (PIXELS,),
    parts={"tower": ("model.vision_tower.",), "projector": ("model.multi_modal_projector.",)},
    both_ways=True,
)


def _as_one_row(model: Any, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Crops ``[K, C, H, W]`` as ``[1, K, C, H, W]``, since the model takes some for each of several rows; those stay as they are."""
    return {name: values.unsqueeze(0) if values.ndim == 4 else values for name, values in inputs.items()}


SMOL_VLM = Reader(
    (replace(PIXELS, adapt=_as_one_row),),
    parts={"tower": ("model.vision_model.",), "projector": ("model.connector.",)},
)
