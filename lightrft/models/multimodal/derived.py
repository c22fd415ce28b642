"""Towers and input rules of families that read media, derived from transformers' classes.

A class has ``get_image_features``, ``get_video_features`` or ``get_audio_features`` for each kind
of media that it reads, and its config has the placeholder of the kind.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from lightrft.models.multimodal.towers import (
    Features,
    ModalityEncoder,
    OwnForward,
    Tower,
    in_dtype,
    rope_index,
)
from lightrft.utils.errors import ModelError

SHAPE = ".shape"
"""Ending of the name of the shapes ``[items, axes]`` of an input whose items differ in shape."""

AXIS = ".axis"
"""Ending of the name of the axis ``[items, 1]`` along which the items of an input are joined. The
stored input has this axis first."""

KINDS = ("image", "video", "audio")

_TYPES = {"image": 1, "video": 2, "audio": 3}
_OPTIONS = ("_layer", "_strategy", "_encoding", "_mode", "return_dict")
"""Endings of parameters that are no media."""


def places_name(kind: str) -> str:
    """Return the name of the number of placeholders ``[items]`` of each item of ``kind``."""
    return f"{kind}_placeholders"


@dataclass(frozen=True, slots=True)
class Own:
    """Facts about a family that cannot be derived from transformers' classes.

    Attributes:
        plain_head: The logits are the head's outputs, although the text config has a scale.
        prefix: The tokens of a prompt attend to each other in both directions.
        decoder: Path of the module that yields last hidden states, where the model's
            ``get_decoder`` returns one with a head.
        projector: Path of the module that maps the towers' last hidden states to features, where
            the family's method leaves it out.
        featured: Config field with the ids of tokens that get features of their own. The method
            returns them as ``visual_indicator_features``.
        marks: Config fields with the ids of tokens that the model reads as media, besides
            placeholders.
        deep: All features are added to hidden states before layers that the method returns, and
            the embeddings of placeholders are zero.
        text: Model type whose row the language model has, where it has none of its own.
        chat_template: Template that writes a prompt as the processor does, where no file has one.
        writes_start: The processor writes the token of the beginning, which the template does too.
        adds_start: The processor writes the token of the beginning where the template does not.
        forward: How the model's own forward reads media. ``None``: features replace embeddings.
    """

    plain_head: bool = False
    prefix: bool = False
    decoder: str = ""
    projector: str = ""
    featured: str = ""
    marks: tuple[str, ...] = ()
    deep: bool = False
    text: str = ""
    chat_template: str = ""
    writes_start: bool = False
    adds_start: bool = False
    forward: OwnForward | None = None


def loader_of(model_type: str) -> str:
    """Return the name of the transformers class that reads the media of ``model_type``.

    Raises ``ModelError`` if the installed transformers has none.
    """
    for table in ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM"):
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {})
        if model_type in names:
            return names[model_type]
    raise ModelError(
        f"transformers {transformers.__version__} has no class for models of type {model_type!r}; "
        "install a newer one"
    )


def reader_of(model_type: str, own: Own) -> ModalityEncoder:
    """Return towers and input rules of ``model_type``, which transformers knows."""
    model_class = getattr(transformers, loader_of(model_type))
    inner = _inner(model_type)
    config: Any = CONFIG_MAPPING[model_type]
    towers = []
    given = {} if own.forward is None else own.forward.inputs
    for kind in KINDS:
        token = _token_field(config, kind)
        inputs = given.get(kind) if given else _inputs(kind, model_class, inner)
        if token is not None and inputs:
            towers.append(_tower(kind, inputs, token, own))
    positions = rope_index if hasattr(inner, "get_rope_index") else None
    return ModalityEncoder(
        tuple(towers),
        positions,
        parts=_PARTS,
        both_ways="prompt" if own.prefix else None,
        alone=True,
        marks=own.marks,
        has_blanks=False,
        own_forward=own.forward,
    )


_TOWERS = (
    *("vision_tower", "vision_model", "vision_encoder", "visual", "audio_tower", "image_tower"),
    *("video_tower", "encoder", "vqmodel", "generation_embeddings"),
    *("high_res_vision_model", "generation_aligner", "generation_head"),
)
_PROJECTORS = (
    *("multi_modal_projector", "projector", "connector", "aligner", "merger", "visual.merger"),
    *(
        "mm_projector",
        "high_res_vision_alpha",
        "high_res_vision_neck",
        "high_res_vision_proj",
        "resampler_model",
        "visual_embeddings_table",
        "vision_projection",
        "vision_resampler",
        "image_newline",
        "embed_vision",
        "embed_audio",
        "layerwise_projectors",
        "spatial_projectors",
    ),
)
# A class without a head's own module has the parts itself.
_PARTS = {
    "tower": tuple(f"{root}{name}." for root in ("model.", "") for name in _TOWERS),
    "projector": tuple(f"{root}{name}" for root in ("model.", "") for name in _PROJECTORS),
}


def _inner(model_type: str) -> Any:
    """Return the class of the model without its head, or ``None``."""
    name = modeling_auto.MODEL_MAPPING_NAMES.get(model_type)
    return getattr(transformers, name, None) if isinstance(name, str) else None


def _token_field(config: Any, kind: str) -> str | None:
    fields = {*(field.name for field in dataclasses.fields(config)), *config.attribute_map}
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if name in fields:
            return name
    return None


def _inputs(kind: str, model_class: Any, inner: Any) -> tuple[str, ...]:
    """Return the names of the media that the features of ``kind`` are computed from."""
    for owner in (inner, model_class):
        method = getattr(owner, f"get_{kind}_features", None)
        if method is None:
            continue
        names = []
        for name, parameter in inspect.signature(method).parameters.items():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_named and name != "self" and not name.endswith(_OPTIONS):
                names.append(name)
        if names:
            return tuple(names)
    return ()


def _tower(kind: str, inputs: Sequence[str], token: str, own: Own) -> Tower:
    facts = [name + fact for name in inputs for fact in (SHAPE, AXIS)]
    stored = [*inputs, *facts, places_name(kind)]

    def adapt(config: PreTrainedConfig, media: dict[str, Tensor]) -> dict[str, object]:
        if kind == "video":
            _refuse_unequal(config, inputs, media)
        return {name: _joined(name, media) for name in inputs if name in media}

    def features(model: PreTrainedModel, media: dict[str, Tensor]) -> Features:
        getter = f"get_{kind}_features"
        owner: Any = model if hasattr(model, getter) else model.base_model
        found, marks = [], None
        # Padded frames would get features, so that each clip and sound is computed alone.
        alone = kind != "image" and any(name.endswith(SHAPE) for name in media)
        given = [name for name in inputs if name in media]
        parts = [_items(name, media) if alone else [_joined(name, media)] for name in given]
        for values in zip(*parts, strict=True):
            keywords: dict[str, object] = dict(zip(given, values))
            output = getattr(owner, getter)(
                **in_dtype(keywords, inputs, model.dtype), return_dict=True
            )
            if own.projector:
                values = model.get_submodule(own.projector)(output.last_hidden_state)
            else:
                values = getattr(output, "pooler_output", output)
            found.append(_flat(values, _seen(output)))
            marks = output.visual_indicator_features if own.featured else None
        return Features(torch.cat(found), marks=marks)

    def deep_features(model: PreTrainedModel, media: dict[str, Tensor]) -> Features:
        keywords: Any = {name: _joined(name, media) for name in inputs if name in media}
        keywords = in_dtype(keywords, inputs, model.dtype)
        owner: Any = model.base_model
        levels = owner.get_image_features(**keywords).deepstack_features
        deep = tuple(_flat(values) for _, values in levels)
        return Features(torch.zeros_like(deep[0]), deep, layers=tuple(n for n, _ in levels))

    return Tower(
        kind,
        tuple(stored),
        token,
        adapt=adapt,
        compute=deep_features if own.deep else features,
        marks=own.featured,
        type_id=_TYPES[kind],
    )


def _refuse_unequal(
    config: PreTrainedConfig, inputs: Sequence[str], media: dict[str, Tensor]
) -> None:
    """Raise ``ModelError`` for clips of unequal length, which the model's own forward cannot take
    together."""
    for name in inputs:
        shapes = media.get(name + SHAPE)
        if shapes is not None and bool((shapes != shapes[0]).any()):
            raise ModelError(
                f"model type {config.model_type!r}: a prompt has clips of unequal length, and "
                "transformers' own forward takes clips of one length only, so that the layout "
                "cannot be checked against it; set model.check_layout=false"
            )


def _joined(name: str, media: dict[str, Tensor]) -> Tensor:
    """Return the input ``name`` of all items, as transformers' processors join them."""
    if name + AXIS in media:
        return media[name].movedim(0, int(media[name + AXIS][0]))
    return padded(_items(name, media)) if name + SHAPE in media else media[name]


def _items(name: str, media: dict[str, Tensor]) -> list[Tensor]:
    """Return the input ``name`` of each item. Without shapes, each item has one row."""
    if name + SHAPE not in media:
        return list(media[name].split(1))
    sizes = media[name + SHAPE].tolist()
    parts = media[name].split([math.prod(size) for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes)]


def padded(items: Sequence[Tensor]) -> Tensor:
    """Return items joined along the first axis, with zeros at the end of each other axis."""
    widest = [max(sizes) for sizes in zip(*(item.shape[1:] for item in items))]
    whole = items[0].new_zeros(sum(map(len, items)), *widest)
    row = 0
    for item in items:
        corner = (slice(row, row + len(item)), *(slice(0, n) for n in item.shape[1:]))
        whole[corner] = item
        row += len(item)
    return whole


def _seen(output: Any) -> Tensor | None:
    """Return the mask of an encoder's states, ``False`` for padding; ``None`` without one."""
    mask = getattr(output, "attention_mask", None)
    return mask if isinstance(mask, Tensor) and mask.dtype == torch.bool else None


def _flat(values: Any, seen: Tensor | None = None) -> Tensor:
    """Return the features ``[K, H]`` of all items, without states that ``seen`` leaves out."""
    if seen is not None and isinstance(values, Tensor) and seen.shape == values.shape[:-1]:
        return values[seen]
    if isinstance(values, Tensor):
        return values.reshape(-1, values.shape[-1])
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in values])


def _mllama_keywords(
    config: PreTrainedConfig, ids: Tensor, given: dict[str, Any]
) -> dict[str, object]:
    """Return the tiles ``[S, pictures, tiles, ...]``, and which of them each token attends to."""
    if "pixel_values" not in given:
        return {}
    rows = len(ids)
    made = {
        name: given[name].flatten(0, 1).unflatten(0, (rows, -1))
        for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    }
    seen = made["aspect_ratio_mask"]
    token: Any = vars(config)["image_token_index"]
    spans = [get_cross_attention_token_mask(row, token) for row in ids.tolist()]
    dense = convert_sparse_cross_attention_mask_to_dense(
        spans, seen.sum(-1).tolist(), seen.shape[-1], ids.shape[1]
    )
    return {**made, "cross_attention_mask": torch.as_tensor(dense, device=ids.device)}


MOLMO2_STARTS = ("image_start_token_id", "low_res_image_start_token_id", "frame_start_token_id")
MOLMO2_ENDS = ("image_end_token_id", "frame_end_token_id")


def _molmo2_keywords(
    config: PreTrainedConfig, ids: Tensor, given: dict[str, Any]
) -> dict[str, object]:
    """Return the tokens of all pictures, which attend to each other, and the patches that each
    placeholder pools, counted over the pictures of all rows."""
    if "pixel_values" not in given:
        return {"mm_token_type_ids": torch.zeros_like(ids)}
    fields: dict[str, Any] = vars(config)
    opened, closed = (
        torch.isin(ids, torch.tensor([fields[name] for name in names], device=ids.device))
        for names in (MOLMO2_STARTS, MOLMO2_ENDS)
    )
    inside = (opened.long().cumsum(1) > closed.long().cumsum(1)) | closed
    crops, grids = given["image_num_crops"], given["image_grids"]
    begun = (crops.cumsum(0) - crops) * given["pixel_values"].shape[1]
    places = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
    pooled = given["image_token_pooling"]
    moved = pooled + begun.repeat_interleave(places)[:, None]
    # -1 stands for no patch.
    pooled = torch.where(pooled < 0, pooled, moved)
    return {"mm_token_type_ids": inside.long(), "image_token_pooling": pooled}


SOUNDS = OwnForward({"audio": ("input_features", "input_features_mask")})
"""Features of sounds depend on the token ids of the prompt."""

MLLAMA = OwnForward(
    {"image": ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")},
    _mllama_keywords,
    ("cross_attention_mask",),
)
"""Layers of their own attend to the tiles of the pictures before a token."""

GEMMA3N = OwnForward(
    {"image": ("pixel_values",), "audio": ("input_features", "input_features_mask")}
)
"""Towers embed the marks around an item too, and placeholders have embeddings for each layer."""

MOLMO2 = OwnForward(
    {"image": ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")},
    _molmo2_keywords,
    indices=("image_token_pooling",),
)
"""Features are added to the embeddings of placeholders."""
