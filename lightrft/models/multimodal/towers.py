"""Towers of multimodal models.

Each tower turns one kind of input into features, which replace placeholder tokens.

Outputs of frozen towers are kept during a step. Several passes read the same media: those of the
reference and of the policy, for example. A frozen tower gives the same features in each. The first
pass keeps them, and the others read them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lightrft.utils.errors import ModelError


@dataclass(frozen=True, slots=True)
class Features:
    """Output of a tower.

    Attributes:
        values: ``[K, H]``, replace the embeddings of K placeholders, in order.
        marks: ``[M, H]``, replace the embeddings of M tokens that mark parts of an item, wherever
            they are. ``None`` for none.
        deep: ``[K, H]`` each, added to the hidden states of the placeholders after the first layers
            (DeepStack, arXiv 2406.04334).
        layers: Layer before which each of ``deep`` is added. Empty for the first layers.
    """

    values: Tensor
    deep: tuple[Tensor, ...] = ()
    marks: Tensor | None = None
    layers: tuple[int, ...] = ()


Adapt = Callable[[PreTrainedConfig, dict[str, Tensor]], dict[str, object]]
"""Maps ``(config of the model, media by name)`` to keywords of the model's own forward, for media
of another shape than it takes."""


Arrange = Callable[
    [PreTrainedModel, Sequence[Tensor], Sequence[int] | None, Sequence[int] | None],
    dict[str, Tensor],
]
"""Maps ``(model, one array per clip, lengths of the clips, placeholders of each)`` to media by
name. Lengths and placeholders may be ``None``."""

Calls = Callable[[dict[str, Tensor]], list[dict[str, Tensor]]]
"""Splits media by name into those of each call of a tower."""

Blank = Callable[[PreTrainedModel, tuple[str, ...]], dict[str, Tensor]]
"""Maps ``(model, names of a tower's inputs)`` to the smallest media that the tower accepts."""


@dataclass(frozen=True, slots=True)
class Tower:
    """One kind of input.

    Attributes:
        kind: ``image``, ``video`` or ``audio``.
        inputs: Names of its media; the first one has the content.
        token: Config field with the placeholder's id, or its path in the config.
        getter: The model's method that computes features from the media that ``adapt`` returns.
        adapt: Maps media to keywords of the model's own forward. By default, these are the media.
        compute: Replaces ``getter`` and ``adapt``, for families without such a method, or whose
            method needs more than the media hold.
        marks: Config field with the ids of the M tokens of ``Features.marks``.
        type_id: Entry of this kind in ``mm_token_type_ids``.
        hints: Names of media that only positions depend on.
        arrange: Builds media from the arrays of transformers' processors, where the two differ.
        blank: Input of a process that has no media while other processes have some.
        calls: Splits media into those of each call. By default, there is one call.
    """

    kind: str
    inputs: tuple[str, ...]
    token: str
    getter: str = ""
    adapt: Adapt = lambda config, inputs: dict(inputs)
    compute: Callable[[PreTrainedModel, dict[str, Tensor]], Features] | None = None
    marks: str = ""
    type_id: int = 1
    hints: tuple[str, ...] = ()
    arrange: Arrange | None = None
    blank: Blank | None = None
    calls: Calls = lambda media: [media]

    def token_id(self, config: PreTrainedConfig) -> int:
        return attrgetter(self.token)(config)

    def features(self, model: PreTrainedModel, inputs: dict[str, Tensor]) -> Features:
        """Return the features of ``inputs``, the values of this tower's media."""
        if self.compute is not None:
            return self.compute(model, inputs)
        output = getattr(model, self.getter)(**self.adapt(model.config, inputs), return_dict=True)
        # some families return the features, others an object that holds them
        values = getattr(output, "pooler_output", output)
        deep = getattr(output, "deepstack_features", None) or ()
        return Features(_joined(values), tuple(_joined(level) for level in deep))


def in_dtype(
    keywords: dict[str, object], names: Sequence[str], dtype: torch.dtype
) -> dict[str, object]:
    """Return ``keywords`` with the floating-point tensors of ``names`` in ``dtype``.

    Args:
        keywords: Keyword arguments of a forward.
        names: Names of the tensors to cast.
        dtype: Type of the weights.
    """
    changed = {}
    for name in names:
        value = keywords.get(name)
        if isinstance(value, Tensor) and value.is_floating_point():
            changed[name] = value.to(dtype)
    return {**keywords, **changed}


def patch_blank(model: PreTrainedModel, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the patches of one feature, and their grid."""
    vision = model.config.vision_config
    side = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    return {names[0]: torch.ones(side**2, width), names[1]: torch.tensor([[1, side, side]])}


def picture_blank(model: PreTrainedModel, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return one picture of the only size that the tower accepts."""
    # an integer for square pictures, else height and width
    size = model.config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {names[0]: torch.ones(1, 3, height, width)}


Positions = Callable[[PreTrainedModel, Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]
"""Maps ``(model, ids [P, L], type ids [P, L], mask [P, L], media by name)`` to positions ``[axes,
P, L]``."""


Keywords = Callable[[PreTrainedConfig, Tensor, dict[str, Any]], dict[str, object]]
"""Maps ``(config of the model, ids [S, T], keywords)`` to keywords that replace or extend these."""


@dataclass(frozen=True, slots=True)
class OwnForward:
    """Media that only the model's own forward reads, since no features replace embeddings.

    Rows are padded then, with one call for each prompt.

    Attributes:
        inputs: Names of the media of each kind.
        keywords: Maps media to keywords of the forward.
        steps: Keywords whose last place each step of decoding gets.
        indices: Inputs that count the rows of another, over all items of a call. ``keywords``
            counts those of each item from where the item begins.
        fills: Values of an input beyond the end of an item that is padded, where they are not 0.
    """

    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keywords: Keywords = lambda config, ids, given: {}
    steps: tuple[str, ...] = ()
    indices: tuple[str, ...] = ()
    fills: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModalityEncoder:
    """The towers and input rules of a multimodal family.

    Attributes:
        towers: One tower for each kind of input.
        positions: Computes positions of several axes. ``None`` for one axis.
        parts: Prefixes of parameter names of ``tower`` and ``projector``. The projector may be
            inside the tower.
        both_ways: Tokens that attend to each other in both directions: those of one picture
            (``media``; in layers with a sliding window alone, ``windowed media``), or all of a
            prompt, with or without media (``prompt``).
        alone: The model's own forward takes media of unequal sizes only in separate rows.
        unread: Prefixes of parameters that no feature depends on.
        marks: Config fields with the ids of tokens that the model's own forward counts as media.
        has_blanks: Its towers have a ``blank``. Otherwise parameters that a process does not use
            get zero gradients by themselves. Where they are sharded, the blanks have the shapes of
            another rank's media.
        own_forward: The model's own forward reads the media. ``None``: features replace embeddings.
    """

    towers: tuple[Tower, ...]
    positions: Positions | None = None
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    both_ways: Literal["media", "windowed media", "prompt"] | None = None
    alone: bool = False
    unread: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    has_blanks: bool = True
    own_forward: OwnForward | None = None


def _joined(values: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(values, Tensor):
        return values.flatten(0, -2)
    # one tensor per picture or clip
    return torch.cat([each.flatten(0, -2) for each in values])


def rope_index(
    model: PreTrainedModel,
    ids: Tensor,
    types: Tensor,
    mask: Tensor,
    media: dict[str, Tensor],
) -> Tensor:
    """Return positions ``[3, P, L]`` by the model's own ``get_rope_index``.

    They depend on the grids in ``media``.

    Args:
        model: The transformers model.
        ids: ``[P, L]`` token ids.
        types: ``[P, L]`` type ids, 0 for text.
        mask: ``[P, L]``, 0 for padding.
        media: Media by name.
    """
    own: Any = model.model.get_rope_index
    grids = {name: media[name] for name in inspect.signature(own).parameters if name in media}
    return own(ids, mm_token_type_ids=types, attention_mask=mask, **grids)[0]


IMAGE = Tower(
    "image",
    ("pixel_values", "image_grid_thw"),
    "image_token_id",
    "get_image_features",
    blank=patch_blank,
)
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
_QWEN3_PARTS = {
    **_QWEN_PARTS,
    "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
}
QWEN2_VL = ModalityEncoder((IMAGE, VIDEO), rope_index, _QWEN_PARTS)
QWEN2_5_VL = ModalityEncoder((IMAGE, TIMED_VIDEO), rope_index, _QWEN_PARTS)
QWEN3_VL = ModalityEncoder((IMAGE, VIDEO), rope_index, _QWEN3_PARTS)
QWEN3_5 = ModalityEncoder((IMAGE, VIDEO), rope_index, _QWEN_PARTS)


PIXELS = Tower(
    "image", ("pixel_values",), "image_token_id", "get_image_features", blank=picture_blank
)
GEMMA_3 = ModalityEncoder(
    (PIXELS,),
    parts={"tower": ("model.vision_tower.",), "projector": ("model.multi_modal_projector.",)},
    both_ways="media",
)


def _as_one_row(config: PreTrainedConfig, inputs: dict[str, Tensor]) -> dict[str, object]:
    """Return crops ``[K, C, H, W]`` as ``[1, K, C, H, W]``, since the model expects crops per row.
    Other shapes stay."""
    made: dict[str, object] = {}
    for name, values in inputs.items():
        made[name] = values.unsqueeze(0) if values.ndim == 4 else values
    return made


SMOL_VLM = ModalityEncoder(
    (replace(PIXELS, adapt=_as_one_row),),
    parts={"tower": ("model.vision_model.",), "projector": ("model.connector.",)},
)


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


@dataclass(frozen=True, slots=True)
class TowerOutputs:
    """Outputs of all towers of a model for the media of one call.

    Attributes:
        features: Features by kind of tower, without kinds that the media lack.
        idle: See ``MergedInputs.idle``.
    """

    features: dict[str, Features]
    idle: Tensor | None


class KeptFeatures:
    """Outputs of towers by ``Segments.media_key``, on the device of the towers.

    A key names the media of a whole call. Features that are read are therefore those of the very
    call that would compute them again, bit for bit. It names the media on all ranks, so that all
    ranks run a sharded tower or none does.
    """

    def __init__(self) -> None:
        self._outputs: dict[Hashable, TowerOutputs] = {}
        self._open = False

    @contextmanager
    def step(self) -> Generator[None]:
        """Keep outputs inside the context, and release them at its end."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self._outputs.clear()

    def get(self, key: Hashable) -> TowerOutputs | None:
        """Return the outputs that were kept for ``key``, or ``None``."""
        return self._outputs.get(key)

    def put(self, key: Hashable, outputs: TowerOutputs) -> None:
        """Keep ``outputs`` for ``key``. ``None`` names no media, and nothing is kept for it.

        Nothing is kept of a pass with gradient. It is the last one of its micro-batch.
        """
        if self._open and key is not None and not torch.is_grad_enabled():
            self._outputs[key] = outputs
