"""Towers and input rules of families that read media, derived from transformers' classes.

A class has ``get_image_features``, ``get_video_features`` or ``get_audio_features`` for each kind
of media that it reads, and its config has the placeholder of the kind.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
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


class Classes(NamedTuple):
    """The classes of a family.

    Attributes:
        loader: Name of the transformers class that loads the model.
        model: Class of the model.
        inner: Class of the model without its head. ``None`` if it has none of its own.
        fields: Names of the fields of the config, and with a dot those of its sections.
    """

    loader: str
    model: Any
    inner: Any
    fields: frozenset[str]


@lru_cache
def classes_of(model_type: str) -> Classes:
    """Return the classes of ``model_type``, which transformers knows."""
    loader, config = loader_of(model_type), CONFIG_MAPPING[model_type]
    fields = set(_fields(config))
    for section, part in config.sub_configs.items():
        if dataclasses.is_dataclass(part):
            fields |= {f"{section}.{name}" for name in _fields(part)}
    return Classes(loader, getattr(transformers, loader), _inner(model_type), frozenset(fields))


def _fields(config: Any) -> set[str]:
    """Return the names of the fields of a class of configs."""
    return {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)


_LOADERS = ("AutoModelForMultimodalLM", "AutoModelForImageTextToText", "AutoModelForCausalLM")


def classes_of_code(config: PreTrainedConfig) -> Classes | None:
    """Return the classes of a model folder with code that has methods that compute features.

    ``None`` for other models. The code is run only if ``config`` was made by it, so that the user
    has allowed it.
    """
    if not type(config).__module__.startswith("transformers_modules."):
        return None
    named: Mapping[str, str] = vars(config).get("auto_map") or {}
    loader = next((name for name in _LOADERS if name in named), None)
    if loader is None:
        return None
    model: Any = _code(named[loader], config.name_or_path)
    if not any(hasattr(model, f"get_{kind}_features") for kind in KINDS):
        return None
    sections = config.to_dict()
    fields = {*sections, *config.attribute_map}
    for section, part in sections.items():
        fields |= {f"{section}.{name}" for name in part} if isinstance(part, dict) else set()
    return Classes(loader, model, None, frozenset(fields))


_code = lru_cache(get_class_from_dynamic_module)


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


def reader_of(classes: Classes, own: Own) -> ModalityEncoder:
    """Return towers and input rules of a family."""
    model_class, inner = classes.model, classes.inner
    towers = []
    given = {} if own.forward is None else own.forward.inputs
    for kind in KINDS:
        token = _token_field(classes.fields, kind)
        inputs = given.get(kind) if given else _inputs(kind, model_class, inner)
        if token is not None and inputs:
            towers.append(_tower(kind, inputs, token, own))
    has_positions = hasattr(inner or model_class, "get_rope_index")
    positions = rope_index if has_positions else None
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
    *("video_tower", "encoder", "vqmodel", "generation_embeddings", "embed_tokens_extend"),
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
        "vision_tower.patch_merger",
        "image_newline",
        "embed_vision",
        "embed_audio",
        "layerwise_projectors",
        "spatial_projectors",
        "embed_tokens_extend.image_embed.img_projection",
        "embed_tokens_extend.image_embed.global_img_feature_extensor",
        "embed_tokens_extend.image_embed.sub_img_feature_extensor",
        "embed_tokens_extend.audio_embed.up_proj",
        "embed_tokens_extend.audio_embed.down_proj",
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


def _token_field(fields: Collection[str], kind: str) -> str | None:
    """Return the path of the id of a placeholder, in the config or in that of the tower."""
    section = "vision_config" if kind == "image" else f"{kind}_config"
    for prefix, ending in product(("", f"{section}."), ("id", "index")):
        if (name := f"{prefix}{kind}_token_{ending}") in fields:
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
    fills = {} if own.forward is None else own.forward.fills

    def adapt(config: PreTrainedConfig, media: dict[str, Tensor]) -> dict[str, object]:
        if kind == "video":
            _refuse_unequal(config, inputs, media)
        return {n: _joined(n, media, fills.get(n, 0)) for n in inputs if n in media}

    def calls(media: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        # Padded frames would get features, so that each clip and sound is computed alone.
        if kind == "image" or not any(name.endswith(SHAPE) for name in media):
            return [media]
        parts: dict[str, Sequence[Tensor]] = {}
        for name, values in media.items():
            shaped = name + SHAPE in media
            parts[name] = values.split(_sizes(name, media) if shaped else 1)
        return [dict(zip(parts, one)) for one in zip(*parts.values(), strict=True)]

    def features(model: PreTrainedModel, media: dict[str, Tensor]) -> Features:
        getter = f"get_{kind}_features"
        owner: Any = model if hasattr(model, getter) else model.base_model
        found, marks = [], None
        for part in calls(media):
            keywords: dict[str, object] = {}
            for name in inputs:
                if name in part:
                    keywords[name] = _joined(name, part)
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
        calls=calls,
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


def _joined(name: str, media: dict[str, Tensor], fill: float = 0) -> Tensor:
    """Return the input ``name`` of all items, as transformers' processors join them."""
    if name + AXIS in media:
        return media[name].movedim(0, int(media[name + AXIS][0]))
    return padded(_items(name, media), fill) if name + SHAPE in media else media[name]


def _items(name: str, media: dict[str, Tensor]) -> list[Tensor]:
    """Return the input ``name`` of each item. Without shapes, each item has one row."""
    if name + SHAPE not in media:
        return list(media[name].split(1))
    parts = media[name].split(_sizes(name, media))
    return [part.view(size) for part, size in zip(parts, media[name + SHAPE].tolist())]


def _sizes(name: str, media: dict[str, Tensor]) -> list[int]:
    """Return the number of elements of each item of the input ``name``."""
    return [math.prod(size) for size in media[name + SHAPE].tolist()]


def padded(items: Sequence[Tensor], fill: float = 0) -> Tensor:
    """Return items joined along the first axis, with ``fill`` at the end of each other axis."""
    widest = [max(sizes) for sizes in zip(*(item.shape[1:] for item in items))]
    whole = items[0].new_full((sum(map(len, items)), *widest), fill)
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

PHI4_MULTIMODAL = OwnForward(
    {
        "image": ("image_pixel_values", "image_sizes", "image_attention_mask"),
        "audio": ("audio_input_features", "audio_embed_sizes"),
    },
    fills={"image_attention_mask": 1},
)
"""No method computes features, and those of sounds depend on whether a call has pictures."""

MOLMO2 = OwnForward(
    {"image": ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")},
    _molmo2_keywords,
    indices=("image_token_pooling",),
)
"""Features are added to the embeddings of placeholders."""
